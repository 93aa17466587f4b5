"""Runs that write no dataset.

Input of `survey_lengths`: LengthsOptions. Output: a Survey, the lengths of all records or of a sample of them, as the
measure stage finds them. Input of `dry_run`: PackOptions. Output: a DryRun, which counts the packs, shards and bytes
that `pack` would write, from the restart state or from a sample of the records; the output folder is only read.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

from energon_packed.errors import ConfigError, IgnoredEntries
from energon_packed.files import atomic_path
from energon_packed.options import option, short
from energon_packed.pipeline.encoders import log_notices
from energon_packed.pipeline.engine import LocalEngine, Progress
from energon_packed.pipeline.measured.chunks import Chunk
from energon_packed.pipeline.measured.table import RecordTable, load_table, most_common
from energon_packed.pipeline.options import OUTPUT, PACKING, InputOptions, PackOptions, parse_seq_len
from energon_packed.pipeline.output.folder import Folder, work_folder
from energon_packed.pipeline.output.locks import FolderLock
from energon_packed.pipeline.output.run_state import compute_fingerprints
from energon_packed.pipeline.reader import RecordReader, open_reader
from energon_packed.pipeline.rejects import RejectLimits, advice
from energon_packed.pipeline.reports import TableRejects, record_names
from energon_packed.pipeline.stages.measure import MeasureStage
from energon_packed.pipeline.stages.plan import plan_packs, plan_rejects, plan_shards
from energon_packed.sources import Source

_MAX_SEQ_LEN = int(np.iinfo(np.int32).max)
_SPREAD = 64  # ranges of the input in a sample: neighbors in a file are often alike, so few ranges would mislead
_SAMPLE = 512  # records measured for a dry run
_PROBES, _PROBE_RECORDS = 32, 16  # positions in the input, and records read at each, to estimate the size of a record


def sampled_chunks(stage: MeasureStage, sample: int, seed: int) -> tuple[list[Chunk], float]:
    """Choose short ranges all over the input, with about `sample` records in total.

    Every address of the input is chosen with the same probability, so the sources and the parts of a file are sampled
    in proportion to their records. Addresses have different units (bytes, table rows), so positions in the input are
    estimated numbers of records.

    Returns:
        The chunks, and the factor from counts in them to counts in the input. Both are of the complete input if it
        has no more records than `sample`.
    """
    sources = stage.reader.sources
    chunks = [source.chunks() for source in sources]
    spans = [(ranges[0][0], ranges[-1][1]) if ranges else (0, 0) for ranges in chunks]
    rng = np.random.default_rng(seed)
    density, found = _densities(sources, spans, rng)
    edges = np.concatenate([[0], np.cumsum(density * [stop - start for start, stop in spans])])
    total = float(edges[-1])
    if sample >= total:
        return stage.chunks(), 1.0
    # One range at a random position in each of `count` equal parts of the input.
    count = min(sample, max(_SPREAD, len(sources)))
    positions = (np.arange(count) + rng.random(count) * (1 - sample / total)) * total / count
    chosen = []
    for position in positions.tolist():
        edge = position + sample / count
        for number in range(int(np.searchsorted(edges, position, side="right")) - 1, len(sources)):
            if edges[number] >= edge:
                break
            # A range that crosses the end of a source continues in the next source.
            inside = np.clip([position, edge], edges[number], edges[number + 1]) - edges[number]
            start, stop = (spans[number][0] + np.ceil(inside / density[number]).astype(np.int64)).tolist()
            if start < (stop := min(stop, spans[number][1])):
                chosen.append((number, start, stop))
    # A few short ranges may all be inside long lines.
    if all(next(sources[number].scan(start, stop), None) is None for number, start, stop in chosen):
        chosen = found
    picked = sum(density[number] * (stop - start) for number, start, stop in chosen)
    return [stage.chunk(f"{index:07d}", *edges) for index, edges in enumerate(chosen)], float(total / picked)


def _densities(
    sources: Sequence[Source], spans: Sequence[tuple[int, int]], rng: np.random.Generator
) -> tuple[npt.NDArray[np.float64], list[tuple[int, int, int]]]:
    """Estimate the records per address of each source from some of its records.

    A wrong estimate changes the number of records in a sample, but not the probability of a record.

    Returns:
        float64 (sources,), and the range (source, start, stop) of one record; [] if no record was found.
    """
    density = np.empty(len(sources))
    found: list[tuple[int, int, int]] = []
    for number, (source, (start, stop)) in enumerate(zip(sources, spans, strict=True)):
        estimates = []
        # Evenly spaced probes could all hit the same place of a repeating pattern.
        for address in [start, *rng.integers(start, max(stop, start + 1), max(1, _PROBES // len(sources))).tolist()]:
            rows = [(row.address, max(row.size, 1)) for row in islice(source.scan(address, stop), _PROBE_RECORDS)]
            if rows:
                found = found or [(number, rows[0][0], rows[0][0] + 1)]
                estimates.append(len(rows) / (sum(rows[-1]) - rows[0][0]))
        # A source without a record in any probe has few records, if any.
        density[number] = np.mean(estimates) if estimates else 1 / max(stop - start, 1)
    return density, found


def parse_seq_lens(value: int | str | Sequence[int]) -> tuple[int, ...]:
    """Return candidates, from an integer, integers, or `2048,4k`.

    Raises:
        ConfigError: the value has another form, is empty, or a candidate is out of range.
    """
    if isinstance(value, str):
        try:
            value = [parse_seq_len(part) for part in value.replace(",", " ").split()]
        except ConfigError as error:
            raise ConfigError(f"`seq_lens` must be integers, such as 8192 or 8k, got {value!r}") from error
    seq_lens = value if isinstance(value, list | tuple) else [value]
    if not seq_lens:
        raise ConfigError("`seq_lens` must have at least one candidate")
    for seq_len in seq_lens:
        if not isinstance(seq_len, int) or isinstance(seq_len, bool):
            raise ConfigError(f"`seq_len` must be an integer, such as 8192 or 8k, got {short(seq_len)}")
        if not 1 <= seq_len <= _MAX_SEQ_LEN:
            limit = f"at most {_MAX_SEQ_LEN}" if seq_len > 1 else "at least 1"
            raise ConfigError(f"`seq_len` must be {limit}, got {short(seq_len)}")
    return tuple(seq_lens)


@dataclass(frozen=True, kw_only=True)
class LengthsOptions(InputOptions):
    """Options of a survey: the input and the values of `seq_len` to compare. Raises ConfigError if one is invalid."""

    seq_lens: Sequence[int] = option(
        lambda: (2048, 4096, 8192, 16384, 32768), help="Candidates.", group=PACKING, parse=parse_seq_lens,
        flags=("--seq-len",), metavar="N [N...]", shown_default="2048 4096 8192 16384 32768",
    )  # fmt: skip
    sample: int | None = option(
        None, help="Measure about N records, from all over the input.", group=PACKING, minimum=1, metavar="N"
    )
    output_dir: Path | None = option(
        None, help="Keep the measurements in this folder, for reuse by pack.", group=OUTPUT,
        flags=("--output-dir", "-o"), metavar="DIR",
    )  # fmt: skip
    work_dir: Path | None = option(
        None, help="With an output in an object store: local folder of the measurements.", group=OUTPUT,
        metavar="DIR", shown_default="energon-packed in the cache folder of the user",
    )  # fmt: skip
    output: Path | None = option(
        None, help="Write a line NAME:LENGTH per record that can be packed.", group=OUTPUT, metavar="FILE"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.output is not None and self.output.is_dir():
            raise ConfigError(f"`output` {self.output} is a folder; pass the name of a text file")
        if self.output is not None and self.sample is not None:
            raise ConfigError("`output` lists all records, and `sample` measures some of them; omit one")

    @property
    def written(self) -> Mapping[str, tuple[Path, ...]]:
        """The list of lengths, and the reports that `pack` writes to the output folder later."""
        reports = () if self.output_dir is None else (self.output_dir / "lengths.parquet",)
        return {"output_dir": reports, "output": () if self.output is None else (self.output,)}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Survey:
    """Result of a survey.

    Attributes:
        lengths: int32 (n,), tokens of the records that can be packed.
        rejects: rejected records by reason.
        is_sample: only some of the records were measured.
        reused: records whose length an earlier run had measured.
        reject_summary: the reasons with their counts and examples.
        advice: remedy for the most common reason, or "".
        unused_fields: number of records with each unused field, by its name.
        notes: number of records with each note of the reader.
        ignored_entries: entries of input folders that are not read, by reason.
        videos, frames: video files of these records, and their selected frames.
        audios, audio_seconds: audio files of these records, and the seconds of audio, with the tracks that are used.
    """

    lengths: npt.NDArray[np.int32]
    rejects: dict[str, int]
    is_sample: bool
    reused: int = 0
    reject_summary: str = ""
    advice: str = ""
    unused_fields: Mapping[str, int] = field(default_factory=dict)
    notes: Mapping[str, int] = field(default_factory=dict)
    ignored_entries: Sequence[IgnoredEntries] = ()
    videos: int = 0
    frames: int = 0
    audios: int = 0
    audio_seconds: float = 0.0

    @property
    def records(self) -> int:
        """Records measured."""
        return len(self.lengths) + sum(self.rejects.values())


def survey_lengths(options: LengthsOptions, progress: Progress | None = None) -> Survey:
    """Measure records as `pack` does.

    Args:
        options: input and settings of the survey.
        progress: notified of the stage.

    Raises:
        ConfigError, SourceError: as `pack`.
        RejectLimitError: more records are rejected than `max_reject_rate` allows, or all are.
    """
    with _work_folder(options) as output:
        reader = open_reader(options, output.work)
        if options.output_dir is None and options.image_root is None:  # otherwise pack may reuse the measurements
            configs = options.source_configs
            unbounded = [n for n, s in enumerate(reader.sources) if configs[s.reading.config].image_root is None]
            reader = replace(reader, unbounded=frozenset(unbounded))
        log_notices(options.encoder_loader)
        stage = MeasureStage(
            options=options,
            reader=reader,
            folder=output.measure_folder(compute_fingerprints(options, reader.sources, None).measure),
            engine=LocalEngine(options.processes),
            keep_tokens=options.codec.stores_tokens and options.output_dir is not None,
            progress=progress or Progress(),
        )
        chunks, scale = (None, 1.0) if options.sample is None else sampled_chunks(stage, options.sample, options.seed)
        table = stage.run(chunks)
        rejected = TableRejects(table=table, reader=reader, status=table.status, is_sample=scale != 1)
        rejected.check(RejectLimits(max_reject_rate=options.max_reject_rate))
        if options.output is not None:
            write_lengths(table, reader, options.output)
        rejects, summary = rejected.counts, rejected.summary()
        lengths, usable = table.empty(len(table), np.int32), 0
        for own in table.packable(table.length):
            lengths[usable : usable + len(own)] = own
            usable += len(own)

    return Survey(
        lengths=lengths[:usable],
        videos=table.total(table.num_videos),
        frames=table.total(table.num_frames),
        audios=table.total(table.num_audios),
        audio_seconds=table.total(table.audio_ms) / 1000,
        rejects=rejects,
        reject_summary=summary,
        advice=advice(rejects),
        unused_fields=most_common(table.counts["unused_fields"]),
        notes=most_common(table.counts["notes"]),
        ignored_entries=reader.ignored_entries,
        is_sample=rejected.is_sample,
        reused=stage.counters["reused"],
    )


def write_lengths(table: RecordTable, reader: RecordReader, out: Path) -> None:
    """Write `NAME:LENGTH` of every record that can be packed, in input order; NAME is its id, as in lengths.parquet.

    This is the format that LLaVA-OneVision-2's `s3_bin_packing.py` reads: the length follows the last colon.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        with atomic_path(out) as file, file.open("w", encoding="utf-8") as lines:
            for chunk in record_names(table, reader):
                for index in np.flatnonzero(table.status[chunk.rows] == 0).tolist():
                    lines.write(f"{' '.join(chunk.names[index].split())}:{table.length[chunk.rows[index]]}\n")
    except OSError as error:
        raise ConfigError(f"`output` {out} cannot be written: {error.strerror}; pass another path") from error


@contextmanager
def _work_folder(options: LengthsOptions) -> Iterator[Folder]:
    """Open the output folder, or a temporary folder, which is enough for a sample: `pack` cannot reuse it."""
    if options.output_dir is None or options.sample is not None:
        with tempfile.TemporaryDirectory(prefix="energon-packed-") as folder:
            yield Folder(Path(folder))
        return
    output = Folder(options.output_dir, work_folder(options.output_dir, options.work_dir))
    with FolderLock(options.output_dir, output.work):
        try:
            yield output
        finally:
            output.remove_leftovers()


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """Result of a dry run: the work and the output of a run with these options.

    Attributes:
        files: input files.
        input_bytes: size of the input files.
        to_measure: share of the input that no earlier run has measured, 0 to 1.
        sampled: records measured for the estimates below; 0 if all numbers are exact.
        records: records in the input.
        rejects: rejected records by reason.
        reject_summary: the reasons with examples, or "".
        packs, shards, tokens: counts of the plan.
        num_bytes: estimated size of all tars.
        unused_fields, notes: number of measured records with each unused field and each note.
        ignored_entries: entries of input folders that are not read, by reason.
        example: (role, text) of the turns of the first record that would be packed.
        free_bytes: free space in the file system of the output folder, including tars that would be replaced.
    """

    files: tuple[Path, ...]
    input_bytes: int
    to_measure: float
    sampled: int
    records: int
    rejects: dict[str, int]
    reject_summary: str
    packs: int
    shards: int
    tokens: int
    num_bytes: int
    free_bytes: int
    unused_fields: Mapping[str, int]
    notes: Mapping[str, int]
    ignored_entries: Sequence[IgnoredEntries]
    example: tuple[tuple[str, str], ...]


def dry_run(options: PackOptions) -> DryRun:
    """Open the input and compute what `pack` would do, from a sample of the records if lengths are unknown.

    Raises:
        ConfigError: options are invalid, the output folder has another run, or the disk is too small.
        SourceError: an input cannot be read.
        RejectLimitError: more records are rejected than the options allow, or all are.
    """
    output = Folder(options.output_dir, work_folder(options.output_dir, options.work_dir))
    with _scratch(output) as work:
        reader = open_reader(options, work, options.part)
        log_notices(options.encoder_loader)
        fingerprints = compute_fingerprints(options, reader.sources, options.part)
        output.set_run(fingerprints.write, fingerprints.settings)
        output.check_other_run(overwrite=options.overwrite)
        stage = MeasureStage(
            options=options,
            reader=reader,
            folder=output.measure_folder(fingerprints.measure),
            engine=LocalEngine(1),
            keep_tokens=options.codec.stores_tokens,
            keep_media=options.media == "reference",
        )
        chunks = stage.chunks()
        known = stage.reusable(chunks) if options.resume else set()
        total = sum(chunk.stop - chunk.start for chunk in chunks)
        if len(known) == len(chunks):
            table, scale = load_table(chunks, len(reader.sources), work), 1.0
        else:
            sample = replace(stage, folder=work / "sample", keep_tokens=False, keep_media=False)
            picked, scale = sampled_chunks(sample, _SAMPLE, options.seed)
            table = sample.run(picked)
        is_sample = len(known) < len(chunks)
        rejected, entries = plan_rejects(table, options, reader, stage.engine)
        rejected = replace(rejected, is_sample=scale != 1)
        rejected.check(options.limits)
        rejects, summary = rejected.counts, rejected.summary()
        example = _example(table, rejected.status, reader)
        planned = _planned(entries, options, scale)
    output.check_space(planned["num_bytes"], options.unfinished_bytes)
    files = tuple(source.path for source in reader.sources)
    return DryRun(
        files=files,
        input_bytes=sum(file.stat().st_size for file in files),
        to_measure=1 - sum(chunk.stop - chunk.start for chunk in known) / max(total, 1),
        sampled=len(table) if is_sample else 0,
        records=round(len(table) * scale),
        rejects={reason: max(1, round(count * scale)) for reason, count in rejects.items()},
        reject_summary=summary,
        free_bytes=output.free_bytes(),
        unused_fields=most_common(table.counts["unused_fields"]),
        notes=most_common(table.counts["notes"]),
        ignored_entries=reader.ignored_entries,
        example=example,
        **planned,
    )


def _example(table: RecordTable, status: npt.NDArray[np.int8], reader: RecordReader) -> tuple[tuple[str, str], ...]:
    """Turns of the first record that would be packed; () if all are rejected."""
    rows = np.flatnonzero(status == 0)[:1]
    if not len(rows):
        return ()
    refs = table.refs(rows)
    conversation = reader.read(int(refs.source[0]), int(refs.address[0]), int(refs.size[0]))
    conversation = next(iter(conversation.members), conversation)
    if conversation.input_ids is not None:
        return (("tokens", f"{len(conversation.input_ids):,} input_ids"),)
    if conversation.text is not None:
        return (("document", conversation.text),)
    tools = [("tools", _json(conversation.tools))] if conversation.tools else []
    turns = [
        (m.role, "\n".join([m.content, *(f"{name}: {_json(more)}" for name, more in m.extra.items())]).strip())
        for m in conversation.messages
    ]
    return (*tools, *turns)


def _json(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _planned(table: RecordTable, options: PackOptions, scale: float) -> dict[str, int]:
    """Estimate packs, tokens, bytes and shards of the whole input, which is `scale` times the measured part."""
    packs, pack, _ = plan_packs(table, options)
    planned = plan_shards(packs, pack, table, options)
    num_bytes = round(scale * sum(shard.num_bytes for shard in planned))
    count = max(1, round(scale * packs.num_packs))
    if scale == 1:
        shards = len(planned)
    else:
        copied = plan_shards(packs, pack, table, replace(options, media="copy"))  # its size decides the cuts
        copied_bytes = round(scale * sum(shard.num_bytes for shard in copied))
        shards = max(-(-count // options.max_packs_per_shard), -(-copied_bytes // options.max_shard_bytes), 1)
    return {"packs": count, "shards": shards, "tokens": round(scale * packs.tokens), "num_bytes": num_bytes}


@contextmanager
def _scratch(output: Folder) -> Iterator[Path]:
    """Make a temporary folder for the files that opening the input writes, with links to existing converted copies."""
    with tempfile.TemporaryDirectory(prefix="energon-packed-") as folder:
        work = Path(folder)
        (work / "converted").mkdir()
        for copy in (output.work / "converted").glob("[!.]*"):
            (work / "converted" / copy.name).symlink_to(copy.resolve())
        yield work
