"""Compare candidate `seq_len` values by dropped tokens, utilization and attention span, and recommend one."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from energon_packed.errors import ConfigError
from energon_packed.inspection.report import log_integer_bins
from energon_packed.packing import pack_lengths

Int32 = npt.NDArray[np.int32]
PERCENTS = (1, 5, 25, 50, 75, 90, 95, 99, 99.9, 100)
_MOST_LOST = 0.01  # maximum share of tokens that a recommended seq_len may drop


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Planning result for one `seq_len`.

    Attributes:
        seq_len: tokens per row.
        dropped_records, dropped_tokens: shares that do not fit a row, 0 to 1.
        packs: number of packs, planned as by `pack`.
        utilization: tokens / (packs * seq_len).
        samples_per_pack: mean number of samples per pack.
        attention: mean attention span in tokens, sum(L * (L + 1) / 2) / sum(L). Tokens attend only to their own
            sample, so the span depends on the sample lengths L, not on seq_len.
    """

    seq_len: int
    dropped_records: float
    dropped_tokens: float
    packs: int
    utilization: float
    samples_per_pack: float
    attention: float


def percentiles(lengths: Int32) -> dict[float, int]:
    """Length percentiles: the length that each percentage of samples does not exceed."""
    values = np.percentile(lengths, PERCENTS, method="inverted_cdf")
    return {percent: int(value) for percent, value in zip(PERCENTS, values, strict=True)}


def histogram(lengths: Int32, bins: int = 16) -> list[tuple[int, int, int]]:
    """Histogram with logarithmic bins: (first length, last length, samples) per bin."""
    edges = log_integer_bins(lengths, bins)
    counts, _ = np.histogram(lengths, edges)
    return [(int(a + 0.5), int(b), int(n)) for a, b, n in zip(edges, edges[1:], counts, strict=False)]


def compare(
    lengths: Int32,
    seq_lens: Sequence[int],
    *,
    records: int,
    algorithm: str = "bfd",
    max_samples: int | None = None,
    multiple: int = 1,
) -> list[Candidate]:
    """Plan each candidate; results in ascending order of seq_len.

    Args:
        lengths: int32 (n,), lengths of the samples that can be packed.
        seq_lens: candidate values.
        records: number of all records, including rejected ones; denominator of `dropped_records`.
        algorithm, max_samples, multiple: as for `pack_lengths`.

    Raises:
        ConfigError: `lengths` is empty, or a candidate is below `multiple`.
    """
    if len(lengths) == 0:
        raise ConfigError(
            "no record can be packed, so there are no lengths; run energon-packed pack to get the reject reasons"
        )
    out = []
    for seq_len in sorted(set(seq_lens)):
        if seq_len < multiple:
            raise ConfigError(f"`seq_len` is {seq_len}; it must be at least {multiple}")
        plan = pack_lengths(lengths, seq_len, algorithm=algorithm, max_samples=max_samples, multiple=multiple)
        kept = lengths[lengths <= seq_len - seq_len % multiple].astype(np.float64)
        total = lengths.sum(dtype=np.int64)
        out.append(
            Candidate(
                seq_len=seq_len,
                dropped_records=len(plan.overlong) / records,
                dropped_tokens=float(1 - plan.tokens / total),
                packs=plan.num_packs,
                utilization=plan.utilization,
                samples_per_pack=len(kept) / max(plan.num_packs, 1),
                attention=float((kept * (kept + 1) / 2).sum() / max(kept.sum(), 1)),
            )
        )
    return out


def recommend(candidates: Sequence[Candidate], lengths: Int32) -> tuple[Candidate, str]:
    """Return the recommended candidate and the reason.

    Args:
        candidates: result of `compare`.
        lengths: as passed to `compare`.
    """
    enough = [one for one in candidates if one.dropped_tokens < _MOST_LOST]
    if not enough:
        best = next(one for one in candidates if one.dropped_tokens <= candidates[-1].dropped_tokens)
        over = lengths[lengths > best.seq_len]
        return best, (
            f"no larger candidate drops less, but it drops {best.dropped_tokens:.1%} of the tokens: {len(over):,} of "
            f"{len(lengths):,} samples are longer, up to {int(lengths.max()):,} tokens; try a larger value, or set "
            "`overlong` to 'truncate'"
        )
    best = enough[0]
    lost = "none" if best.dropped_tokens == 0 else f"{best.dropped_tokens:.2%}"
    reason = f"the smallest candidate that drops less than {_MOST_LOST:.0%} of the tokens ({lost})"
    if best.utilization < 0.95:
        reason += f"; utilization is only {best.utilization:.1%}, a larger value may improve it"
    return best, reason
