"""The manifest of a finished build: what packing.json says of it."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from energon_packed.build.options import PackOptions
from energon_packed.build.planning import ShardPlan
from energon_packed.build.table import RecordTable, reject_counts
from energon_packed.packing import PackPlan
from energon_packed.shards import PackingManifest, ShardEntry
from energon_packed.shards.layouts import layout_for
from energon_packed.shards.tar import ShardSummary


def shard_entries(
    table: RecordTable, plans: Sequence[ShardPlan], shards: Sequence[ShardSummary], options: PackOptions
) -> list[ShardEntry]:
    """What each planned shard holds, and the size and hash that its tar has."""
    return [
        ShardEntry(
            name=shard.name,
            split=plan.split,
            packs=shard.packs,
            samples=len(plan.rows),
            tokens=int(np.minimum(table.length[plan.rows], options.usable_len).sum(dtype=np.int64)),
            bytes=shard.size,
            sha256=shard.sha256,
        )
        for plan, shard in zip(plans, shards, strict=True)
    ]


def make_manifest(
    table: RecordTable,
    status: npt.NDArray[np.int8],
    plan: PackPlan,
    entries: list[ShardEntry],
    *,
    options: PackOptions,
    tokenizer_fingerprint: str,
    input_fingerprint: str,
    fingerprint: str,
    counters: dict[str, int],
) -> PackingManifest:
    """Counts and settings of a build whose shards are written.

    Args:
        table: measured records.
        status: int8 (n,), index into STATUSES, plan-time rejects included.
        plan: all packs; `indices` are record numbers.
        entries: of the shards, in order.
        options: of the build.
        tokenizer_fingerprint, input_fingerprint, fingerprint: digests of the encoder, the input, and all that
            decides the tars.
        counters: records measured, texts tokenized, records reused.
    """
    cut = np.maximum(table.length[plan.indices] - options.usable_len, 0)  # 0 unless --overlong truncate
    return PackingManifest(
        sample_class=options.sample_class,
        shard_prefix=options.prefix,
        records=len(table),
        packed=len(plan.indices),
        truncated=int(np.count_nonzero(cut)),
        tokens_cut=int(cut.sum(dtype=np.int64)),
        rejects=reject_counts(status),
        packs=plan.num_packs,
        tokens=plan.tokens,
        images=int(table.num_images[plan.indices].sum(dtype=np.int64)),
        seq_len=options.seq_len,
        algorithm=options.algorithm if layout_for(options.sample_class).packed else "none",
        max_samples_per_pack=options.max_samples_per_pack,
        group_by=options.group_by,
        seed=options.seed,
        utilization=round(plan.utilization, 6),
        pad_multiple=options.pad_multiple,
        overlong=options.overlong,
        tokenizer_fingerprint=tokenizer_fingerprint,
        input_fingerprint=input_fingerprint,
        fingerprint=fingerprint,
        encoder=options.encoder.as_dict(),
        counters=counters,
        shards=entries,
    )
