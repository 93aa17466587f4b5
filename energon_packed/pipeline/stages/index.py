"""Stage 4, index.

Input: the finished shards of a run, with their state files, its Plan and RecordTable. Output: `.nv-meta` and
packing.json, the PackingManifest.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from energon_packed.arrays import blocks
from energon_packed.encoding import ChatEncoder
from energon_packed.errors import ConfigError
from energon_packed.pipeline.measured.table import RecordTable, most_common, reject_counts
from energon_packed.pipeline.media.locator import StoredMedia
from energon_packed.pipeline.options import PackOptions
from energon_packed.pipeline.output.run_state import RunState
from energon_packed.pipeline.output.shard_states import is_stored, shard_rows, state_file
from energon_packed.pipeline.stages.plan import Plan
from energon_packed.shards import PackingManifest, ShardEntry
from energon_packed.shards.loading_code import loading_code
from energon_packed.shards.manifest import SourceEntry
from energon_packed.shards.media_yaml import write_media_yaml
from energon_packed.shards.nv_meta import write_nv_meta
from energon_packed.shards.tar import ShardSummary
from energon_packed.storage import map_paths

_MAX_SOURCES = 200  # separate entries in the manifest; thousands of inputs would make it large


def write_index(
    state: RunState,
    table: RecordTable,
    plan: Plan,
    shards: Sequence[ShardSummary],
    stored: StoredMedia | None = None,
) -> PackingManifest:
    """Write the indexes and the manifest; return it as saved in packing.json."""
    state.progress.start("index", len(shards), "shards")
    by_name = {shard.name: shard for shard in shards}
    map_paths(lambda tar: _check_shard(tar, by_name[tar.name]), [state.output.shards / name for name in by_name])
    entries = _entries(plan, shards, state.options)
    folder = state.output.write_folder(state.fingerprints.write)
    write_nv_meta(
        state.output.shards,
        codec=state.options.codec,
        shards=shards,
        rows=(shard_rows(state_file(folder, shard.name)) for shard in shards),
        splits={name: [e.name for e in entries if e.split == name] for name in state.options.split},
        dataset_module=state.options.dataset_module,
        staging=folder,
    )
    if state.options.media == "reference":
        write_media_yaml(state.output.shards)
    manifest = _manifest(state, table, plan, entries, stored)
    manifest = replace(manifest, loading_code=loading_code(manifest))
    manifest.save(state.output.shards)
    state.progress.advance(len(shards))
    return manifest


def _check_shard(tar: Path, shard: ShardSummary) -> None:
    """Check that a shard was not removed, replaced or truncated since it was written.

    Raises:
        ConfigError: it was.
    """
    try:
        if tar.with_suffix(".tar.idx").is_file() and is_stored(tar, shard):
            return
        size = tar.stat().st_size if tar.with_suffix(".tar.idx").is_file() else None
    except FileNotFoundError:
        size = None
    change = "is gone" if size is None else f"has {size} bytes in place of {shard.size}"
    if size == shard.size:
        change = "has other content"
    raise ConfigError(
        f"{tar} {change} since it was written: another process is using `output_dir`. Stop it and run again"
    )


def _entries(plan: Plan, shards: Sequence[ShardSummary], options: PackOptions) -> list[ShardEntry]:
    """Build the manifest entries of the shards: counts from the plan, size and hash from the tar."""
    pack, length = plan.places.pack, plan.entries.length
    tokens = np.zeros(len(shards), dtype=np.int64)
    for block in blocks(len(pack)):
        own = np.flatnonzero(pack[block] >= 0) + block.start
        shard = np.searchsorted(plan.places.first_packs, pack[own], side="right") - 1
        np.add.at(tokens, shard, np.minimum(length[own], options.usable_len))
    return [
        ShardEntry(
            name=shard.name,
            split=planned.split,
            packs=shard.packs,
            samples=len(planned.rows),
            tokens=used,
            bytes=shard.size,
            sha256=shard.sha256,
        )
        for planned, shard, used in zip(plan.shards, shards, tokens.tolist(), strict=True)
    ]


def _manifest(
    state: RunState,
    table: RecordTable,
    plan: Plan,
    entries: list[ShardEntry],
    stored: StoredMedia | None,
) -> PackingManifest:
    """Build the manifest of a run whose shards are written, from its counts and settings."""
    options, packs, entries_of = state.options, plan.packs, plan.entries
    encoder = options.encoder_loader.load()
    cut = 0, 0  # records, tokens
    if options.truncate is not None:
        for lengths in entries_of.packable(entries_of.length):
            longer = np.maximum(lengths - options.usable_len, 0)
            cut = cut[0] + int(np.count_nonzero(longer)), cut[1] + int(longer.sum(dtype=np.int64))
    fragments, split = entries_of.fragments, 0
    if fragments is not None:
        split = sum(int(np.count_nonzero(fragments["number"][block] == 0)) for block in blocks(len(fragments)))
    num_videos = entries_of.total(entries_of.num_videos)
    return PackingManifest(
        sample_class=options.sample_class,
        layout=options.layout,
        dataset_module=options.dataset_module,
        shard_prefix=options.prefix,
        records=len(table),
        packed=len(packs.indices),
        truncated=cut[0],
        tokens_cut=cut[1],
        records_split=split,
        fragments=0 if fragments is None else len(fragments),
        groups=_groups(plan),
        rejects=reject_counts(plan.status),
        unused_fields=most_common(table.counts["unused_fields"]),
        notes=most_common(table.counts["notes"]),
        ignored_entries=list(state.reader.ignored_entries),
        packs=packs.num_packs,
        tokens=packs.tokens,
        supervised_tokens=_supervised(plan),
        weight_checksum=entries_of.total(entries_of.weight_checksum) % 2**63,
        images=entries_of.total(entries_of.num_images),
        images_decoded=entries_of.total(entries_of.num_decoded),
        videos=num_videos,
        frames=entries_of.total(entries_of.num_frames),
        audios=entries_of.total(entries_of.num_audios),
        audio_seconds=entries_of.total(entries_of.audio_ms) / 1000,
        extract_frames=num_videos > 0 and options.extract_frames,
        check_media=options.check_media,
        seq_len=options.seq_len,
        algorithm=options.algorithm if options.codec.packed else "none",
        max_samples_per_pack=options.max_samples_per_pack,
        group_by=options.group_by,
        seed=options.seed,
        utilization=round(packs.utilization, 6),
        split=options.split,
        pad_multiple=options.pad_multiple,
        overlong=options.overlong,
        media=options.media,
        media_check=options.media_check,
        media_stored={} if stored is None else {"images": stored.images, "bytes": stored.bytes},
        template_fingerprint=encoder.renderer.template.fingerprint if isinstance(encoder, ChatEncoder) else "",
        image_settings=encoder.image_settings() if isinstance(encoder, ChatEncoder) else {},
        tokenizer_fingerprint=state.fingerprints.encoder,
        input_fingerprint=state.fingerprints.input,
        fingerprint=state.fingerprints.tars,
        tokenizer_engine=", ".join(sorted(state.tokenizer_engines)),
        encoder=options.encoder_loader.as_dict(),
        counters=state.counters,
        sources=_sources(state, table, plan),
        shards=entries,
    )


def _groups(plan: Plan) -> int:
    """Number of groups of at least two samples."""
    units = plan.entries.units()
    if units is None:
        return 0
    has_more = plan.entries.empty(len(units), np.int8)  # at the first sample of a group
    for block in blocks(len(units)):
        is_more = (plan.places.pack[block] >= 0) & (units[block] != np.arange(block.start, block.stop))
        has_more[units[block][is_more]] = 1
    return sum(int(np.count_nonzero(has_more[block])) for block in blocks(len(units)))


def _supervised(plan: Plan) -> int | None:
    """Targets in all packs; None if the targets of a sample are unknown."""
    entries = plan.entries
    is_known = all((targets >= 0).all() for targets in entries.packable(entries.supervised))
    return entries.total(entries.supervised) if is_known else None


def _sources(state: RunState, table: RecordTable, plan: Plan) -> list[SourceEntry]:
    """Build the manifest entries of the sources; sources after the first `_MAX_SOURCES` are joined in one entry."""
    configs, readings = state.options.source_configs, [source.reading for source in state.reader.sources]
    fragments = plan.entries.fragments
    config_of = np.minimum([reading.config for reading in readings], _MAX_SOURCES)
    count = min(len(configs), _MAX_SOURCES + 1)
    # A weight above 1 reads a file several times: repeats are not counted as files.
    originals = [config for config, reading in zip(config_of, readings, strict=True) if not reading.copy]
    totals = (np.bincount(originals, minlength=count), *np.zeros((3, count), dtype=np.int64))
    for config, (start, stop) in zip(config_of.tolist(), pairwise(table.source_starts.tolist()), strict=True):
        totals[1][config] += stop - start
        for block in blocks(stop - start):
            own = slice(start + block.start, start + block.stop)
            is_packed = plan.status[own] == 0
            lengths = np.minimum(table.length[own], state.options.usable_len)
            if fragments is not None:  # of a split record, its fragments count
                is_split = slice(*(bisect_left(fragments["record"], row) for row in (own.start, own.stop)))
                record = fragments["record"][is_split] - own.start
                lengths[record] = 0
                tokens = fragments["stop"][is_split] - fragments["start"][is_split]
                np.add.at(lengths, record, tokens.astype(lengths.dtype))
            totals[2][config] += np.count_nonzero(is_packed)
            totals[3][config] += lengths.sum(dtype=np.int64, where=is_packed)
    settings = [config.settings() for config in configs[:_MAX_SOURCES]] + [{"path": ["(others)"]}]
    return [
        SourceEntry(**source, files=files, records=records, packed=used, tokens=tokens)
        for source, files, records, used, tokens in zip(settings, *(t.tolist() for t in totals), strict=False)
    ]
