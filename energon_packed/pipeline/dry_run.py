"""`dry_run`: what `pack` would measure, reuse, plan and write, without writing in the output folder."""

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from energon_packed.pipeline.chunks import is_measured
from energon_packed.pipeline.encoders import log_notices
from energon_packed.pipeline.engine import LocalEngine
from energon_packed.pipeline.keys import make_keys
from energon_packed.pipeline.measure import MeasureStage
from energon_packed.pipeline.options import PackOptions
from energon_packed.pipeline.plan import plan_packs, plan_rejects, plan_shards
from energon_packed.pipeline.reader import RecordReader, open_reader
from energon_packed.pipeline.rejects import advice, none_packed
from energon_packed.pipeline.survey import sampled_chunks
from energon_packed.pipeline.table import RecordTable, load_table, most_common
from energon_packed.pipeline.workspace import Workspace

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
        keys = make_keys(options, reader.sources, options.part)
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
