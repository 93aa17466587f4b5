"""Stage 2, plan: rejects, packs and shards.

Input: the RecordTable of all measured records. Output: a Plan (the status of every record, the packs and the shards),
and the reports lengths.parquet and rejects.jsonl.
"""

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from energon_packed.encoding import EncodedSample
from energon_packed.encoding.fragments import Fragments, split_sample, text_fragments
from energon_packed.errors import Reason, RecordError, Reject, RejectLimitError
from energon_packed.packing import PackPlan, pack_lengths
from energon_packed.pipeline.chunks import (
    KINDS,
    STATUSES,
    RecordBytes,
    RecordOffsets,
    TokenCache,
    TokenReader,
    columns_file,
    frames_file,
    tokens_file,
)
from energon_packed.pipeline.encoders import EncoderLoader
from energon_packed.pipeline.engine import Engine
from energon_packed.pipeline.groups import check_complete, reject_groups
from energon_packed.pipeline.options import PackOptions, RejectOptions
from energon_packed.pipeline.reader import RecordReader
from energon_packed.pipeline.reports import SamplePlaces, TableRejects, write_reports
from energon_packed.pipeline.run_state import RunState
from energon_packed.pipeline.table import RecordRefs, RecordTable
from energon_packed.shards.nv_meta import split_ranges

Status = npt.NDArray[np.int8]
_OVERLONG_BATCH = 64  # records per task
Int64 = npt.NDArray[np.int64]
OVERLONG = STATUSES.index(Reason.OVERLONG.value)
_PACKS = 1 << 12  # packs that are handled at a time, so that temporary arrays are small
_MEMBER_OVERHEAD = 1024  # bytes: the 512-byte header of a tar member, and at most 511 bytes of padding
_TOKENS_JSON = 80  # estimated bytes of a sample of tokens beside its tokens: id, boundaries, supervised spans
_LOCATOR = 400  # estimated bytes of a reference to an image or video


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardPlan:
    """Plan of one shard.

    Attributes:
        number: index of the shard.
        split: `train`, `val` or `test`.
        first_pack: index of its first pack.
        rows: int64 (samples,), records of all its packs, pack after pack.
        offsets: int64 (packs+1,), pack p is `rows[offsets[p]:offsets[p + 1]]`.
        num_bytes: estimated size of the tar, from the bytes of media and text; references have few bytes.
    """

    number: int
    split: str
    first_pack: int
    rows: Int64
    offsets: Int64
    num_bytes: int

    def name(self, prefix: str) -> str:
        """File name of the tar."""
        return f"{prefix}-{self.number:06d}.tar"


def plan_packs(table: RecordTable, options: PackOptions) -> PackPlan:
    """Pack all records and fragments whose status is 0; `indices` are indices into the table, of int32 if they fit.

    Args:
        table: measured records, with the rejects of planning.
        options: options of the run.
    """
    # Half the memory of int64, for tables of almost any size.
    rows: Any = np.flatnonzero(table.status == 0).astype(np.int32 if len(table) < 1 << 31 else np.int64)
    lengths = table.length if options.truncate is None else np.minimum(table.length, options.truncate)
    units, groups = table.units(), [rows]
    if options.group_by == "media":
        kinds = table.kind
        if units is not None:  # a group is of the last of its kinds in KINDS
            kinds = np.zeros_like(kinds)
            np.maximum.at(kinds, units[rows], table.kind[rows])
            kinds = kinds[units]
        groups = [rows[kinds[rows] == kind] for kind in range(len(KINDS))]

    def plan(rows: Int64) -> PackPlan:
        own = lengths if len(rows) == len(lengths) else lengths[rows]
        return _plan_group(own, options, None if units is None else units[rows])

    with ThreadPoolExecutor(len(groups)) as pool:  # in parallel: the kernels release the GIL
        plans = list(pool.map(plan, groups))
    # Join the plans: offsets of a group are shifted by the samples of the groups before it.
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
    # Planners emit packs by length: without a shuffle, splits and shards would differ in their samples.
    order = np.random.default_rng(options.seed).permutation(joined.num_packs)
    del plans, rows, groups
    return joined.reordered(order)


def _plan_group(lengths: npt.NDArray[np.int32], options: PackOptions, units: Int64 | None) -> PackPlan:
    single = not options.codec.packed
    return pack_lengths(
        lengths,
        options.seq_len,
        algorithm="sequential" if single else options.algorithm,
        max_samples=1 if single else options.max_samples_per_pack,
        multiple=options.pad_multiple,
        groups=units,
    )


def _columns_bytes(table: RecordTable) -> Int64:
    """Bytes of the columns of each entry: int64 (n,). A fragment has its part of the columns of the record."""
    sizes = table.columns_bytes
    if table.fragments is None or not sizes.any():
        return sizes
    own, count = sizes.copy(), len(table) - len(table.fragments)
    own[count:] = own[count:] * table.length[count:] // table.fragments["total"]
    return own


def plan_shards(plan: PackPlan, table: RecordTable, options: PackOptions) -> list[ShardPlan]:
    """Cut the packs into splits, and each split into shards of even size within the limits."""
    sizes, written = _pack_sizes(plan, table, options)
    shards: list[ShardPlan] = []
    for split, (start, stop) in split_ranges(plan.num_packs, options.split).items():
        for first, last in cut_evenly(sizes[start:stop], options.max_packs_per_shard, options.max_shard_bytes):
            begin, end = start + first, start + last
            offsets = plan.offsets[begin : end + 1]
            shards.append(
                ShardPlan(
                    number=len(shards),
                    split=split,
                    first_pack=begin,
                    rows=plan.indices[offsets[0] : offsets[-1]],
                    offsets=offsets - offsets[0],
                    num_bytes=int(written[begin:end].sum()),
                )
            )
    return shards


def _pack_sizes(plan: PackPlan, table: RecordTable, options: PackOptions) -> tuple[Int64, Int64]:
    """Estimate the bytes of each pack, int64 (P,): with all files, by which packs are cut into shards, and as written.

    They differ if media are stored by reference.
    """
    columns_bytes, with_media = _columns_bytes(table), np.zeros(plan.num_packs, dtype=np.int64)
    written = with_media.copy() if options.media == "reference" else with_media
    for first in range(0, plan.num_packs, _PACKS):  # in blocks, as a sample needs several numbers
        bounds = plan.offsets[first : first + _PACKS + 1]
        rows, starts = plan.indices[bounds[0] : bounds[-1]], bounds[:-1] - bounds[0]
        images, videos, audios = (column[rows] for column in (table.num_images, table.num_videos, table.num_audios))
        media, files = table.media_bytes[rows], images + videos + audios
        if options.extract_frames:
            media = np.where(videos > 0, table.extracted_bytes[rows], media)
            files = images + table.num_frames[rows] + audios
        content = media + _MEMBER_OVERHEAD * files + table.frames_bytes[rows]
        if options.codec.stores_tokens:
            content += 4 * table.length[rows].astype(np.int64) + _TOKENS_JSON + columns_bytes[rows]
        else:
            content += table.text_bytes[rows]
        sizes = np.add.reduceat(content, starts)
        sizes += _MEMBER_OVERHEAD * (4 if options.codec.stores_tokens else 1)  # members of a pack beside the media
        with_media[first : first + _PACKS] = sizes
        if options.media == "reference":  # the cuts stay those of a copy
            absent = media + (_MEMBER_OVERHEAD - _LOCATOR) * files
            written[first : first + _PACKS] = sizes - np.add.reduceat(absent, starts) + _MEMBER_OVERHEAD
    return with_media, written


def cut_evenly(sizes: Int64, max_packs: int, max_bytes: int) -> list[tuple[int, int]]:
    """Cut packs into as few ranges as the byte limit allows, of even count, with at most `max_packs` packs each."""
    ranges: list[tuple[int, int]] = []
    total = np.concatenate([[0], np.cumsum(sizes)])
    start = 0
    while start < len(sizes):
        by_bytes = int(np.searchsorted(total, total[start] + max_bytes, side="right")) - 1
        remaining = len(sizes) - start
        even = -(-remaining // -(-remaining // max_packs))  # ceil(remaining / number of shards of max_packs)
        stop = max(start + 1, min(by_bytes, start + even))  # a pack larger than max_bytes is alone in its shard
        ranges.append((start, stop))
        start = stop
    return ranges


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlongTask:
    """Samples to truncate or split because they are longer than a row.

    Attributes:
        rows: int64 (k,), indices of the records.
        records: their addresses.
        images: int32 (k,), their images.
        tokens: files of their tokens, for flavors that store tokens.
    """

    rows: Int64
    records: RecordRefs
    images: npt.NDArray[np.int32]
    tokens: RecordOffsets | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlongCheck:
    """Function for an engine: truncates or splits samples, to find the samples for which it is not possible.

    Attributes:
        reader, encoder: as in the other stages.
        max_length: tokens of a row.
        overlap: tokens that a fragment repeats from the fragment before; None to truncate.
    """

    reader: RecordReader
    encoder: EncoderLoader
    max_length: int
    overlap: int | None

    def __call__(self, task: OverlongTask) -> list[tuple[int, tuple[int, int] | Fragments | Reject]]:
        """Return the index of each record with its targets and their weight checksum, its fragments, or its reject."""
        results: list[tuple[int, tuple[int, int] | Fragments | Reject]] = []
        for row, images, sample in zip(task.rows.tolist(), task.images.tolist(), self._samples(task), strict=True):
            try:
                if self.overlap is None:
                    cut = sample.truncated(self.max_length)
                    results.append((row, (cut.num_supervised, cut.weight_checksum)))
                else:
                    fragments = split_sample(sample, self.max_length, self.overlap, images)
                    fragments["record"] = row
                    results.append((row, fragments))
            except RecordError as error:
                results.append((row, error.reject))
        return results

    def _samples(self, task: OverlongTask) -> Iterator[EncodedSample]:
        encoder, records = self.encoder.load(), task.records
        tokens: dict[str, Any] = {"image_token_id": encoder.image_token_id}
        tokens |= {name: getattr(encoder.rules, name) for name in ("video_token_id", "audio_token_id")}
        if task.tokens is not None:
            with TokenReader(task.tokens) as reader:
                for place, length in enumerate(records.length.tolist()):
                    yield replace(reader.read(place, length), **tokens)
            return
        for place, source in enumerate(records.source.tolist()):
            conversation = self.reader.read(source, int(records.address[place]), int(records.size[place]))
            measured = encoder.measure([conversation], keep_tokens=True)[0]
            if measured.reject is not None or measured.sample is None:
                raise RecordError.of(measured.reject or Reject(Reason.EMPTY, "its encoder keeps no tokens"))
            yield measured.sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Result of the plan stage.

    Attributes:
        status: int8 (n,), index into STATUSES, including the rejects that depend on `seq_len`.
        entries: what is packed: the records, and the fragments of records that are split.
        packs: all packs; `indices` are indices into `entries`.
        shards: the packs of each shard.
        utilization_ungrouped: utilization with `group_by='none'`, if the run groups; else None.
    """

    status: Status
    entries: RecordTable
    packs: PackPlan
    shards: list[ShardPlan]
    utilization_ungrouped: float | None

    @property
    def num_bytes(self) -> int:
        """Estimated bytes of all tars, from the bytes of media and text."""
        return sum(shard.num_bytes for shard in self.shards)


def make_plan(state: RunState, table: RecordTable) -> Plan:
    """Plan all packs, write lengths.parquet and rejects.jsonl, and compare the rejects with the limits.

    Raises:
        RejectLimitError: more records are rejected than allowed.
    """
    options, output = state.options, state.output
    state.progress.start("plan", len(table), "records")
    rejects, entries = plan_rejects(table, options, state.reader, state.engine, kept=kept_tokens(state, table))
    report = partial(
        write_reports,
        rejects,
        entries.fragments,
        usable_len=options.usable_len,
        output=output,
        groups=entries.group_numbers(),
    )
    try:
        rejects.check(options.limits, str(output.rejects))
    except RejectLimitError:
        report(places=sample_places(len(entries), None, [], options))
        raise
    packs = plan_packs(entries, options)
    ungrouped = None
    if options.group_by != "none":
        ungrouped = plan_packs(entries, replace(options, group_by="none")).utilization
    shards = plan_shards(packs, entries, options)
    if sum(len(shard.rows) for shard in shards) != len(packs.indices):
        raise AssertionError("the shards do not contain every packed sample")
    report(places=sample_places(len(entries), packs, shards, options))
    state.progress.advance(len(table), len(table))
    return Plan(status=rejects.status, entries=entries, packs=packs, shards=shards, utilization_ungrouped=ungrouped)


def sample_places(
    count: int, packs: PackPlan | None, shards: Sequence[ShardPlan], options: PackOptions
) -> SamplePlaces:
    """Find the place in the dataset of each of `count` entries; without packs, none has a place."""
    pack, sample = np.full(count, -1, dtype=np.int32), np.zeros(count, dtype=np.int32)
    if packs is not None:
        for first in range(0, packs.num_packs, _PACKS):
            bounds = packs.offsets[first : first + _PACKS + 1]
            rows, sizes = packs.indices[bounds[0] : bounds[-1]], np.diff(bounds)
            pack[rows] = np.repeat(np.arange(first, first + len(sizes)), sizes)
            sample[rows] = np.arange(bounds[0], bounds[-1]) - np.repeat(bounds[:-1], sizes)
    return SamplePlaces(
        pack=pack,
        sample=sample,
        first_packs=np.array([shard.first_pack for shard in shards], dtype=np.int64),
        shards=[shard.name(options.prefix) for shard in shards],
        prefix=options.prefix,
    )


def plan_rejects(
    table: RecordTable,
    options: RejectOptions,
    reader: RecordReader,
    engine: Engine,
    *,
    kept: TokenCache | None = None,
    max_images: int | None = None,
) -> tuple[TableRejects, RecordTable]:
    """Find the rejected records, including those that do not fit a row, and truncate or split the others.

    Args:
        table: measured records.
        options: handling of records longer than a row.
        reader: reads the input.
        engine: runs the truncation.
        kept: tokens of the records, if the flavor stores tokens.
        max_images: images that fit a row; None for any number.

    Returns:
        The rejected records, and the entries to pack: the records with their status after planning and their targets
        after truncation, and the fragments of records that are split.
    """
    status, supervised, checksums = table.status.copy(), table.supervised, table.weight_checksum
    if options.truncate is not None:
        supervised, checksums = supervised.copy(), checksums.copy()
    details: dict[int, str] = {}
    # `status` and `details` are filled below, after the object that shares them is made.
    rejects = TableRejects(
        table=table, reader=reader, status=status, details=details, options=options, max_images=max_images
    )
    if max_images is not None:
        status[(status == 0) & (table.num_images > max_images)] = OVERLONG
    if table.has_groups:
        check_complete(table, reader)
        reject_groups(table, options, status, details, max_images)
    is_overlong = (status == 0) & (table.length > options.usable_len)  # no group: these are rejected by now
    entries = replace(table, status=status, supervised=supervised, weight_checksum=checksums)
    fragments = [table.samples[status[table.samples["record"]] == 0]]
    if options.overlong == "split":
        status[is_overlong & (table.divisible == 0)] = OVERLONG
    elif options.truncate is None:
        status[is_overlong] = OVERLONG
    overlong = np.flatnonzero(is_overlong & (status == 0))
    if options.overlong == "split":
        # The fragments of text whose tokens are all targets follow from its length; the other records are read.
        is_text = (table.num_images[overlong] == 0) & (supervised[overlong] == table.length[overlong] - 1)
        for row, length in zip(overlong[is_text].tolist(), table.length[overlong[is_text]].tolist(), strict=True):
            fragments.append(text_fragments(length, options.usable_len, options.split_overlap))
            fragments[-1]["record"] = row
        overlong = overlong[~is_text]
    if len(overlong) == 0:
        return rejects, _with_fragments(entries, fragments)
    check = OverlongCheck(
        reader=reader,
        encoder=options.encoder_loader,
        max_length=options.usable_len,
        overlap=options.split_overlap if options.overlong == "split" else None,
    )
    batches = [overlong[i : i + _OVERLONG_BATCH] for i in range(0, len(overlong), _OVERLONG_BATCH)]
    tasks = (
        OverlongTask(
            rows=batch,
            records=table.refs(batch),
            images=table.num_images[batch],
            tokens=kept.refs(batch) if kept else None,
        )
        for batch in batches
    )
    with closing(engine.run(check, tasks)) as batches_done:
        for row, result in itertools.chain.from_iterable(batches_done):
            if isinstance(result, Reject):
                status[row] = STATUSES.index(result.reason.value)
                details[row] = result.detail
            elif isinstance(result, tuple):
                supervised[row], checksums[row] = result
            else:
                fragments.append(result)
    return rejects, _with_fragments(entries, fragments)


def _with_fragments(entries: RecordTable, fragments: Sequence[Fragments]) -> RecordTable:
    """Append the fragments of records; itself without fragments."""
    joined = np.concatenate(fragments)
    # Tasks end in any order; the plan must not depend on it.
    return entries.with_fragments(joined[np.argsort(joined["record"], kind="stable")]) if len(joined) else entries


def kept_tokens(state: RunState, table: RecordTable) -> TokenCache | None:
    """Return the tokens that the measure stage stored; None for flavors without tokens."""
    if not state.options.codec.stores_tokens:
        return None
    columns = None
    if table.columns_bytes.any():
        columns = RecordBytes([columns_file(file) for file in table.files], table.file_starts, table.columns_bytes)
    return TokenCache([tokens_file(file) for file in table.files], table.file_starts, table.length, columns)


def kept_frames(table: RecordTable) -> RecordBytes | None:
    """Return the frames and clips that the measure stage selected; None if no record has videos or audio."""
    if not table.frames_bytes.any():
        return None
    return RecordBytes([frames_file(file) for file in table.files], table.file_starts, table.frames_bytes)
