"""What each candidate `seq_len` would drop, waste and cost, and which one to take."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from energon_packed.errors import ConfigError
from energon_packed.packing import pack_lengths

Int32 = npt.NDArray[np.int32]
PERCENTS = (1, 5, 25, 50, 75, 90, 95, 99, 99.9, 100)
_MOST_LOST = 0.01  # share of the tokens that a recommended seq_len may drop


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One `seq_len`.

    Attributes:
        seq_len: tokens in a row.
        dropped_records, dropped_tokens: shares that do not fit, 0 to 1.
        packs: rows, planned as `pack` plans them.
        utilization: tokens over packs * seq_len.
        samples_per_pack: mean.
        attention: tokens that a token can look back on, on average: sum(L * (L + 1) / 2) / sum(L). Packing keeps
            samples apart, so it grows with the samples and not with the row.
    """

    seq_len: int
    dropped_records: float
    dropped_tokens: float
    packs: int
    utilization: float
    samples_per_pack: float
    attention: float


def percentiles(lengths: Int32) -> dict[float, int]:
    """Length that this many percent of the samples do not exceed."""
    values = np.percentile(lengths, PERCENTS, method="inverted_cdf")
    return {percent: int(value) for percent, value in zip(PERCENTS, values, strict=True)}


def histogram(lengths: Int32, bins: int = 16) -> list[tuple[int, int, int]]:
    """(first length, last length, samples) of bins that grow by a constant factor."""
    edges = np.unique(np.geomspace(max(1, lengths.min()), lengths.max() + 1, bins + 1).astype(np.int64))
    if len(edges) < 2:
        edges = np.array([lengths.min(), lengths.max() + 1])
    edges[-1] = lengths.max() + 1
    counts, _ = np.histogram(lengths, edges)
    return [(int(a), int(b) - 1, int(n)) for a, b, n in zip(edges, edges[1:], counts, strict=False)]


def compare(
    lengths: Int32,
    seq_lens: Sequence[int],
    *,
    records: int,
    algorithm: str = "bfd",
    max_samples: int | None = None,
    multiple: int = 1,
) -> list[Candidate]:
    """Candidates in rising order.

    Args:
        lengths: int32 (n,), of the samples that can be packed.
        seq_lens: candidates.
        records: all records, those that cannot be packed included: what `dropped_records` is a share of.
        algorithm, max_samples, multiple: as `pack_lengths` takes them.

    Raises:
        ConfigError: no sample, or a candidate below `multiple`.
    """
    if len(lengths) == 0:
        raise ConfigError("no record can be packed, so there is no length to look at; try pack, which says why")
    out = []
    for seq_len in sorted(set(seq_lens)):
        if seq_len < multiple:
            raise ConfigError(f"seq_len is {seq_len}; it must be at least {multiple}")
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
    """The candidate to take, and why.

    Args:
        candidates: as `compare` gives them.
        lengths: as it was given.
    """
    enough = [one for one in candidates if one.dropped_tokens < _MOST_LOST]
    if not enough:
        best = next(one for one in candidates if one.dropped_tokens <= candidates[-1].dropped_tokens)
        over = lengths[lengths > best.seq_len]
        return best, (
            f"no longer one drops less, and it drops {best.dropped_tokens:.1%} of the tokens: {len(over):,} of "
            f"{len(lengths):,} samples are longer, up to {int(lengths.max()):,}; look at a longer one, cut them with "
            "--overlong truncate, or let them go"
        )
    best = enough[0]
    lost = "nothing" if best.dropped_tokens == 0 else f"{best.dropped_tokens:.2%} of the tokens"
    reason = f"the shortest that drops under {_MOST_LOST:.0%} of the tokens ({lost})"
    if best.utilization < 0.95:
        reason += f"; rows are only {best.utilization:.1%} full, so a longer one may pay"
    return best, reason
