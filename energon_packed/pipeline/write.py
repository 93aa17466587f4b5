"""Stage 3, write, and stage 4, index.

Input: the Plan and the RecordTable of a run. Output of `write_shards`: the tars, each written by a task, with its
`.tar.idx` and a state file with its index rows. Output of `write_index`: `.nv-meta` and packing.json.

    Plan ──ShardTask──► ShardWriter (worker) ──► tar, state file;  ShardSummary ──► write_index ──► PackingManifest
"""

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import orjson

from energon_packed.encoding import ChatEncoder
from energon_packed.encoding.fragments import fragment_id
from energon_packed.encoding.vision.images import as_jpeg, frame_as_jpeg, sniff_extension
from energon_packed.encoding.vision.media import with_image_counts
from energon_packed.encoding.vision.video_file import decode_frames
from energon_packed.errors import ConfigError, EnergonPackedError, RecordError, SourceError
from energon_packed.files import atomic_write, of_type
from energon_packed.formats import StoredImage, StoredSample, StoredVideo, codec_for
from energon_packed.pipeline.chunks import MediaFiles, RecordOffsets, TokenReader, read_frames
from energon_packed.pipeline.media.locator import MediaLocator, StoredMedia
from energon_packed.pipeline.options import PackOptions
from energon_packed.pipeline.plan import Plan, kept_frames, kept_tokens
from energon_packed.pipeline.reader import RecordReader
from energon_packed.pipeline.run_state import Fingerprints, RunState
from energon_packed.pipeline.table import RecordRefs, RecordTable, most_common, reject_counts
from energon_packed.records import Conversation, MediaReference, VideoReference
from energon_packed.records.normalize import TIMESTAMPS_WRITTEN
from energon_packed.shards import PackingManifest, ShardEntry
from energon_packed.shards.index import write_tar_index
from energon_packed.shards.loading_code import loading_code
from energon_packed.shards.manifest import SourceEntry
from energon_packed.shards.media_yaml import write_media_yaml
from energon_packed.shards.nv_meta import write_nv_meta
from energon_packed.shards.tar import ShardRows, ShardSummary, TarShardWriter
from energon_packed.sources.base import changed_at
from energon_packed.storage import RemotePath, StorageError, is_remote, map_paths
from energon_packed.system import raise_resource_error

Int64 = npt.NDArray[np.int64]
_NO_CONTENT = np.zeros(1, dtype=np.int64)
_REQUESTS = 16  # at a time, to check the shards in an object store
_MAX_SOURCES = 200  # separate entries in the manifest; thousands of inputs would make it large


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardTask:
    """Shard to write.

    Attributes:
        tar: final path.
        state: file for the index rows; it appears when the shard is done.
        prefix: prefix of keys.
        first_pack: index of the first pack.
        records: records of all packs, pack after pack.
        offsets: int64 (packs+1,), pack p is records offsets[p] to offsets[p + 1].
        tokens: files of the tokens of the records; None for flavors without tokens.
        frames: files of the selected frames of their videos; None if no record has videos.
        media: names of the tars with referenced images and videos that are in no file of the input.
    """

    tar: Path
    state: Path
    prefix: str
    first_pack: int
    records: RecordRefs
    offsets: Int64
    tokens: RecordOffsets | None = None
    frames: RecordOffsets | None = None
    media: Sequence[str] = ()

    @property
    def label(self) -> str:
        """Description for messages."""
        return f"writing {self.tar.name}"

    def digest(self) -> str:
        """Compute the hex digest of the records of all packs and their measurements.

        A shard of an earlier run is reused only if its digest is the same: an image that was missing then may exist
        now, which changes the entire plan.
        """
        digest = hashlib.sha256(f"{self.prefix} {self.first_pack}".encode())
        digest.update("".join(self.media).encode())
        if self.frames is not None:
            digest.update(self.frames.size.tobytes())
        records = self.records
        for array in (self.offsets, *(getattr(records, name) for name in records.__slots__)):
            if array is not None:  # `fragments` of records that are all complete
                digest.update(array.tobytes())
        return digest.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardWriter:
    """Function of the write stage: writes a shard.

    Attributes:
        reader: reads records as the measure stage did.
        truncate: length to which longer samples are truncated, or None.
        keep_bytes: for a layout whose images are named `.jpg`: do not convert images of other formats, nor images with
            an EXIF orientation; store their bytes under that name.
        extract_frames: store the selected frames of a video file as JPEG images instead of its bytes.
        timestamps: the measured lengths of records with `fps` have the timestamps of their frames.
        locator: stores the location of images and videos instead of their bytes; None stores the bytes.
    """

    reader: RecordReader
    truncate: int | None
    keep_bytes: bool = False
    extract_frames: bool = False
    timestamps: bool = False
    locator: MediaLocator | None = None

    def __call__(self, task: ShardTask) -> ShardSummary:
        """Write the tar, its index and its state file."""
        codec = codec_for(self.reader.sample_class, self.reader.layout)
        bounds = task.offsets.tolist()
        seconds_before = self.locator.seconds if self.locator else 0.0
        with ExitStack() as open_files:
            shard = open_files.enter_context(TarShardWriter(task.tar, task.state.parent))
            tokens = open_files.enter_context(TokenReader(task.tokens)) if task.tokens is not None else None
            records = _records(task.records)
            split: dict[tuple[int, int], Conversation] = {}
            for pack, (start, stop) in enumerate(itertools.pairwise(bounds), start=task.first_pack):
                members = itertools.islice(records, stop - start)
                samples = [self.stored_sample(record, tokens, split, task.frames) for record in members]
                shard.add(f"{task.prefix}_{pack:08d}", codec.write(samples))
        seconds = self.locator.seconds - seconds_before if self.locator else 0.0
        return replace(finish_shard(task, shard.rows), digest_seconds=seconds)

    def stored_sample(
        self,
        record: "_Record",
        tokens: TokenReader | None,
        split: dict[tuple[int, int], Conversation],
        frames: RecordOffsets | None = None,
    ) -> StoredSample:
        """Read a record and its media again, and its tokens if the flavor stores tokens.

        Args:
            record: the record or fragment.
            tokens: reader of the tokens of the shard; None for flavors without tokens.
            split: the split records without images that were read for the shard, without their content, by source
                and index; a record is added with its first fragment.
            frames: files of the selected frames of the shard; None if no record has videos.

        Raises:
            SourceError: the record or its media changed since it was measured.
        """
        source, row, measured, fragment = record.source, record.row, record.length, record.fragment
        images: tuple[StoredImage, ...] = ()
        positions: tuple[bytes, ...] = ()
        videos: tuple[StoredVideo, ...] = ()
        try:
            conversation = split.get((source, row)) or self.reader.read(source, record.address, record.size)
            if fragment is not None and not conversation.images:  # records with videos are not split
                # A long document has thousands of fragments, so it is not read again for each.
                split[source, row] = Conversation(id=conversation.id, input_ids=_NO_CONTENT)
            ident = self.reader.default_id(source, row) if conversation.id is None else conversation.id
            if conversation.media_files:
                images = tuple([self._stored_file(image) for image in conversation.images])
                positions = tuple([file.read() for file in conversation.patch_positions])
                media_bytes = sum([image.num_bytes for image in images]) + sum([len(data) for data in positions])
                if conversation.videos:
                    conversation = self._with_frames(conversation, record, frames)
                    conversation = conversation if tokens is None else with_image_counts(conversation)
                    videos = tuple([self._stored_video(video) for video in conversation.videos])
                    read = (self._read_bytes(*pair) for pair in zip(conversation.videos, videos, strict=True))
                    media_bytes += sum(read)
                if media_bytes != record.media_bytes:
                    raise self._changed(record, f"its media has {media_bytes} bytes, not {record.media_bytes}")
                # After the files are read, so that no change is missed. A digest of the content would have to read all
                # media while measuring.
                if (
                    MediaFiles().stamp((*conversation.media_files, *conversation.patch_positions))
                    != record.media_stamp
                ):
                    raise self._changed(record, "its media was replaced by a file of the same size")
                if self.reader.layout and not self.keep_bytes:
                    images = tuple([StoredImage("jpg", as_jpeg(image.data)) for image in images])
            elif record.media_bytes:
                raise self._changed(record, f"it has no media any more, but had {record.media_bytes} bytes")
            if tokens is not None:
                encoded = tokens.read(record.entry, measured, fragment)
                encoded = encoded.truncated(self.truncate) if self.truncate else encoded
                references = conversation.images
                if fragment is not None:
                    ident = fragment_id(ident, int(fragment["number"]))
                    shown = slice(int(fragment["first_image"]), int(fragment["last_image"]))
                    references, images, positions = references[shown], images[shown], positions[shown]
                conversation = Conversation(
                    id=ident,
                    input_ids=encoded.input_ids,
                    labels=encoded.labels,
                    loss_weights=encoded.loss_weights,
                    images=references,
                    videos=conversation.videos,
                )
            elif conversation.id is None:
                conversation = conversation.named(ident)
            if self.timestamps and tokens is None and conversation.fps and conversation.images:
                conversation = replace(conversation, timestamps=True)
        except (RecordError, OSError) as error:
            raise_resource_error(error, self.reader.sources[source].path)
            raise self._changed(record, str(error)) from error
        return StoredSample(
            conversation=conversation,
            length=min(measured, self.truncate or measured),
            truncate=self.truncate,
            is_truncated=self.truncate is not None and measured > self.truncate,
            images=images,
            patch_positions=positions,
            videos=videos,
        )

    def _stored_file(self, file: MediaReference) -> StoredImage:
        """Return the location of an image or video, or its bytes; in a layout, images have the name of a JPEG."""
        if self.locator is not None:
            return self.locator.locate(file)
        data = file.read()
        return StoredImage("jpg" if self.reader.layout else sniff_extension(data), data)

    def _with_frames(
        self, conversation: Conversation, record: "_Record", frames: RecordOffsets | None
    ) -> Conversation:
        """Add the frames that were selected when the record was measured."""
        selections = () if frames is None else read_frames(frames, record.entry)
        if len(selections) != len(conversation.videos):
            raise self._changed(record, f"it has {len(conversation.videos)} videos, and had {len(selections)}")
        pairs = zip(conversation.videos, selections, strict=True)
        return replace(conversation, videos=tuple([replace(video, frames=selected) for video, selected in pairs]))

    def _stored_video(self, video: VideoReference) -> StoredVideo:
        """Return the location or the bytes of a video with its selected frames, or these frames as images."""
        assert video.frames is not None  # of `_with_frames`
        file: StoredImage | None = None
        images: tuple[StoredImage, ...] = ()
        if video.file is None:
            images = tuple([self._stored_file(image) for image in video.images])
        elif not self.extract_frames:
            file = self._stored_file(video.file)
        else:
            images = tuple(
                [StoredImage("jpg", frame_as_jpeg(frame)) for frame in decode_frames(video.file, video.frames)]
            )
        return StoredVideo(video.frames, file, images, video.images_before)

    def _read_bytes(self, video: VideoReference, stored: StoredVideo) -> int:
        """Bytes of the files that a stored video was made of."""
        if video.file is None or stored.file is not None:
            return sum([file.num_bytes for file in stored.files])
        return video.file.num_bytes()

    def _changed(self, record: "_Record", change: str) -> EnergonPackedError:
        return changed_record(self.reader, record.source, record.row, change, has_files=record.media_stamp != 0)


def changed_record(reader: RecordReader, source: int, row: int, change: str, *, has_files: bool) -> EnergonPackedError:
    """Error for a record whose content or media changed since it was measured; the next run finds changed files."""
    remedy = "run again" if has_files else "run again with `resume=False`"
    path = reader.sources[source].path
    return SourceError(f"record {row} of {path} changed since it was measured ({change}); {remedy}")


class _Record(NamedTuple):
    """Entry of `RecordRefs`, and its index there."""

    entry: int
    source: int
    row: int
    address: int
    size: int
    length: int
    media_bytes: int
    media_stamp: int
    fragment: np.void | None


def _records(records: RecordRefs) -> Iterator[_Record]:
    columns = [getattr(records, name).tolist() for name in _Record._fields[1:-1]]  # Python integers, all at once
    fragments: Iterable[np.void | None] = itertools.repeat(None, len(records))
    if records.fragments is not None:
        fragments = [fragment if fragment["number"] >= 0 else None for fragment in records.fragments]
    return map(_Record, itertools.count(), *columns, fragments)


class TarTask(Protocol):
    """Tar to write, with its state file and a digest of its content, as in `ShardTask`."""

    @property
    def tar(self) -> Path:
        """Final path."""

    @property
    def state(self) -> Path:
        """File for the index rows."""

    def digest(self) -> str:
        """Digest of the content."""


def finish_shard(task: TarTask, rows: ShardRows) -> ShardSummary:
    """Write the index of a tar, and its state file."""
    # The state file is written last: it marks the shard as finished.
    write_tar_index(task.tar, rows)
    state = {"task": task.digest(), "mtime_ns": _changed_at(task.tar), "rows": rows.as_dict()}
    atomic_write(task.state, orjson.dumps(state))
    return rows.summary


def finished_shard(task: TarTask) -> ShardSummary | None:
    """Return the summary of a shard that an earlier run has finished, if it is unchanged; else None."""
    tar = task.tar
    try:
        value = of_type(orjson.loads(task.state.read_bytes()), dict)
        if value["task"] != task.digest():
            return None
        rows = ShardRows.from_dict(value["rows"])
        unchanged = _is_stored(tar, rows.summary) and _changed_at(tar) == value["mtime_ns"]
        return rows.summary if unchanged and tar.with_suffix(".tar.idx").is_file() else None
    except StorageError:
        raise
    except (OSError, ValueError, KeyError):
        return None


def _changed_at(tar: Path) -> int | None:
    """Time of the last change, by which a replaced file is recognized; None for objects, which have a hash."""
    return None if is_remote(tar) else changed_at(tar)


def _is_stored(tar: Path, shard: ShardSummary) -> bool:
    """Whether a tar has the size of the shard, and an object also its hash.

    Raises:
        FileNotFoundError: there is no such tar.
    """
    if isinstance(tar, RemotePath):
        return tar.stored() == (shard.size, shard.sha256)
    return tar.stat().st_size == shard.size


def shard_rows(state: Path) -> ShardRows:
    """Read the index rows of a finished shard."""
    return ShardRows.from_dict(orjson.loads(state.read_bytes())["rows"])


def write_shards(
    state: RunState, key: str, table: RecordTable, plan: Plan, stored: StoredMedia | None = None
) -> list[ShardSummary]:
    """Write the shards that no earlier run has finished.

    Args:
        state: objects of the run.
        key: fingerprint of the stage; names the folder of the index rows.
        table, plan: results of the earlier stages.
        stored: images of `out/media`; None without such images.

    Returns:
        All shards, in order.
    """
    options, output = state.options, state.output
    folder = output.write_folder(key)
    shards = {shard.name(options.prefix): shard for shard in plan.shards}
    present = {tar.name for tar in output.shards.glob("*.tar")}
    missing = [name for name in shards if name not in present or not state_file(folder, name).exists()]
    needed = sum(shards[name].num_bytes for name in missing)
    output.check_space(needed, key, options.unfinished_bytes)  # before anything is replaced
    output.delete_other_run(key)
    folder.mkdir(parents=True, exist_ok=True)
    kept, frames = kept_tokens(state, table), kept_frames(table)

    def task_of(name: str) -> ShardTask:
        shard = shards[name]
        return ShardTask(
            tar=output.shards / name,
            state=state_file(folder, name),
            prefix=options.prefix,
            first_pack=shard.first_pack,
            records=plan.entries.refs(shard.rows),
            offsets=shard.offsets,
            tokens=kept.refs(plan.entries.records(shard.rows)) if kept else None,
            frames=frames.refs(plan.entries.records(shard.rows)) if frames else None,
            media=[tar.name for tar in stored.shards] if stored else (),
        )

    done: dict[str, ShardSummary] = {}

    def finish(summary: ShardSummary, counter: str) -> None:
        done[summary.name] = summary
        state.counters[counter] += 1
        samples = len(shards[summary.name].rows)
        state.progress.advance(samples, samples)

    state.progress.start("write", sum(len(shard.rows) for shard in plan.shards), "samples")
    with ThreadPoolExecutor(_REQUESTS) as threads:  # not `map_paths`, whose threads stay: workers are forked next
        names = [name for name in shards if state_file(folder, name).exists()]
        for finished in threads.map(lambda name: finished_shard(task_of(name)), names):
            if finished is not None:
                finish(finished, "shards_reused")
    todo = [name for name in shards if name not in done]
    if todo:
        output.remove_index()
    locator = None
    if options.media == "reference":
        locator = MediaLocator(check=options.media_check, stored=stored)
    writer = ShardWriter(
        reader=state.reader,
        truncate=options.truncate,
        keep_bytes=options.keep_bytes,
        extract_frames=options.extract_frames,
        timestamps=table.counts["notes"][TIMESTAMPS_WRITTEN] > 0,
        locator=locator,
    )
    with closing(state.engine.run(writer, map(task_of, todo))) as summaries:
        for summary in summaries:
            finish(summary, "shards_written")
    output.remove_strays(set(shards))
    if sum(summary.packs for summary in done.values()) != plan.packs.num_packs:
        raise AssertionError("the shards do not contain every planned pack")
    return [done[name] for name in shards]


def state_file(folder: Path, shard: str) -> Path:
    """Path of the index rows of a finished shard."""
    return folder / Path(shard).with_suffix(".json").name


def write_index(
    state: RunState,
    keys: Fingerprints,
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
    folder = state.output.write_folder(keys.write)
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
    manifest = _manifest(state, keys, table, plan, entries)
    if stored is not None:
        manifest = replace(manifest, media_stored={"images": stored.images, "bytes": stored.bytes})
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
        if tar.with_suffix(".tar.idx").is_file() and _is_stored(tar, shard):
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
    return [
        ShardEntry(
            name=shard.name,
            split=planned.split,
            packs=shard.packs,
            samples=len(planned.rows),
            tokens=int(np.minimum(plan.entries.length[planned.rows], options.usable_len).sum(dtype=np.int64)),
            bytes=shard.size,
            sha256=shard.sha256,
        )
        for planned, shard in zip(plan.shards, shards, strict=True)
    ]


def _manifest(
    state: RunState, keys: Fingerprints, table: RecordTable, plan: Plan, entries: list[ShardEntry]
) -> PackingManifest:
    """Build the manifest of a run whose shards are written, from its counts and settings."""
    options, packs, entries_of = state.options, plan.packs, plan.entries
    encoder = options.encoder_loader.load()
    cut = np.maximum(entries_of.length[packs.indices] - options.usable_len, 0)  # 0 unless `overlong='truncate'`
    fragments = entries_of.fragments
    num_videos = int(entries_of.num_videos[packs.indices].sum(dtype=np.int64))
    return PackingManifest(
        sample_class=options.sample_class,
        layout=options.layout,
        dataset_module=options.dataset_module,
        shard_prefix=options.prefix,
        records=len(table),
        packed=len(packs.indices),
        truncated=int(np.count_nonzero(cut)),
        tokens_cut=int(cut.sum(dtype=np.int64)),
        records_split=0 if fragments is None else int(np.count_nonzero(fragments["number"] == 0)),
        fragments=0 if fragments is None else len(fragments),
        rejects=reject_counts(plan.status),
        unused_fields=most_common(table.counts["unused_fields"]),
        notes=most_common(table.counts["notes"]),
        ignored_entries=list(state.reader.ignored_entries),
        packs=packs.num_packs,
        tokens=packs.tokens,
        supervised_tokens=_supervised(plan),
        weight_checksum=int(entries_of.weight_checksum[packs.indices].sum()) % 2**63,
        images=int(entries_of.num_images[packs.indices].sum(dtype=np.int64)),
        images_decoded=int(entries_of.num_decoded[packs.indices].sum(dtype=np.int64)),
        videos=num_videos,
        frames=int(entries_of.num_frames[packs.indices].sum(dtype=np.int64)),
        extract_frames=num_videos > 0 and options.extract_frames,
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
        media=options.media,
        media_check=options.media_check,
        template_fingerprint=encoder.renderer.template.fingerprint if isinstance(encoder, ChatEncoder) else "",
        image_settings=encoder.image_settings() if isinstance(encoder, ChatEncoder) else {},
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
    """Targets in all packs; None if the targets of a sample are unknown."""
    targets = plan.entries.supervised[plan.packs.indices]
    return None if (targets < 0).any() else int(targets.sum(dtype=np.int64))


def _sources(state: RunState, table: RecordTable, plan: Plan) -> list[SourceEntry]:
    """Build the manifest entries of the sources; sources after the first `_MAX_SOURCES` are joined in one entry."""
    configs, readings = state.options.source_configs, [source.reading for source in state.reader.sources]
    config_of = np.minimum([reading.config for reading in readings], _MAX_SOURCES)
    packed = plan.status == 0
    lengths = np.minimum(table.length, state.options.usable_len)
    if (fragments := plan.entries.fragments) is not None:
        np.put(lengths, fragments["record"], 0)
        np.add.at(lengths, fragments["record"], (fragments["stop"] - fragments["start"]).astype(lengths.dtype))
    config_of_record = config_of[table.locate(np.arange(len(table)))[0]]
    count = min(len(configs), _MAX_SOURCES + 1)
    # A weight above 1 reads a file several times: repeats are not counted as files.
    originals = [config for config, reading in zip(config_of, readings, strict=True) if not reading.copy]
    totals = (
        np.bincount(originals, minlength=count),
        np.bincount(config_of_record, minlength=count),
        np.bincount(config_of_record[packed], minlength=count),
        np.bincount(config_of_record[packed], weights=lengths[packed], minlength=count).astype(np.int64),
    )
    settings = [config.settings() for config in configs[:_MAX_SOURCES]] + [{"path": ["(others)"]}]
    return [
        SourceEntry(**source, files=files, records=records, packed=used, tokens=tokens)
        for source, files, records, used, tokens in zip(settings, *(t.tolist() for t in totals), strict=False)
    ]
