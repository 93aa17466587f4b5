"""Compare candidate values of `seq_len` by the lengths of the samples, and recommend the best candidate.

Input: an int32 array of sample lengths. Output: a Candidate for each `seq_len` (dropped records and tokens,
utilization, attention span), length percentiles and a histogram. The candidates are planned as by `pack`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from energon_packed.arrays import blocks
from energon_packed.errors import ConfigError
from energon_packed.inspection.report import log_integer_bins
from energon_packed.packing import plan_counts
from energon_packed.packing.planner import count_packs

Int32 = npt.NDArray[np.int32]
PERCENTS = (1, 5, 25, 50, 75, 90, 95, 99, 99.9, 100)
# Longer rows need more memory, so the smallest candidate below this share of dropped tokens is recommended.
_MAX_DROPPED = 0.01
_LOW_UTILIZATION = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Planning result for one `seq_len`.

    Attributes:
        seq_len: tokens per row.
        dropped_records, dropped_tokens: shares of records and tokens that do not fit a row, 0 to 1.
        packs: number of packs.
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
    """Compute the length that each percentage of samples does not exceed."""
    ends = np.cumsum(_counts(lengths, int(lengths.max())))
    ranks = np.ceil(len(lengths) * (np.array(PERCENTS) / 100)) - 1  # of the sorted lengths
    values = np.searchsorted(ends, np.maximum(ranks, 0), side="right")
    return {percent: int(value) for percent, value in zip(PERCENTS, values, strict=True)}


def _counts(lengths: Int32, longest: int) -> npt.NDArray[np.int64]:
    """Number of samples of each length up to `longest`: int64 (longest + 1,)."""
    counts = np.zeros(longest + 1, dtype=np.int64)
    for block in blocks(len(lengths)):
        own = lengths[block]
        counts += np.bincount(own[own <= longest], minlength=longest + 1)
    return counts


def histogram(lengths: Int32, bins: int = 16) -> list[tuple[int, int, int]]:
    """Count lengths in logarithmic bins: (first length, last length, samples) per bin."""
    # The edges are halfway between integers, see `log_integer_bins`.
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
    """Plan the samples for each candidate, and return the results in ascending order of seq_len.

    Args:
        lengths: int32 (n,), lengths of the samples that can be packed.
        seq_lens: candidate values.
        records: number of all records, including rejected records; denominator of `dropped_records`.
        algorithm, max_samples, multiple: arguments of `pack_lengths`.

    Raises:
        ConfigError: `lengths` is empty, or a candidate is below `multiple`.
    """
    if len(lengths) == 0:
        raise ConfigError(
            "there are no lengths, because no record can be packed. Run energon-packed pack to get the reject reasons."
        )
    out = []
    for seq_len in sorted(set(seq_lens)):
        if seq_len < multiple:
            raise ConfigError(f"`seq_len` must be at least `pad_multiple` {multiple}, got {seq_len}.")
        counts, tokens = _counts(lengths, seq_len), np.arange(seq_len + 1)
        if algorithm == "bfd":
            packs = plan_counts(counts, seq_len, max_samples=max_samples, multiple=multiple).num_packs
        else:
            packs = count_packs(lengths, seq_len, algorithm, max_samples, multiple)
        # A sample fits if its length, rounded up to `multiple`, fits. Float64, as squares of lengths overflow int64.
        kept = np.where(tokens <= seq_len - seq_len % multiple, counts, 0).astype(np.float64)
        kept_tokens = int((kept * tokens).sum())
        # Rejected records are in the denominator of records only: their tokens are unknown.
        total = lengths.sum(dtype=np.int64)
        out.append(
            Candidate(
                seq_len=seq_len,
                dropped_records=(len(lengths) - int(kept.sum())) / records,
                dropped_tokens=float(1 - kept_tokens / total),
                packs=packs,
                utilization=kept_tokens / (packs * seq_len) if packs else 1.0,
                samples_per_pack=int(kept.sum()) / max(packs, 1),
                # A causal token attends to itself and all earlier tokens of its sample: L * (L + 1) / 2 pairs for L
                # tokens.
                attention=float((kept * (tokens * (tokens + 1) / 2)).sum() / max(kept_tokens, 1)),
            )
        )
    return out


def recommend(candidates: Sequence[Candidate], lengths: Int32) -> tuple[Candidate, str]:
    """Return the recommended candidate and the reason, in words.

    Args:
        candidates: result of `compare`.
        lengths: as passed to `compare`.
    """
    good = [candidate for candidate in candidates if candidate.dropped_tokens < _MAX_DROPPED]
    if not good:
        # The last candidate drops the fewest tokens; a smaller candidate may drop as few.
        best = next(each for each in candidates if each.dropped_tokens <= candidates[-1].dropped_tokens)
        longer = sum(int((lengths[block] > best.seq_len).sum()) for block in blocks(len(lengths)))
        return best, (
            f"no larger candidate drops less, but it drops {best.dropped_tokens:.1%} of the tokens: {longer:,} "
            f"of {len(lengths):,} samples are longer, up to {int(lengths.max()):,} tokens; try a larger value, or set "
            "`overlong` to 'truncate'"
        )
    best = good[0]
    dropped = "none" if best.dropped_tokens == 0 else f"{best.dropped_tokens:.2%}"
    reason = f"the smallest candidate that drops less than {_MAX_DROPPED:.0%} of the tokens ({dropped})"
    if best.utilization < _LOW_UTILIZATION:
        reason += f"; utilization is only {best.utilization:.1%}, a larger value may improve it"
    return best, reason
