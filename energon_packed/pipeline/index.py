"""Stage 4, index: `.nv-meta` and packing.json over the finished shards."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from energon_packed.encoding import ChatEncoder
from energon_packed.errors import ConfigError
from energon_packed.pipeline.keys import Keys
from energon_packed.pipeline.options import PackOptions
from energon_packed.pipeline.plan import Plan
from energon_packed.pipeline.run_state import RunState
from energon_packed.pipeline.table import RecordTable, most_common, reject_counts
from energon_packed.pipeline.write import shard_rows, state_file
from energon_packed.shards import PackingManifest, ShardEntry
from energon_packed.shards.manifest import SourceEntry
from energon_packed.shards.nv_meta import write_nv_meta
from energon_packed.shards.tar import ShardSummary

_MOST_SOURCES = 200  # listed one by one; folders of many parts would make the manifest large


def write_index(
    state: RunState, keys: Keys, table: RecordTable, plan: Plan, shards: Sequence[ShardSummary]
) -> PackingManifest:
    """Write the indexes and the manifest; return it as saved in packing.json."""
    state.progress.start("index", len(shards), "shards")
    _check_there(state.space.shards, shards)
    entries = _entries(table, plan, shards, state.options)
    folder = state.space.write_folder(keys.write)
    write_nv_meta(
        state.space.shards,
        codec=state.options.codec,
        shards=shards,
        rows=(shard_rows(state_file(folder, shard.name)) for shard in shards),
        splits={name: [e.name for e in entries if e.split == name] for name in state.options.split},
        dataset_module=state.options.dataset_module,
    )
    manifest = _manifest(state, keys, table, plan, entries)
    manifest.save(state.space.shards)
    state.progress.advance(len(shards))
    return manifest


def _check_there(folder: Path, shards: Sequence[ShardSummary]) -> None:
    """Refuse to name shards that are gone, or were cut, since they were written.

    Raises:
        ConfigError: one is.
    """
    for shard in shards:
        tar = folder / shard.name
        try:
            found = tar.stat().st_size if tar.with_suffix(".tar.idx").is_file() else None
        except FileNotFoundError:
            found = None
        if found != shard.size:
            what = "is gone" if found is None else f"has {found} bytes in place of {shard.size}"
            raise ConfigError(
                f"{tar} {what} since it was written; something else uses `output_dir`: stop that, and run again"
            )


def _entries(table: RecordTable, plan: Plan, shards: Sequence[ShardSummary], options: PackOptions) -> list[ShardEntry]:
    """What each planned shard holds, and the size and hash that its tar has."""
    return [
        ShardEntry(
            name=shard.name,
            split=planned.split,
            packs=shard.packs,
            samples=len(planned.rows),
            tokens=int(np.minimum(table.length[planned.rows], options.usable_len).sum(dtype=np.int64)),
            bytes=shard.size,
            sha256=shard.sha256,
        )
        for planned, shard in zip(plan.shards, shards, strict=True)
    ]


def _manifest(
    state: RunState, keys: Keys, table: RecordTable, plan: Plan, entries: list[ShardEntry]
) -> PackingManifest:
    """Counts and settings of a run whose shards are written."""
    options, packs = state.options, plan.packs
    cut = np.maximum(table.length[packs.indices] - options.usable_len, 0)  # 0 unless `overlong='truncate'`
    return PackingManifest(
        sample_class=options.sample_class,
        layout=options.layout,
        dataset_module=options.dataset_module,
        shard_prefix=options.prefix,
        records=len(table),
        packed=len(packs.indices),
        truncated=int(np.count_nonzero(cut)),
        tokens_cut=int(cut.sum(dtype=np.int64)),
        rejects=reject_counts(plan.status),
        unused_fields=most_common(table.counts["unused_fields"]),
        notes=most_common(table.counts["notes"]),
        packs=packs.num_packs,
        tokens=packs.tokens,
        supervised_tokens=_supervised(plan),
        images=int(table.num_images[packs.indices].sum(dtype=np.int64)),
        images_decoded=int(table.num_decoded[packs.indices].sum(dtype=np.int64)),
        check_images=options.check_images,
        seq_len=options.seq_len,
        algorithm=options.algorithm if options.codec.packed else "none",
        max_samples_per_pack=options.max_samples_per_pack,
        group_by=options.group_by,
        seed=options.seed,
        utilization=round(packs.utilization, 6),
        split=options.split,
        pad_multiple=options.pad_multiple,
        overlong=options.overlong,
        template_fingerprint=_template_fingerprint(options),
        tokenizer_fingerprint=keys.encoder,
        input_fingerprint=keys.input,
        fingerprint=keys.tars,
        tokenizer_engine=", ".join(sorted(state.tokenizer_engines)),
        encoder=options.encoder_loader.as_dict(),
        counters=state.counters,
        sources=_sources(state, table, plan),
        shards=entries,
    )


def _supervised(plan: Plan) -> int | None:
    """Targets in all packs; None where one sample's are unknown."""
    targets = plan.supervised[plan.packs.indices]
    return None if (targets < 0).any() else int(targets.sum(dtype=np.int64))


def _template_fingerprint(options: PackOptions) -> str:
    encoder = options.encoder_loader.load()
    return encoder.renderer.template.fingerprint if isinstance(encoder, ChatEncoder) else ""


def _sources(state: RunState, table: RecordTable, plan: Plan) -> list[SourceEntry]:
    """Settings and totals of each input; those past the first `_MOST_SOURCES` are one entry."""
    configs, readings = state.options.source_configs, [source.reading for source in state.reader.sources]
    config_of = np.minimum([reading.config for reading in readings], _MOST_SOURCES)
    packed = plan.status == 0
    lengths = np.minimum(table.length, state.options.usable_len)
    rows = config_of[table.locate(np.arange(len(table)))[0]]
    count = min(len(configs), _MOST_SOURCES + 1)
    files = np.bincount(
        [config for config, one in zip(config_of, readings, strict=True) if not one.copy], minlength=count
    )
    records, kept = (np.bincount(found, minlength=count) for found in (rows, rows[packed]))
    tokens = np.bincount(rows[packed], weights=lengths[packed], minlength=count).astype(np.int64)
    numbers = zip(*(one.tolist() for one in (files, records, kept, tokens)), strict=True)
    settings = [config.settings() for config in configs[:_MOST_SOURCES]] + [{"path": ["(others)"]}]
    return [
        SourceEntry(**given, files=found, records=total, packed=inside, tokens=sum_)
        for given, (found, total, inside, sum_) in zip(settings, numbers, strict=False)
    ]
