"""`survey_lengths`: the measure stage alone, over all records or a sample of them.

`dry_run`: what `pack` would measure, reuse, plan and write, without writing in the output folder.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from energon_packed.errors import ConfigError
from energon_packed.files import atomic_path
from energon_packed.options import option, short
from energon_packed.pipeline.chunks import Chunk, is_measured, measured_records
from energon_packed.pipeline.encoders import log_notices
from energon_packed.pipeline.engine import LocalEngine, Progress
from energon_packed.pipeline.measure import MeasureStage
from energon_packed.pipeline.options import OUTPUT, PACKING, InputOptions, PackOptions, parse_seq_len
from energon_packed.pipeline.plan import plan_packs, plan_rejects, plan_shards
from energon_packed.pipeline.reader import RecordReader, open_reader
from energon_packed.pipeline.rejects import TableRejects, advice, none_packed, record_names
from energon_packed.pipeline.run_state import compute_fingerprints
from energon_packed.pipeline.table import RecordTable, load_table, most_common
from energon_packed.pipeline.workspace import FolderLock, Workspace

_MOST = int(np.iinfo(np.int32).max)  # tokens in one row
_SPREAD = 64  # places of the input that a sample comes from


def sampled_chunks(stage: MeasureStage, sample: int, seed: int) -> list[Chunk]:
    """Short ranges spread over the input, with about `sample` records in all."""
    ranges = [(number, *chunk) for number, source in enumerate(stage.reader.sources) for chunk in source.chunks()]
    number, start, stop = ranges[0]
    first = stage.chunk("first", number, start, min(stop, start + max(1, (stop - start) // 16)))
    first.file.parent.mkdir(parents=True, exist_ok=True)
    stage.measurer(first)
    per_record = (first.stop - first.start) / max(measured_records(first), 1)
    total = sum(stop - start for _, start, stop in ranges)
    wanted = min(total, int(sample * per_record) + 1)
    if wanted < total:
        rng = np.random.default_rng(seed)
        each = max(1, wanted // min(_SPREAD, len(ranges)))
        picked = sorted(rng.permutation(len(ranges))[: -(-wanted // each)].tolist())
        chosen = []
        for number, start, stop in (ranges[place] for place in picked):
            begin = start + int(rng.integers(0, max(1, stop - start - each + 1)))
            chosen.append((number, begin, min(stop, begin + each)))
        ranges = chosen
    return [stage.chunk(f"{place:07d}", *edges) for place, edges in enumerate(ranges)]


def parse_seq_lens(text: str) -> tuple[int, ...]:
    """`2048,4k` as numbers.

    Raises:
        ConfigError: the text has another form.
    """
    try:
        return tuple(parse_seq_len(part) for part in text.replace(",", " ").split())
    except ConfigError as error:
        raise ConfigError(f"`seq_lens` {text} must be integers, such as 8192 or 8k") from error


@dataclass(frozen=True, kw_only=True)
class LengthsOptions(InputOptions):
    """What is measured, and which `seq_len` are compared. Raises ConfigError for an invalid value."""

    seq_lens: Sequence[int] = option(
        lambda: (2048, 4096, 8192, 16384, 32768), help="Candidates.", group=PACKING, parse=parse_seq_lens,
        flags=("--seq-len",), metavar="N [N...]", shown_default="2048 4096 8192 16384 32768",
    )  # fmt: skip
    sample: int | None = option(
        None, help="Measure about N records, from all over the input.", group=PACKING, minimum=1, metavar="N"
    )
    output_dir: Path | None = option(
        None, help="Keep the measurements here, where pack reuses them.", group=OUTPUT,
        flags=("--output-dir", "-o"), metavar="DIR",
    )  # fmt: skip

    output: Path | None = option(
        None, help="Write NAME:LENGTH of every record that can be packed, a line each.", group=OUTPUT, metavar="FILE"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.output is not None and self.output.is_dir():
            raise ConfigError(f"`output` {self.output} is a folder; pass the name of a text file")
        if self.output is not None and self.sample is not None:
            raise ConfigError("`output` lists all records, and `sample` measures some of them; omit one")
        given = self.seq_lens if isinstance(self.seq_lens, list | tuple) else [self.seq_lens]
        if not given:
            raise ConfigError("`seq_lens` must have at least one candidate")
        for one in given:
            if not isinstance(one, int) or isinstance(one, bool):
                raise ConfigError(f"`seq_len` is {short(one)}; it must be an integer, such as 8192 or 8k")
            if not 1 <= one <= _MOST:
                limit = f"at most {_MOST}" if one > 1 else "at least 1"
                raise ConfigError(f"`seq_len` is {short(one)}; it must be {limit}")
        object.__setattr__(self, "seq_lens", tuple(given))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Survey:
    """Measured records.

    Attributes:
        lengths: int32 (n,), tokens of the records that can be packed.
        rejects: records that cannot, by reason.
        is_sample: only some of the records were measured.
        reused: records whose length an earlier run had measured.
        reject_summary: the reasons with their counts, and an example of the most common one.
        advice: what to do about the most common reason, or "".
        unused_fields: records that have each field that nothing reads, by its name.
        notes: records with each remark of the reader.
    """

    lengths: npt.NDArray[np.int32]
    rejects: dict[str, int]
    is_sample: bool
    reused: int = 0
    reject_summary: str = ""
    advice: str = ""
    unused_fields: Mapping[str, int] = field(default_factory=dict)
    notes: Mapping[str, int] = field(default_factory=dict)

    @property
    def records(self) -> int:
        """Records measured."""
        return len(self.lengths) + sum(self.rejects.values())


def survey_lengths(options: LengthsOptions, progress: Progress | None = None) -> Survey:
    """Measure records as `pack` does.

    Args:
        options: what is measured.
        progress: notified of the stage.

    Raises:
        ConfigError, SourceError: as `pack`.
        RejectLimitError: no record can be packed; the message has an example.
    """
    with _work_folder(options) as space:
        reader = open_reader(options, space.work)
        log_notices(options.encoder_loader)
        stage = MeasureStage(
            options=options,
            reader=reader,
            folder=space.measure_folder(compute_fingerprints(options, reader.sources, None).measure),
            engine=LocalEngine(options.processes),
            keep_tokens=options.codec.stores_tokens and options.output_dir is not None,
            progress=progress or Progress(),
        )
        chunks = None if options.sample is None else sampled_chunks(stage, options.sample, options.seed)
        table = stage.run(chunks)
        if options.output is not None:
            write_lengths(table, reader, options.output)
        found = TableRejects(table=table, reader=reader, status=table.status)
        rejects, summary = found.counts, found.summary(is_sample=options.sample is not None)
    if not np.any(table.status == 0):
        raise none_packed(len(table), summary, advice(rejects))
    return Survey(
        lengths=table.length[table.status == 0],
        rejects=rejects,
        reject_summary=summary,
        advice=advice(rejects),
        unused_fields=most_common(table.counts["unused_fields"]),
        notes=most_common(table.counts["notes"]),
        is_sample=options.sample is not None,
        reused=stage.counters["reused"],
    )


def write_lengths(table: RecordTable, reader: RecordReader, out: Path) -> None:
    """Write `NAME:LENGTH` of every record that can be packed, in input order; NAME is its id, as in lengths.parquet.

    It is the form that LLaVA-OneVision-2's `s3_bin_packing.py` reads: the length stands after the last colon.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        with atomic_path(out) as file, file.open("w", encoding="utf-8") as lines:
            for chunk in record_names(table, reader):
                for place in np.flatnonzero(table.status[chunk.rows] == 0).tolist():
                    lines.write(f"{' '.join(chunk.names[place].split())}:{table.length[chunk.rows[place]]}\n")
    except OSError as error:
        raise ConfigError(f"`output` {out} cannot be written: {error.strerror}; pass another path") from error


@contextmanager
def _work_folder(options: LengthsOptions) -> Iterator[Workspace]:
    """The output folder, or a temporary one; a sample is not worth keeping."""
    if options.output_dir is None or options.sample is not None:
        with tempfile.TemporaryDirectory(prefix="energon-packed-") as folder:
            yield Workspace(Path(folder))
        return
    with FolderLock(options.output_dir):
        space = Workspace(options.output_dir)
        try:
            yield space
        finally:
            space.remove_leftovers()


_SAMPLE = 512  # records measured for an estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """What a run would do.

    Attributes:
        files: of the input.
        input_bytes: their size.
        to_measure: share of the input that no earlier run has measured, 0 to 1.
        sampled: records measured for the estimates below; 0 where all numbers are exact.
        records: in the input.
        rejects: rejected records by reason.
        reject_summary: the reasons with an example, or "".
        packs, shards, tokens: that would be planned.
        num_bytes: of all tars: media and texts, with the overhead of a tar.
        unused_fields, notes: measured records with each, as the table of a run counts them.
        example: (role, text) of the turns of the first record that would be packed.
        free_bytes: in the file system of the output folder, tars that would be replaced included.
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
    example: tuple[tuple[str, str], ...]


def dry_run(options: PackOptions) -> DryRun:
    """Open the input and tell what `pack` would do; where lengths are not known, from a sample of the records.

    Raises:
        ConfigError: as `pack`; also an output folder of another run, or a disk that is too small.
        SourceError: an input that cannot be read.
        RejectLimitError: no record can be packed.
    """
    space = Workspace(options.output_dir)
    with _scratch(space) as work:
        reader = open_reader(options, work, options.part)
        keys = compute_fingerprints(options, reader.sources, options.part)
        log_notices(options.encoder_loader)
        space.check_other_run(keys.write, overwrite=options.overwrite)
        stage = MeasureStage(
            options=options,
            reader=reader,
            folder=space.measure_folder(keys.measure),
            engine=LocalEngine(1),
            keep_tokens=options.codec.stores_tokens,
        )
        chunks = stage.chunks()
        known = [chunk for chunk in chunks if options.resume and is_measured(chunk)]
        total = sum(chunk.stop - chunk.start for chunk in chunks)
        if len(known) == len(chunks):
            table, scale = load_table(chunks, len(reader.sources)), 1.0
        else:
            sample = replace(stage, folder=work / "sample", keep_tokens=False)
            picked = sampled_chunks(sample, _SAMPLE, options.seed)
            table = sample.run(picked)
            scale = total / max(sum(chunk.stop - chunk.start for chunk in picked), 1)
        is_sample = len(known) < len(chunks)
        rejected, _ = plan_rejects(table, options, reader, stage.engine)
        status, rejects, summary = rejected.status, rejected.counts, rejected.summary(is_sample=is_sample)
        example = _example(table, status, reader)
    if not np.any(status == 0):
        raise none_packed(round(len(table) * scale), summary, advice(rejects))
    found = _planned(table, status, options, scale)
    space.check_space(found["num_bytes"], keys.write)
    files = tuple(source.path for source in reader.sources)
    return DryRun(
        files=files,
        input_bytes=sum(file.stat().st_size for file in files),
        to_measure=1 - sum(chunk.stop - chunk.start for chunk in known) / max(total, 1),
        sampled=len(table) if is_sample else 0,
        records=round(len(table) * scale),
        rejects={reason: max(1, round(count * scale)) for reason, count in rejects.items()},
        reject_summary=summary,
        free_bytes=space.free_bytes(keys.write),
        unused_fields=most_common(table.counts["unused_fields"]),
        notes=most_common(table.counts["notes"]),
        example=example,
        **found,
    )


def _example(table: RecordTable, status: npt.NDArray[np.int8], reader: RecordReader) -> tuple[tuple[str, str], ...]:
    """Turns of the first record that would be packed; none without."""
    rows = np.flatnonzero(status == 0)[:1]
    if not len(rows):
        return ()
    refs = table.refs(rows)
    found = reader.read(int(refs.source[0]), int(refs.address[0]), int(refs.size[0]))
    if found.input_ids is not None:
        return (("tokens", f"{len(found.input_ids):,} input_ids"),)
    if found.text is not None:
        return (("document", found.text),)
    tools = [("tools", _json(found.tools))] if found.tools else []
    turns = [
        (m.role, "\n".join([m.content, *(f"{name}: {_json(more)}" for name, more in m.extra.items())]).strip())
        for m in found.messages
    ]
    return (*tools, *turns)


def _json(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _planned(table: RecordTable, status: npt.NDArray[np.int8], options: PackOptions, scale: float) -> dict[str, int]:
    """Packs, tokens, bytes and shards of the whole input, from those of a part of it."""
    packs = plan_packs(table, status, options)
    planned = plan_shards(packs, table, options)
    num_bytes = round(scale * sum(shard.num_bytes for shard in planned))
    count = max(1, round(scale * packs.num_packs))
    if scale == 1:
        shards = len(planned)
    else:
        shards = max(-(-count // options.max_packs_per_shard), -(-num_bytes // options.max_shard_bytes), 1)
    return {"packs": count, "shards": shards, "tokens": round(scale * packs.tokens), "num_bytes": num_bytes}


@contextmanager
def _scratch(space: Workspace) -> Iterator[Path]:
    """A temporary folder for what opening the input writes, with links to converted copies that exist."""
    with tempfile.TemporaryDirectory(prefix="energon-packed-") as folder:
        work = Path(folder)
        (work / "converted").mkdir()
        for copy in (space.work / "converted").glob("[!.]*"):
            (work / "converted" / copy.name).symlink_to(copy.resolve())
        yield work
