"""`pack`: measure, plan, write, index.

`run_status`: how far a run in an output folder is, without touching it.
"""

import glob
import itertools
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Unpack

import numpy as np
import pyarrow as pa

from energon_packed.encoding import Processor
from energon_packed.errors import REQUESTED_REJECTS, ConfigError, EnergonPackedError, SourceError
from energon_packed.options import make
from energon_packed.pipeline.chunks import STATUSES, read_rows
from energon_packed.pipeline.encoders import log_notices
from energon_packed.pipeline.engine import Engine, LocalEngine, Progress
from energon_packed.pipeline.measure import MeasureStage
from energon_packed.pipeline.options import PackKeywords, PackOptions
from energon_packed.pipeline.plan import make_plan
from energon_packed.pipeline.reader import open_reader
from energon_packed.pipeline.run_state import Fingerprints, RunState, compute_fingerprints
from energon_packed.pipeline.table import RecordTable
from energon_packed.pipeline.workspace import FolderLock, Workspace, lock_holder
from energon_packed.pipeline.write import write_index, write_shards
from energon_packed.shards import PackingManifest
from energon_packed.sources import Source

Stage = Literal["nothing", "measured", "written", "done"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """State of an output folder.

    Attributes:
        output_dir: the folder.
        stage: the last one with a result: `measured` and `written` results may still be incomplete.
        running: `process 12 on host` of the run that holds the folder, or None.
        measured: records measured by the latest run.
        shards: shards finished by the latest run.
        packs, seq_len, utilization: of a finished dataset; None before.
    """

    output_dir: Path
    stage: Stage
    running: str | None
    measured: int
    shards: int
    packs: int | None = None
    seq_len: int | None = None
    utilization: float | None = None


def run_status(output_dir: Path) -> list[RunStatus]:
    """The state of a folder, or of the folders of all parts where its name has `{part}`.

    Raises:
        ConfigError: there is no such folder.
    """
    if "{part}" in str(output_dir):
        pattern = glob.escape(output_dir.name).replace("{part}", "p[0-9]*")
        folders = sorted(folder for folder in output_dir.parent.glob(pattern) if folder.is_dir())
    else:
        folders = [output_dir] if output_dir.is_dir() else []
    if not folders:
        raise ConfigError(f"`output_dir` {output_dir} does not exist; no run has written there")
    return [_status(folder) for folder in folders]


def _status(folder: Path) -> RunStatus:
    space = Workspace(folder)
    measured = sum(_records(file) for file in _latest(space.work, "measure-*", "*.arrow"))
    shards = len(_latest(space.work, "write-*", "*.json"))
    manifest = PackingManifest.load_if_there(space.shards) if space.shards.is_dir() else None
    found = RunStatus(
        output_dir=folder,
        stage="written" if shards else "measured" if measured else "nothing",
        running=lock_holder(folder),
        measured=measured,
        shards=shards,
    )
    if manifest is None:
        return found
    return replace(
        found,
        stage="done",
        measured=measured or manifest.records,
        shards=len(manifest.shards),
        packs=manifest.packs,
        seq_len=manifest.seq_len,
        utilization=manifest.utilization if manifest.algorithm != "none" else None,
    )


def _latest(work: Path, folders: str, files: str) -> list[Path]:
    """Files of the folder that changed last."""
    found = sorted(work.glob(folders), key=lambda folder: folder.stat().st_mtime_ns)
    return sorted(found[-1].glob(files)) if found else []


def _records(file: Path) -> int:
    """Rows of a chunk file; 0 for one that is just being replaced."""
    try:
        return int(read_rows(file).num_rows)
    except (OSError, pa.ArrowInvalid):
        return 0


_log = logging.getLogger(__name__)
Stamps = dict[Path, tuple[int, int]]
"""Bytes and time of the last change (ns) of files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackResult:
    """What a run has done.

    Attributes:
        manifest: as saved in packing.json.
        shards: folder of the tars.
        lengths, rejects: files with a row per record, and per rejected record.
        bytes: size of all tars.
        splits: splits that were asked for; one may have got no pack.
        seconds: wall time of each stage.
        utilization_ungrouped: what `group_by='none'` would reach, where the run groups.
    """

    manifest: PackingManifest
    shards: Path
    lengths: Path
    rejects: Path
    bytes: int
    splits: tuple[str, ...]
    seconds: dict[str, float]
    utilization_ungrouped: float | None = None


def pack(
    inputs: PackOptions | str | Path | Sequence[str | Path] = (),
    *,
    encoder: Processor | None = None,
    progress: Progress | None = None,
    **options: Unpack[PackKeywords],
) -> PackResult:
    """Pack records into an Energon dataset.

        pack("data.jsonl", output_dir="out", seq_len=4096, tokenizer="DIR")

    Args:
        inputs: files, globs or folders; or all options in one object. Inputs with per-source settings are passed as
            `sources`.
        encoder: a custom Processor, in place of `tokenizer` and the image options.
        progress: notified of every stage.
        options: the fields of `PackOptions`: the options of `energon-packed pack` under their Python names.

    Raises:
        ConfigError: options do not fit the input or the output folder.
        SourceError: an input cannot be read, or changed while it was packed.
        RejectLimitError: more records are rejected than allowed; only lengths.parquet and rejects.jsonl are written.
    """
    if not isinstance(inputs, PackOptions):
        inputs = make(PackOptions, {"inputs": inputs, "encoder": encoder, **options})
    with FolderLock(inputs.output_dir) as lock:
        space = Workspace(inputs.output_dir)
        try:
            return _run(inputs, space, lock, progress or Progress())
        except FileNotFoundError as error:
            lock.check()
            if error.filename is None or space.root.absolute() not in Path(str(error.filename)).absolute().parents:
                raise
            raise ConfigError(
                f"{error.filename} is gone while the run worked with it; something else uses `output_dir`: stop that, "
                "and run again"
            ) from error
        finally:
            space.remove_leftovers()


def _run(options: PackOptions, space: Workspace, lock: FolderLock, progress: Progress) -> PackResult:
    reader = open_reader(options, space.work, options.part)
    space.check_inputs(source.path for source in reader.sources)
    inputs = _stamps(reader.sources)
    keys = compute_fingerprints(options, reader.sources, options.part)
    log_notices(options.encoder_loader)
    if not options.resume:
        space.forget(keys.measure, keys.write)
    space.open_for(keys.write, overwrite=options.overwrite)
    with closing(make_engine(options)) as engine:
        state = RunState(options=options, progress=progress, engine=engine, space=space, reader=reader)
        return _stages(state, inputs, keys, lock)


def _stages(state: RunState, inputs: Stamps, keys: Fingerprints, lock: FolderLock) -> PackResult:
    options, progress, space, reader = state.options, state.progress, state.space, state.reader
    for source in reader.sources:
        _log.info("reads %s", source.path)
    _log.info("restart state: %s", space.measure_folder(keys.measure))
    clock = _Clock(progress)
    measure = MeasureStage(
        options=options,
        reader=reader,
        folder=space.measure_folder(keys.measure),
        engine=state.engine,
        keep_tokens=options.codec.stores_tokens,
        progress=progress,
        strict=options.strict,
        counters=state.counters,
        tokenizer_engines=state.tokenizer_engines,
    )
    with clock.stage("measure"), _watched(inputs, space, keys):
        table = measure.run()
    _warn_of_lost_inputs(table, reader.sources)
    fits_captioning = options.part is None and bool(table.narrow[table.status == 0].all())  # parts must agree
    options = options.resolved(fits_captioning)
    state = replace(state, options=options, reader=replace(reader, sample_class=options.sample_class))
    _log.info("records measured and reused: %(measured)d and %(reused)d", state.counters)
    with clock.stage("plan"):
        plan = make_plan(state, table)
    _log.info("plans %d packs in %d shards, %d bytes", plan.packs.num_packs, len(plan.shards), plan.num_bytes)
    with clock.stage("write"), _watched(inputs, space, keys):
        shards = write_shards(state, keys.write, table, plan)
    _log.info("shards written and reused: %(shards_written)d and %(shards_reused)d", state.counters)
    lock.check()
    with clock.stage("index"):
        manifest = write_index(state, keys, table, plan, shards)
    _warn_of_empty_splits(manifest, options)
    return PackResult(
        manifest=manifest,
        shards=space.shards,
        lengths=space.lengths,
        rejects=space.rejects,
        bytes=sum(shard.size for shard in shards),
        splits=tuple(options.split),
        seconds=clock.seconds,
        utilization_ungrouped=plan.utilization_ungrouped,
    )


def _stamps(sources: Sequence[Source]) -> Stamps:
    """Size and time of all input files, and of the copies that are read in place of some."""
    return {path: _stamp(path) for source in sources for path in (source.path, source.data)}


def _stamp(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns


def _check_unchanged(inputs: Stamps) -> None:
    """Refuse a file that has changed since: what was measured is not what is read now.

    Raises:
        SourceError: it names the file and both sizes.
    """
    for path, before in inputs.items():
        try:
            found = _stamp(path)
        except OSError as error:
            raise SourceError(f"{path} is gone while it is packed: {error.strerror}; run again") from error
        if found != before:
            what = (
                f"from {before[0]} to {found[0]} bytes"
                if found[0] != before[0]
                else f"its {before[0]} bytes are others"
            )
            raise SourceError(f"{path} changed while it was packed ({what}); let its writer finish, and run again")


@contextmanager
def _watched(inputs: Stamps, space: Workspace, keys: Fingerprints) -> Iterator[None]:
    """Refuse what a stage has read, and forget it, where the input changed meanwhile.

    That it changed explains most errors of a stage, too.
    """
    try:
        try:
            yield
        except (EnergonPackedError, OSError):
            _check_unchanged(inputs)
            raise
        _check_unchanged(inputs)
    except SourceError:
        space.forget(keys.measure, keys.write)
        raise


def _warn_of_lost_inputs(table: RecordTable, sources: Sequence[Source]) -> None:
    """Where others are packed, an input of which nothing can be used may be one that is read wrongly."""
    rejected = ~np.isin(table.status, [0, *(STATUSES.index(reason.value) for reason in REQUESTED_REJECTS)])
    lost = []
    for number, (start, stop) in enumerate(itertools.pairwise(table.source_starts.tolist())):
        if stop > start and rejected[start:stop].all():
            lost.append((sources[number].path, STATUSES[int(table.status[start])], stop - start))
    if lost and len(lost) < len(sources):
        path, reason, records = lost[0]
        more = f", nor of {len(lost) - 1} inputs more" if len(lost) > 1 else ""
        _log.warning("%s: none of its %d records can be used (%s)%s; see rejects.jsonl", path, records, reason, more)


def _warn_of_empty_splits(manifest: PackingManifest, options: PackOptions) -> None:
    for split, share in options.split.items():
        if share > 0 and not manifest.packs_in(split):
            _log.warning(
                "split %s gets no pack: its share %g of %d packs is less than one; raise its share in `split`, or "
                "pack more data",
                split,
                share,
                manifest.packs,
            )


def make_engine(options: PackOptions) -> Engine:
    """The engine that the options name.

    Raises:
        ConfigError: Ray is not installed, or no cluster answers.
    """
    if options.engine == "ray":
        from energon_packed.pipeline.ray_engine import RayEngine

        return RayEngine(options.ray_address, options.workers)
    return LocalEngine(options.processes)


class _Clock:
    """Wall time of each stage."""

    def __init__(self, progress: Progress) -> None:
        self.seconds: dict[str, float] = {}
        self._progress = progress

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - begin
        self._progress.finish(self.seconds[name])
