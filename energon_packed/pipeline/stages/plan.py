"""Stage 2, plan: rejects, packs and shards.

Input: the RecordTable of all measured records. Output: a Plan (the status of every record, the packs and the shards),
and the reports lengths.parquet and rejects.jsonl.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from energon_packed.arrays import blocks
from energon_packed.encoding import EncodedSample, Processor
from energon_packed.encoding.fragments import FRAGMENT, Fragments, split_sample, text_fragments
from energon_packed.errors import Reason, RecordError, Reject, RejectLimitError
from energon_packed.files import DiskList
from energon_packed.packing import PackPlan
from energon_packed.packing.planner import Assignment, assign, index_type
from energon_packed.pipeline.encoders import EncoderLoader
from energon_packed.pipeline.engine import Engine
from energon_packed.pipeline.groups import check_complete, reject_groups
from energon_packed.pipeline.measured.arrow_columns import string_column
from energon_packed.pipeline.measured.chunk_reader import RecordBytes, RecordOffsets, TokenReader
from energon_packed.pipeline.measured.chunks import COLUMNS, FRAMES, KINDS, STATUSES, TOKEN, TOKENS
from energon_packed.pipeline.measured.table import RecordRefs, RecordTable
from energon_packed.pipeline.options import PackOptions, RejectOptions
from energon_packed.pipeline.output.run_state import RunState
from energon_packed.pipeline.reader import RecordReader
from energon_packed.pipeline.rejects import Details
from energon_packed.pipeline.reports import SamplePlaces, TableRejects, write_reports
from energon_packed.shards.nv_meta import split_ranges

Status = npt.NDArray[np.int8]
_OVERLONG_BATCH = 64  # records per task
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
OVERLONG = STATUSES.index(Reason.OVERLONG.value)
_MEMBER_OVERHEAD = 1024  # bytes: the 512-byte header of a tar member, and at most 511 bytes of padding
_TOKENS_JSON = 80  # estimated bytes of a sample of tokens beside its tokens: id, boundaries, supervised spans
_BUCKET = 1 << 22  # entries of an array that is written in any order
_LOCATOR = 400  # estimated bytes of a reference to an image or video


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardPlan:
    """Plan of one shard.

    Attributes:
        number: index of the shard.
        split: `train`, `val` or `test`.
        first_pack: index of its first pack.
        rows: int64 (samples,), records of all its packs, pack after pack.
        bounds: int64 (packs+1,), `offsets` of the packs in the plan.
        num_bytes: estimated size of the tar, from the bytes of media and text; references have few bytes.
    """

    number: int
    split: str
    first_pack: int
    rows: Int64
    bounds: Int64
    num_bytes: int

    @property
    def span(self) -> slice:
        """The places of its rows in the order of all packs."""
        return slice(int(self.bounds[0]), int(self.bounds[-1]))

    @property
    def offsets(self) -> Int64:
        """Pack p is `rows[offsets[p]:offsets[p + 1]]`: int64 (packs+1,)."""
        offsets: Int64 = self.bounds - self.bounds[0]
        return offsets

    def name(self, prefix: str) -> str:
        """File name of the tar."""
        return f"{prefix}-{self.number:06d}.tar"


def plan_packs(table: RecordTable, options: PackOptions) -> tuple[PackPlan, Int32, Int32]:
    """Pack all records and fragments whose status is 0.

    Args:
        table: measured records, with the rejects of planning.
        options: options of the run.

    Returns:
        The packs, whose `indices` are indices into the table, of int32 if they fit; int32 (n,), the pack of each
        entry, -1 if it is rejected; and int32 (n,), its place in the pack. All arrays are files.
    """
    count, units, lengths, kinds = len(table), table.units(), table.length, table.kind
    index = index_type(count)
    if options.truncate is not None:
        lengths = table.copy(lengths)
        for block in blocks(count):
            np.minimum(lengths[block], options.truncate, out=lengths[block])
    if options.group_by == "media" and units is not None:  # a group is of the last of its kinds in KINDS
        kinds = table.empty(count, np.int8)
        for block in blocks(count):
            packed = np.flatnonzero(table.status[block] == 0)
            np.maximum.at(kinds, units[block][packed], table.kind[block][packed])
        for block in blocks(count):
            kinds[block] = kinds[units[block]]
    pack, place = table.empty(count, index), table.empty(count, np.int32)
    for block in blocks(count):
        pack[block] = -1
    sizes, packs, tokens = table.empty(count, np.int32), 0, 0
    for kind in range(len(KINDS)) if options.group_by == "media" else (None,):
        rows = _rows(table, None if kind is None else kinds, kind)
        own = table.empty(len(rows), np.int32)
        groups = None if units is None else table.empty(len(rows), np.int64)
        for block in blocks(len(rows)):
            own[block] = lengths[rows[block]]
            tokens += int(own[block].sum(dtype=np.int64))
            if units is not None and groups is not None:
                groups[block] = units[rows[block]]
        assigned = _plan_group(own, options, groups, table)
        for block in blocks(len(rows)):
            pack[rows[block]] = assigned.pack[block] + packs
            place[rows[block]] = assigned.place[block]
        sizes[packs : packs + len(assigned.sizes)] = assigned.sizes
        packs += len(assigned.sizes)
    # Planners emit packs by length: without a shuffle, splits and shards would differ in their samples.
    order = table.empty(packs, index)
    for block in blocks(packs):
        order[block] = np.arange(block.start, block.stop)
    np.random.default_rng(options.seed).shuffle(order)
    number, offsets = table.empty(packs, index), table.empty(packs + 1, np.int64)
    for block in blocks(packs):
        number[order[block]] = np.arange(block.start, block.stop)
        offsets[block.start + 1 : block.stop + 1] = (
            np.cumsum(sizes[order[block]], dtype=np.int64) + offsets[block.start]
        )
    indices = table.empty(int(offsets[-1]), index)
    for block in blocks(count):
        own = np.flatnonzero(pack[block] >= 0)
        pack[block][own] = number[pack[block][own]]
    _distribute(_by_place(pack, place, offsets), [indices], table)
    plan = PackPlan(
        indices=indices, offsets=offsets, overlong=np.zeros(0, dtype=np.int64), tokens=tokens, capacity=options.seq_len
    )
    return plan, pack, place


def _by_place(pack: Int32, place: Int32, offsets: Int64) -> Iterator[tuple[Int64, Int64]]:
    """Yield the places of entries in the order of the packs, int64 (k,), and their indices, int64 (k,), in blocks.

    Args:
        pack, place: as `plan_packs` returns them.
        offsets: int64 (packs+1,), place of the first entry of each pack.
    """
    for block in blocks(len(pack)):
        own = np.flatnonzero(pack[block] >= 0)
        yield offsets[pack[block][own]] + place[block][own], own + block.start


def in_order(plan: "Plan", columns: Sequence[npt.NDArray[Any]]) -> Callable[[slice, npt.NDArray[Any]], Any]:
    """Copy columns in the order of `plan.packs.indices`, so that a shard reads a range of them.

    Args:
        plan: the packs.
        columns: of all entries, or of all records. A column with a single value is not copied.

    Returns:
        Function that reads a range of one of these columns in this order.
    """
    table, places = plan.entries, plan.places
    varied = list({id(column): column for column in columns if column.flags.writeable}.values())
    outs = [table.empty(len(plan.packs.indices), column.dtype) for column in varied]
    copies = {id(column): out for column, out in zip(varied, outs, strict=True)}

    def parts() -> Iterator[tuple[npt.NDArray[Any], ...]]:
        for place, rows in _by_place(places.pack, places.sample, plan.packs.offsets):
            records = table.records(rows)
            yield place, *[column[rows if len(column) == len(table) else records] for column in varied]

    def read(span: slice, column: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if (copied := copies.get(id(column))) is not None:
            return copied[span]
        return np.broadcast_to(column[0], span.stop - span.start)

    if outs:
        _distribute(parts(), outs, table)
    return read


def _rows(table: RecordTable, kinds: Status | None, kind: int | None) -> npt.NDArray[Any]:
    """Entries of a kind whose status is 0, in order, integers (k,); of all kinds, if `kinds` is None."""
    rows, total = table.empty(len(table), index_type(len(table))), 0
    for block in blocks(len(table)):
        own = table.status[block] == 0
        if kinds is not None:
            own &= kinds[block] == kind
        found = np.flatnonzero(own)
        rows[total : total + len(found)] = found + block.start
        total += len(found)
    return rows[:total]


def _plan_group(
    lengths: npt.NDArray[np.int32], options: PackOptions, units: Int64 | None, table: RecordTable
) -> Assignment:
    single = not options.codec.packed
    return assign(
        lengths,
        options.seq_len,
        "sequential" if single else options.algorithm,
        1 if single else options.max_samples_per_pack,
        options.pad_multiple,
        units,
        table.empty,
    )


def _distribute(
    parts: Iterable[tuple[npt.NDArray[Any], ...]], outs: Sequence[npt.NDArray[Any]], table: RecordTable
) -> None:
    """Write values to places in any order, each place once: `outs[i][place] = values[i]`.

    They pass through buckets of consecutive places, so that files are read and written nearly in order.

    Args:
        parts: integers (k,), places, then (k,) values for each of `outs`.
        outs: arrays (m,).
        table: makes the buckets.
    """
    count = len(outs[0])
    if count <= _BUCKET:
        for place, *values in parts:
            for out, own in zip(outs, values, strict=True):
                out[place] = own
        return
    places, buckets = table.empty(count, np.int32), [table.empty(count, out.dtype) for out in outs]
    filled = list(range(0, count, _BUCKET))
    for place, *values in parts:
        bucket = (place // _BUCKET).astype(np.uint16)
        order = np.argsort(bucket, kind="stable")
        used, starts = np.unique(bucket[order], return_index=True)
        for number, first, last in zip(used.tolist(), starts, np.append(starts[1:], len(order)), strict=False):
            own = order[first:last]
            target = slice(filled[number], filled[number] + len(own))
            filled[number] = target.stop
            places[target] = place[own] - number * _BUCKET
            for stored, column in zip(buckets, values, strict=True):
                stored[target] = column[own]
    for first in range(0, count, _BUCKET):
        target = slice(first, first + _BUCKET)
        for out, stored in zip(outs, buckets, strict=True):
            out[target][places[target]] = stored[target]


def _columns_bytes(table: RecordTable) -> Int64:
    """Bytes of the columns of each entry: int64 (n,). A fragment has its part of the columns of the record."""
    sizes = table.columns_bytes
    if table.fragments is None or not sizes.any():
        return sizes
    own, count = table.copy(sizes), len(table) - len(table.fragments)
    for block in blocks(len(table.fragments)):
        own[count:][block] = own[count:][block] * table.length[count:][block] // table.fragments["total"][block]
    return own


def plan_shards(plan: PackPlan, pack: Int32, table: RecordTable, options: PackOptions) -> list[ShardPlan]:
    """Cut the packs into splits, and each split into shards of even size within the limits.

    Args:
        plan, pack: the packs, and the pack of each entry of the table, as `plan_packs` returns them.
        table: entries.
        options: options of the run.
    """
    sizes, written = _pack_sizes(plan, pack, table, options)
    shards: list[ShardPlan] = []
    for split, (start, stop) in split_ranges(plan.num_packs, options.split).items():
        for first, last in cut_evenly(sizes[start:stop], options.max_packs_per_shard, options.max_shard_bytes):
            begin, end = start + first, start + last
            bounds = plan.offsets[begin : end + 1]
            shards.append(
                ShardPlan(
                    number=len(shards),
                    split=split,
                    first_pack=begin,
                    rows=plan.indices[bounds[0] : bounds[-1]],
                    bounds=bounds,
                    num_bytes=int(written[begin:end].sum()),
                )
            )
    return shards


def _pack_sizes(plan: PackPlan, pack: Int32, table: RecordTable, options: PackOptions) -> tuple[Int64, Int64]:
    """Estimate the bytes of each pack, int64 (P,): with all files, by which packs are cut into shards, and as written.

    They differ if media are stored by reference.
    """
    columns_bytes, with_media = _columns_bytes(table), table.empty(plan.num_packs, np.int64)
    with_media[:] = _MEMBER_OVERHEAD * (4 if options.codec.stores_tokens else 1)  # members beside the media
    written = with_media
    if options.media == "reference":
        written = table.copy(with_media)
        written += _MEMBER_OVERHEAD
    for block in blocks(len(table)):
        own = np.flatnonzero(pack[block] >= 0) + block.start
        images, videos, audios = (column[own] for column in (table.num_images, table.num_videos, table.num_audios))
        media, files = table.media_bytes[own], images + videos + audios
        if options.extract_frames:
            media = np.where(videos > 0, table.extracted_bytes[own], media)
            files = images + table.num_frames[own] + audios
        content = media + _MEMBER_OVERHEAD * files + table.frames_bytes[own]
        if options.codec.stores_tokens:
            content += 4 * table.length[own].astype(np.int64) + _TOKENS_JSON + columns_bytes[own]
        else:
            content += table.text_bytes[own]
        np.add.at(with_media, pack[own], content)
        if options.media == "reference":  # the cuts stay those of a copy
            np.add.at(written, pack[own], content - media - (_MEMBER_OVERHEAD - _LOCATOR) * files)
    return with_media, written


def cut_evenly(sizes: Int64, max_packs: int, max_bytes: int) -> list[tuple[int, int]]:
    """Cut packs into as few ranges as the byte limit allows, of even count, with at most `max_packs` packs each."""
    ranges: list[tuple[int, int]] = []
    start = 0
    while start < len(sizes):
        remaining = len(sizes) - start
        even = -(-remaining // -(-remaining // max_packs))  # ceil(remaining / number of shards of max_packs)
        total = np.cumsum(sizes[start : start + even])
        by_bytes = start + int(np.searchsorted(total, max_bytes, side="right"))
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


def cut_overlong(
    reader: RecordReader, encoder: EncoderLoader, max_length: int, overlap: int | None, task: OverlongTask
) -> list[tuple[int, tuple[int, int] | Fragments | Reject]]:
    """Truncate or split samples, to find the samples for which it is not possible.

    Args:
        reader, encoder: as in the other stages.
        max_length: tokens of a row.
        overlap: tokens that a fragment repeats from the fragment before; None to truncate.
        task: the samples.

    Returns:
        the index of each record with its targets and their weight checksum, its fragments, or its reject.
    """
    results: list[tuple[int, tuple[int, int] | Fragments | Reject]] = []
    samples = _samples(reader, encoder.load(), task)
    for row, images, sample in zip(task.rows.tolist(), task.images.tolist(), samples, strict=True):
        try:
            if overlap is None:
                cut = sample.truncated(max_length)
                results.append((row, (cut.num_supervised, cut.weight_checksum)))
            else:
                fragments = split_sample(sample, max_length, overlap, images)
                fragments["record"] = row
                results.append((row, fragments))
        except RecordError as error:
            results.append((row, error.reject))
    return results


def _samples(reader: RecordReader, encoder: Processor, task: OverlongTask) -> Iterator[EncodedSample]:
    records = task.records
    tokens: dict[str, Any] = {"image_token_id": encoder.image_token_id}
    tokens |= {name: getattr(encoder.rules, name) for name in ("video_token_id", "audio_token_id")}
    if task.tokens is not None:
        with TokenReader(task.tokens) as token_reader:
            for place, length in enumerate(records.length.tolist()):
                yield replace(token_reader.read(place, length), **tokens)
        return
    for place, source in enumerate(records.source.tolist()):
        conversation = reader.read(source, int(records.address[place]), int(records.size[place]))
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
        places: place of each entry in the dataset.
        shards: the packs of each shard.
        utilization_ungrouped: utilization with `group_by='none'`, if the run groups; else None.
    """

    status: Status
    entries: RecordTable
    packs: PackPlan
    places: SamplePlaces
    shards: list[ShardPlan]
    utilization_ungrouped: float | None

    @property
    def num_bytes(self) -> int:
        """Estimated bytes of all tars, from the bytes of media and text."""
        return sum(shard.num_bytes for shard in self.shards)


def make_plan(state: RunState, table: RecordTable) -> Plan:
    """Plan all packs, write lengths.parquet and rejects.jsonl, and compare the rejects with the limits.

    Args:
        state: objects of the run.
        table: measured records.

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
        fingerprint=state.fingerprints.tars,
        groups=entries.group_numbers(),
    )
    try:
        rejects.check(options.limits, str(output.rejects))
    except RejectLimitError:
        nowhere = entries.empty(len(entries), np.int32)
        nowhere[:] = -1
        report(places=sample_places(nowhere, np.zeros_like(nowhere), [], options))
        raise
    packs, pack, place = plan_packs(entries, options)
    ungrouped = None
    if options.group_by != "none":
        ungrouped = plan_packs(entries, replace(options, group_by="none"))[0].utilization
    shards = plan_shards(packs, pack, entries, options)
    if sum(len(shard.rows) for shard in shards) != len(packs.indices):
        raise AssertionError("the shards do not contain every packed sample")
    places = sample_places(pack, place, shards, options)
    report(places=places)
    state.progress.advance(len(table), len(table))
    return Plan(
        status=rejects.status,
        entries=entries,
        packs=packs,
        places=places,
        shards=shards,
        utilization_ungrouped=ungrouped,
    )


def sample_places(pack: Int32, place: Int32, shards: Sequence[ShardPlan], options: PackOptions) -> SamplePlaces:
    """Find the place in the dataset of each entry from its pack and the place in it, as `plan_packs` returns them."""
    return SamplePlaces(
        pack=pack,
        sample=place,
        first_packs=np.array([shard.first_pack for shard in shards], dtype=np.int64),
        shards=string_column([shard.name(options.prefix) for shard in shards]),
        prefix=options.prefix,
    )


def plan_rejects(
    table: RecordTable,
    options: RejectOptions,
    reader: RecordReader,
    engine: Engine,
    *,
    kept: RecordBytes | None = None,
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
    status, supervised, checksums = table.copy(table.status), table.supervised, table.weight_checksum
    if options.truncate is not None:
        supervised, checksums = table.copy(supervised), table.copy(checksums)
    details = Details(len(table), table.folder)
    if max_images is not None:
        for block in blocks(len(table)):
            status[block][(status[block] == 0) & (table.num_images[block] > max_images)] = OVERLONG
    if table.has_groups:
        check_complete(table, reader)
        reject_groups(table, options, status, details, max_images)
    entries = replace(table, status=status, supervised=supervised, weight_checksum=checksums)
    fragments = DiskList(FRAGMENT, table.folder)
    tasks = (
        OverlongTask(
            rows=batch,
            records=table.refs(batch),
            images=table.num_images[batch],
            tokens=kept.refs(batch) if kept else None,
        )
        for batch in _overlong(entries, options, fragments)
    )
    if (first := next(tasks, None)) is not None:  # none: the encoder is not needed
        overlap = options.split_overlap if options.overlong == "split" else None
        check = partial(cut_overlong, reader, options.encoder_loader, options.usable_len, overlap)
        with closing(engine.run(check, itertools.chain([first], tasks))) as batches_done:
            for row, result in itertools.chain.from_iterable(batches_done):
                if isinstance(result, Reject):
                    status[row] = STATUSES.index(result.reason.value)
                    details[row] = result.detail
                elif isinstance(result, tuple):
                    supervised[row], checksums[row] = result
                else:
                    fragments.extend(result)
    rejects = TableRejects(
        table=table, reader=reader, status=status, details=details, options=options, max_images=max_images
    )
    return rejects, _with_fragments(entries, fragments)


def _overlong(table: RecordTable, options: RejectOptions, fragments: DiskList) -> Iterator[Int64]:
    """Yield the records longer than a row that have to be read to truncate or split them, int64 (k,), in batches.

    The others are rejected, or split: the fragments of text whose tokens are all targets follow from its length.

    Args:
        table: records, whose status is changed. No group is overlong: these are rejected by now.
        options: as for `plan_rejects`.
        fragments: the fragments are appended.
    """
    for block in blocks(len(table)):
        rows = block.start + np.flatnonzero((table.status[block] == 0) & (table.length[block] > options.usable_len))
        is_read = np.ones(len(rows), dtype=np.bool_)
        if options.overlong == "split":
            is_divisible = table.divisible[rows] == 1
            is_text = (table.num_images[rows] == 0) & (table.supervised[rows] == table.length[rows] - 1)
            for own in _batches(rows[is_divisible & is_text]):
                found = text_fragments(table.length[own], options.usable_len, options.split_overlap)
                found["record"] = own[found["record"]]
                fragments.extend(found)
            table.status[rows[~is_divisible]] = OVERLONG
            is_read = is_divisible & ~is_text
        elif options.truncate is None:
            table.status[rows] = OVERLONG
            continue
        yield from _batches(rows[is_read])


def _batches(rows: Int64) -> Iterator[Int64]:
    return (rows[first : first + _OVERLONG_BATCH] for first in range(0, len(rows), _OVERLONG_BATCH))


def _with_fragments(entries: RecordTable, fragments: DiskList) -> RecordTable:
    """Append the samples of records that are groups, and the fragments of records; itself without any.

    Args:
        entries: the records.
        fragments: fragments in any order, as tasks end in any order.
    """
    for block in blocks(len(entries.samples)):
        own = entries.samples[block]
        fragments.extend(own[entries.status[own["record"]] == 0])
    if not len(fragments):
        return entries
    found, ordered = fragments.values, entries.empty(len(fragments), FRAGMENT)
    starts = entries.empty(len(entries) + 1, np.int64)  # of the fragments of each record
    for block in blocks(len(found)):
        np.add.at(starts, found["record"][block] + 1, 1)
    for block in blocks(len(entries)):
        starts[block.start + 1 : block.stop + 1] = np.cumsum(starts[block.start : block.stop + 1])[1:]
    for block in blocks(len(found)):
        own = found[block]
        ordered[starts[own["record"]] + own["number"]] = own
    return entries.with_fragments(ordered)


def kept_tokens(state: RunState, table: RecordTable) -> RecordBytes | None:
    """Return the tokens that the measure stage stored; None for flavors without tokens."""
    if not state.options.codec.stores_tokens:
        return None
    columns = _kept(table, COLUMNS, table.columns_bytes) if table.columns_bytes.any() else None
    return _kept(table, TOKENS, table.length, unit=TOKEN, columns=columns)


def kept_frames(table: RecordTable) -> RecordBytes | None:
    """Return the frames and clips that the measure stage selected; None if no record has videos or audio."""
    return _kept(table, FRAMES, table.frames_bytes) if table.frames_bytes.any() else None


def _kept(table: RecordTable, suffix: str, sizes: npt.NDArray[np.integer], **options: Any) -> RecordBytes:
    files = [file.with_suffix(suffix) for file in table.files]
    return RecordBytes(files, table.file_starts, sizes, table.empty, **options)
