"""Which records share a row, and which packs make a shard: all lengths at once, in the driver."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from energon_packed.errors import Reason
from energon_packed.packing import PackPlan, pack_lengths
from energon_packed.pipeline.chunks import KINDS, STATUSES
from energon_packed.pipeline.options import PackOptions
from energon_packed.pipeline.table import RecordTable

Int64 = npt.NDArray[np.int64]
OVERLONG = STATUSES.index(Reason.OVERLONG.value)
_MEMBER_OVERHEAD = 1024  # bytes of header and padding of a tar member, at most
_TOKENS_JSON = 200  # bytes of JSON for one sample of tokens, about


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardPlan:
    """One shard.

    Attributes:
        number: number of the shard.
        split: `train`, `val` or `test`.
        first_pack: number of its first pack.
        rows: int64 (samples,), records of all its packs, pack after pack.
        offsets: int64 (packs+1,), pack p is `rows[offsets[p]:offsets[p + 1]]`.
        num_bytes: of its tar, as estimated from the bytes of media and texts.
    """

    number: int
    split: str
    first_pack: int
    rows: Int64
    offsets: Int64
    num_bytes: int


def plan_packs(table: RecordTable, status: npt.NDArray[np.int8], options: PackOptions) -> PackPlan:
    """Pack all records whose status is 0; `indices` are record numbers.

    Args:
        table: measured records.
        status: int8 (n,), `table.status` with plan-time rejects.
        options: of the run.
    """
    rows = np.flatnonzero(status == 0)
    lengths = table.length if options.truncate is None else np.minimum(table.length, options.truncate)
    groups = [rows]
    if options.group_by == "media":
        groups = [rows[table.kind[rows] == kind] for kind in range(len(KINDS))]
    with ThreadPoolExecutor(len(groups)) as pool:  # in parallel: the kernels release the GIL
        plans = list(pool.map(lambda group: _plan_group(lengths[group], options), groups))
    shift = np.cumsum([0, *(plan.offsets[-1] for plan in plans)])
    joined = PackPlan(
        indices=np.concatenate([group[plan.indices] for group, plan in zip(groups, plans, strict=True)]),
        offsets=np.concatenate([[0], *(plan.offsets[1:] + s for plan, s in zip(plans, shift, strict=False))]).astype(
            np.int64
        ),
        overlong=np.zeros(0, dtype=np.int64),
        tokens=sum(plan.tokens for plan in plans),
        capacity=options.seq_len,
    )
    order = np.random.default_rng(options.seed).permutation(joined.num_packs)
    return joined.reordered(order)


def _plan_group(lengths: npt.NDArray[np.int32], options: PackOptions) -> PackPlan:
    single = not options.codec.packed
    return pack_lengths(
        lengths,
        options.seq_len,
        algorithm="sequential" if single else options.algorithm,
        max_samples=1 if single else options.max_samples_per_pack,
        multiple=options.pad_multiple,
    )


def plan_shards(plan: PackPlan, table: RecordTable, options: PackOptions) -> list[ShardPlan]:
    """Cut the packs into splits, and each split into shards of even size within the limits."""
    content = table.media_bytes + _MEMBER_OVERHEAD * table.num_images
    if options.codec.stores_tokens:
        content += 4 * table.length.astype(np.int64) + _TOKENS_JSON
    else:
        content += table.text_bytes
    sizes = np.add.reduceat(content[plan.indices], plan.offsets[:-1]) if plan.num_packs else np.zeros(0, np.int64)
    sizes += _MEMBER_OVERHEAD * (4 if options.codec.stores_tokens else 1)
    shards: list[ShardPlan] = []
    for split, (start, stop) in split_ranges(plan.num_packs, options.split).items():
        for first, last in _cut(sizes[start:stop], options.max_packs_per_shard, options.max_shard_bytes):
            begin, end = start + first, start + last
            offsets = plan.offsets[begin : end + 1]
            shards.append(
                ShardPlan(
                    number=len(shards),
                    split=split,
                    first_pack=begin,
                    rows=plan.indices[offsets[0] : offsets[-1]],
                    offsets=offsets - offsets[0],
                    num_bytes=int(sizes[begin:end].sum()),
                )
            )
    return shards


def split_ranges(packs: int, split: Mapping[str, float]) -> dict[str, tuple[int, int]]:
    """Ranges of packs per split, by rounding the running total of the shares."""
    ends = np.rint(np.cumsum(list(split.values())) * packs).astype(int).tolist()
    ends[-1] = packs  # whatever the rounding of the shares
    return {name: (start, end) for name, start, end in zip(split, [0, *ends], ends, strict=False)}


def _cut(sizes: Int64, max_packs: int, max_bytes: int) -> list[tuple[int, int]]:
    """Ranges of packs: as few as the byte limit allows, each with at most `max_packs`, of even count."""
    ranges: list[tuple[int, int]] = []
    total = np.concatenate([[0], np.cumsum(sizes)])
    start = 0
    while start < len(sizes):
        by_bytes = int(np.searchsorted(total, total[start] + max_bytes, side="right")) - 1
        left = len(sizes) - start
        even = -(-left // -(-left // max_packs))
        stop = max(start + 1, min(by_bytes, start + even))
        ranges.append((start, stop))
        start = stop
    return ranges
