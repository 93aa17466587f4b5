"""`pack`: the options of a run in, a dataset in `output_dir` and a PackResult out.

The stages are measure, plan, write and index.
"""

import itertools
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Unpack

import numpy as np

from energon_packed.arrays import blocks
from energon_packed.encoding import ChatEncoder, Processor
from energon_packed.errors import (
    REQUESTED_REJECTS,
    ConfigError,
    DataChangedError,
    EnergonPackedError,
    FormatError,
    SourceError,
)
from energon_packed.keywords import PackKeywords
from energon_packed.options import make
from energon_packed.pipeline.encoders import log_notices
from energon_packed.pipeline.engine import Engine, LocalEngine, Progress
from energon_packed.pipeline.measured.chunks import MEDIA, STATUSES
from energon_packed.pipeline.measured.table import RecordTable
from energon_packed.pipeline.media.stored import index_media, remove_unused, store_media
from energon_packed.pipeline.options import AUTO, PackOptions
from energon_packed.pipeline.output.folder import Folder, work_folder
from energon_packed.pipeline.output.locks import FolderLock
from energon_packed.pipeline.output.run_state import COUNTERS, RunState, compute_fingerprints
from energon_packed.pipeline.reader import open_reader
from energon_packed.pipeline.stages.index import write_index
from energon_packed.pipeline.stages.measure import MeasureStage
from energon_packed.pipeline.stages.plan import make_plan
from energon_packed.pipeline.stages.write import write_shards
from energon_packed.shards import PackingManifest
from energon_packed.shards.media_yaml import refuse_other_media_yaml
from energon_packed.shards.reader import OpenedFiles
from energon_packed.sources import Source
from energon_packed.storage import as_path

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackResult:
    """Result of a run.

    Attributes:
        manifest: content of packing.json.
        shards: folder of the tars.
        lengths: lengths.parquet, with all records.
        rejects: rejects.jsonl, with the rejected records.
        bytes: size of all tars.
        splits: requested splits, including splits without a pack.
        seconds: wall time of each stage. With references, also `digest`: the time that the write stage read and hashed
            images, summed over the processes.
        utilization_ungrouped: utilization with `group_by='none'`, if the run groups; else None.

    Examples:
        >>> result = pack(data, output_dir="result", **options)
        >>> result.manifest.packs, result.manifest.packed, result.shards.as_posix()
        (6, 154, 'result/webdataset')
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
    work = work_folder(inputs.output_dir, inputs.work_dir)
    with FolderLock(inputs.output_dir, work, overwrite=inputs.overwrite) as lock:
        output = Folder(inputs.output_dir, work)
        try:
            return _run(inputs, output, lock, progress or Progress())
        except FileNotFoundError as error:
            lock.check()  # if the whole folder was replaced, that is the better explanation
            removed = None if error.filename is None else as_path(str(error.filename)).absolute()
            if removed is None or output.root.absolute() not in removed.parents:
                raise
            raise ConfigError(
                f"{error.filename} was removed during the run: another process is using `output_dir`. Stop it and run "
                "again"
            ) from error
        finally:
            output.remove_leftovers()


def _run(options: PackOptions, output: Folder, lock: FolderLock, progress: Progress) -> PackResult:
    reader = open_reader(options, output.work, options.part)
    output.check_inputs(source.path for source in reader.sources)
    log_notices(options.encoder_loader)  # before the first reading of the files, which may need minutes
    if options.media == "reference":
        refuse_other_media_yaml(output.root)
    # Before the fingerprints, which read all files. Sources may have a converted copy of their file.
    inputs = OpenedFiles(
        (path for source in reader.sources for path in (source.path, source.data)),
        remedy="let its writer finish, and run again",
    )
    fingerprints = compute_fingerprints(options, reader.sources, options.part)
    output.set_run(fingerprints.write, fingerprints.settings, partial(_encoder_differences, options, output))
    if not options.resume:
        output.forget(fingerprints.measure, fingerprints.write)
    output.open_for_run(overwrite=options.overwrite)
    with closing(make_engine(options)) as engine:
        state = RunState(
            options=options, progress=progress, engine=engine, output=output, reader=reader, fingerprints=fingerprints
        )
        return _stages(state, inputs, lock)


def _encoder_differences(options: PackOptions, output: Folder) -> list[str]:
    """Name the settings in which the encoder differs from packing.json; empty if it is not recorded there."""
    encoder = options.encoder_loader.load()
    try:
        manifest = PackingManifest.load_if_there(output.shards)
    except FormatError:  # of a damaged folder, or of another format version
        return []
    if manifest is None or not manifest.tokenizer_fingerprint or not isinstance(encoder, ChatEncoder):
        return []
    return manifest.encoder_differences(encoder)


def _stages(state: RunState, inputs: OpenedFiles, lock: FolderLock) -> PackResult:
    options, progress, output, reader = state.options, state.progress, state.output, state.reader
    for source in reader.sources:
        _log.info("reads %s", source.path)
    measured = output.measure_folder(state.fingerprints.measure)
    _log.info("restart state: %s", measured)
    seconds: dict[str, float] = {}
    measure = MeasureStage(
        options=options,
        reader=reader,
        folder=measured,
        engine=state.engine,
        keep_tokens=options.codec.stores_tokens,
        keep_media=options.media == "reference",
        progress=progress,
        strict=options.strict,
        counters=state.counters,
        tokenizer_engines=state.tokenizer_engines,
    )
    with _timed("measure", seconds, progress), _watched(inputs, state):
        table = measure.run()
        # Groups and labels are stored with tokens, which are known for some of the chunks.
        if options.sample_class == AUTO and table.needs_tokens:
            measure = replace(measure, keep_tokens=True, counters=dict.fromkeys(COUNTERS, 0))
            table = measure.run()
    _warn_of_lost_inputs(table, reader.sources)
    # The runs of input parts do not see each other's records, but must choose the same flavor.
    fits_captioning = options.part is None and all(narrow.all() for narrow in table.packable(table.narrow))
    options = options.resolved(fits_captioning, table.needs_tokens)
    state = replace(state, options=options, reader=replace(reader, sample_class=options.sample_class))
    _log.info("records measured and reused: %(measured)d and %(reused)d", state.counters)
    with _timed("plan", seconds, progress):
        plan = make_plan(state, table)
    size = plan.num_bytes / 2**20
    _log.info("plans %d packs in %d shards, %.1f MiB", plan.packs.num_packs, len(plan.shards), size)
    stored = None
    if options.media == "reference" and any(file.with_suffix(MEDIA).exists() for file in table.files):
        with _timed("media", seconds, progress), _watched(inputs, state):
            stored = store_media(state, table, plan)
    with _timed("write", seconds, progress), _watched(inputs, state):
        shards = write_shards(state, table, plan, stored)
    if options.media == "reference" and options.media_check == "digest":
        seconds["digest"] = sum(shard.digest_seconds for shard in shards)
    _log.info("shards written and reused: %(shards_written)d and %(shards_reused)d", state.counters)
    lock.check()
    with _timed("index", seconds, progress):
        if stored is not None:
            index_media(output, stored)
        manifest = write_index(state, table, plan, shards, stored)
    remove_unused(output, stored)
    _warn_of_empty_splits(manifest, options)
    return PackResult(
        manifest=manifest,
        shards=output.shards,
        lengths=output.lengths,
        rejects=output.rejects,
        bytes=sum(shard.size for shard in shards),
        splits=tuple(options.split),
        seconds=seconds,
        utilization_ungrouped=plan.utilization_ungrouped,
    )


def _check_unchanged(inputs: OpenedFiles) -> None:
    try:
        inputs.check_all()
    except DataChangedError as error:
        raise SourceError(str(error)) from error


@contextmanager
def _watched(inputs: OpenedFiles, state: RunState) -> Iterator[None]:
    """Raise if the input changed during the block, and delete the restart state that was made from it.

    The input is checked after an error of the block, too, because the change is then its likely cause.
    """
    try:
        try:
            yield
        except (EnergonPackedError, OSError):
            _check_unchanged(inputs)
            raise
        _check_unchanged(inputs)
    except SourceError:
        state.output.forget(state.fingerprints.measure, state.fingerprints.write)
        raise


def _warn_of_lost_inputs(table: RecordTable, sources: Sequence[Source]) -> None:
    """Warn of inputs without a usable record if others have some: they may need another record format."""
    usable = [0, *(STATUSES.index(reason.value) for reason in REQUESTED_REJECTS)]
    lost = []
    for number, (start, stop) in enumerate(itertools.pairwise(table.source_starts.tolist())):
        own = table.status[start:stop]
        if len(own) and not any(np.isin(own[block], usable).any() for block in blocks(len(own))):
            lost.append((sources[number].path, STATUSES[int(table.status[start])], stop - start))
    if lost and len(lost) < len(sources):
        path, reason, records = lost[0]
        more = f", nor of {len(lost) - 1} more inputs" if len(lost) > 1 else ""
        _log.warning("%s: none of its %d records can be used (%s)%s; see rejects.jsonl", path, records, reason, more)


def _warn_of_empty_splits(manifest: PackingManifest, options: PackOptions) -> None:
    for split, share in options.split.items():
        if share > 0 and not manifest.packs_in(split):
            _log.warning(
                "split %s is empty: its share %g of %d packs is less than one pack. Raise its share in `split`, or "
                "pack more data",
                split,
                share,
                manifest.packs,
            )


def make_engine(options: PackOptions) -> Engine:
    """Make the engine that the options name.

    Raises:
        ConfigError: Ray is not installed, or no cluster answers.
    """
    if options.engine == "ray":
        from energon_packed.pipeline.ray_engine import RayEngine

        return RayEngine(options.ray_address, options.workers)
    return LocalEngine(options.processes)


@contextmanager
def _timed(stage: str, seconds: dict[str, float], progress: Progress) -> Iterator[None]:
    """Add the wall time of a stage to `seconds`."""
    start = time.perf_counter()
    yield
    seconds[stage] = time.perf_counter() - start
    progress.finish(seconds[stage])
