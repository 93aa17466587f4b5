"""`pack`: the whole build, stage after stage."""

import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from energon_packed.build.chunks import STATUSES, Chunk, is_measured, measured_records
from energon_packed.build.engine import Engine, LocalEngine
from energon_packed.build.kept_tokens import KeptTokens, tokens_file
from energon_packed.build.ledger import write_ledger
from energon_packed.build.limits import check_limits
from energon_packed.build.lock import FolderLock
from energon_packed.build.measure import ChunkReport, Measurer
from energon_packed.build.options import PackOptions
from energon_packed.build.planning import OVERLONG, ShardPlan, plan_packs, plan_shards
from energon_packed.build.progress import Progress
from energon_packed.build.reader import RecordReader
from energon_packed.build.summary import make_manifest, shard_entries
from energon_packed.build.table import RecordTable, load_table
from energon_packed.build.truncation import TruncationCheck, TruncationTask
from energon_packed.build.workspace import Workspace
from energon_packed.build.write import ShardTask, ShardWriter, finished_shard, shard_rows
from energon_packed.errors import RejectLimitError
from energon_packed.packing import load_kernels
from energon_packed.shards import PackingManifest
from energon_packed.shards.layouts import layout_for
from energon_packed.shards.nv_meta import write_nv_meta
from energon_packed.shards.tar import ShardSummary
from energon_packed.sources import open_sources
from energon_packed.sources.base import changed_at
from energon_packed.version import FORMAT_VERSION

Status = npt.NDArray[np.int8]
_TRUNCATION_BATCH = 64  # records per task
_DECIDES_TARS = (
    "sample_class",
    "use_patch_positions",
    "seq_len",
    "prefix",
    "max_samples_per_pack",
    "max_packs_per_shard",
    "max_shard_bytes",
    "algorithm",
    "group_by",
    "pad_multiple",
    "overlong",
    "split",
    "seed",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackResult:
    """What a build has done.

    Attributes:
        manifest: as saved in packing.json.
        shards: folder of the tars.
        lengths, rejects: files with a row per record, and per record left out.
        bytes: size of all tars.
        splits: splits that were asked for; one may have got no pack.
        seconds: wall time of each stage.
        mixed_utilization: what `--group-by none` would reach, where the build groups.
    """

    manifest: PackingManifest
    shards: Path
    lengths: Path
    rejects: Path
    bytes: int
    splits: tuple[str, ...]
    seconds: dict[str, float]
    mixed_utilization: float | None = None


def pack(options: PackOptions, progress: Progress | None = None) -> PackResult:
    """Pack records into an Energon data set.

    Args:
        options: what and how.
        progress: told of every stage.

    Raises:
        ConfigError: options that do not fit the input or the output folder.
        SourceError: an input that cannot be read, or that changed while it was packed.
        RejectLimitError: more records left out than allowed; only lengths.parquet and rejects.jsonl are written.
    """
    return _Build(options, progress or Progress()).run()


@dataclass(slots=True)
class _Build:
    options: PackOptions
    progress: Progress
    space: Workspace = field(init=False)
    engine: Engine = field(init=False)
    reader: RecordReader = field(init=False)
    seconds: dict[str, float] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=lambda: {"measured": 0, "tokenized": 0, "reused": 0})

    def run(self) -> PackResult:
        self.space = Workspace(self.options.output_dir)
        self.engine = _engine(self.options)
        with FolderLock(self.options.output_dir):
            return self._run()

    def _run(self) -> PackResult:
        options = self.options
        sources = open_sources(
            options.inputs, work_dir=self.space.work, image_root=options.image_root, part=options.part
        )
        self.reader = RecordReader(
            sources=sources,
            sample_class=options.sample_class,
            use_patch_positions=options.use_patch_positions,
            part=options.part[0] if options.part else None,
        )
        tokenizer_fingerprint = options.encoder.load().fingerprint()
        input_fingerprint = _digest([source.fingerprint() for source in sources])
        # The same content anywhere makes the same data set; restart state also minds where and when.
        content = [FORMAT_VERSION, input_fingerprint, tokenizer_fingerprint, options.part]
        build_key = _digest(content, {name: getattr(options, name) for name in _DECIDES_TARS})
        measure_key = _digest(
            content,
            [options.sample_class, options.use_patch_positions],
            [(str(s.path.resolve()), s.image_root, changed_at(s.path)) for s in sources],
        )
        write_key = _digest(measure_key, build_key)
        if not options.resume:
            self.space.forget(measure_key, write_key)
        self.space.check_owner(write_key, overwrite=options.overwrite)

        with self._stage("measure"):
            table = self._measure(self.space.measure_folder(measure_key))
        with self._stage("plan"):
            status = self._account(table)
            plan = plan_packs(table, status, options)
            mixed = None
            if options.group_by != "none":
                mixed = plan_packs(table, status, replace(options, group_by="none")).utilization
            shard_plans = plan_shards(plan, table, options)
            if sum(len(shard.rows) for shard in shard_plans) != len(plan.indices):
                raise AssertionError("the shards do not hold every packed sample")
        with self._stage("write"):
            self.space.claim(write_key)
            folder = self.space.write_folder(write_key)
            shards = self._write(table, shard_plans, folder)
        with self._stage("index"):
            self.progress.start("index", len(shards), "shards")
            entries = shard_entries(table, shard_plans, shards, options)
            write_nv_meta(
                self.space.shards,
                layout=layout_for(options.sample_class),
                shards=shards,
                rows=(shard_rows(_state_file(folder, shard.name)) for shard in shards),
                splits={name: [e.name for e in entries if e.split == name] for name in options.split},
            )
            manifest = make_manifest(
                table,
                status,
                plan,
                entries,
                options=options,
                tokenizer_fingerprint=tokenizer_fingerprint,
                input_fingerprint=input_fingerprint,
                fingerprint=build_key,
                counters=self.counters,
            )
            manifest.save(self.space.shards)
            self.progress.advance(len(shards))
        return PackResult(
            manifest=manifest,
            shards=self.space.shards,
            lengths=self.space.lengths,
            rejects=self.space.rejects,
            bytes=sum(shard.size for shard in shards),
            splits=tuple(options.split),
            seconds=self.seconds,
            mixed_utilization=mixed,
        )

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - begin
        self.progress.finish(self.seconds[name])

    # --- measure ---------------------------------------------------------------------------------------------------

    def _measure(self, folder: Path) -> RecordTable:
        folder.mkdir(parents=True, exist_ok=True)
        keep = layout_for(self.options.sample_class).stores_tokens
        chunks = [
            Chunk(
                source=number,
                start=start,
                stop=stop,
                file=folder / f"{number:05d}-{place:07d}.arrow",
                keep_tokens=keep,
            )
            for number, source in enumerate(self.reader.sources)
            for place, (start, stop) in enumerate(source.chunks())
        ]
        todo = []
        self.progress.start("measure", sum(chunk.stop - chunk.start for chunk in chunks), "records")
        for chunk in chunks:
            if is_measured(chunk):
                records = measured_records(chunk)
                self.counters["reused"] += records
                self.progress.advance(chunk.stop - chunk.start, records)
            else:
                todo.append(chunk)
        measurer = Measurer(reader=self.reader, encoder=self.options.encoder)
        for report in self.engine.run(measurer, todo):
            self.counters["measured"] += report.records
            self.counters["tokenized"] += report.tokenized
            self.progress.advance(report.chunk.stop - report.chunk.start, report.records)
            self._stop_if_strict(report)
            load_kernels()  # while the workers are busy
        return load_table(chunks, len(self.reader.sources))

    def _stop_if_strict(self, report: ChunkReport) -> None:
        if self.options.strict and report.first_reject is not None:
            place, ident, reason, detail = report.first_reject
            path = self.reader.sources[report.chunk.source].path
            name = f"record {ident}" if ident else f"record {place} after position {report.chunk.start}"
            raise RejectLimitError(f"{name} of {path} is left out: {reason}: {detail} (--strict stops at the first)")

    # --- plan ------------------------------------------------------------------------------------------------------

    def _account(self, table: RecordTable) -> Status:
        """Status of every record with the rejects that `seq_len` decides; written to disk and held to the limits."""
        options = self.options
        self.progress.start("plan", len(table), "records")
        status = table.status.copy()
        uncut: dict[int, str] = {}
        overlong = np.flatnonzero((status == 0) & (table.length > options.usable_len))
        if options.overlong == "truncate":
            check = TruncationCheck(reader=self.reader, encoder=options.encoder, max_length=options.usable_len)
            batches = [overlong[i : i + _TRUNCATION_BATCH] for i in range(0, len(overlong), _TRUNCATION_BATCH)]
            kept = self._kept_tokens(table)
            tasks = (
                TruncationTask(rows=batch, records=table.refs(batch), tokens=kept.refs(batch) if kept else None)
                for batch in batches
            )
            for failures in self.engine.run(check, tasks):
                for row, reason, detail in failures:
                    status[row] = STATUSES.index(reason)
                    uncut[row] = detail
        else:
            status[overlong] = OVERLONG

        def detail_of(row: int) -> str:
            if row in uncut:
                return uncut[row]
            limit = f"{table.length[row]} tokens, more than --seq-len {options.seq_len}"
            if options.usable_len != options.seq_len:
                limit += f" down to a multiple of --pad-multiple {options.pad_multiple}, {options.usable_len}"
            return limit

        write_ledger(
            table,
            status,
            detail_of,
            self.reader,
            usable_len=options.usable_len,
            lengths=self.space.lengths,
            rejects=self.space.rejects,
        )
        self.progress.advance(len(table), len(table))
        check_limits(table, status, overlong, options=options, reader=self.reader, rejects=self.space.rejects)
        return status

    def _kept_tokens(self, table: RecordTable) -> KeptTokens | None:
        if not layout_for(self.options.sample_class).stores_tokens:
            return None
        return KeptTokens([tokens_file(file) for file in table.files], table.file_starts, table.length)

    # --- write -----------------------------------------------------------------------------------------------------

    def _write(self, table: RecordTable, plans: list[ShardPlan], folder: Path) -> list[ShardSummary]:
        folder.mkdir(parents=True, exist_ok=True)
        options, shards = self.options, self.space.shards
        names = [f"{options.prefix}-{plan.number:06d}.tar" for plan in plans]
        done: dict[str, ShardSummary] = {}
        todo: list[ShardPlan] = []
        kept = self._kept_tokens(table)

        def task_of(plan: ShardPlan) -> ShardTask:
            return ShardTask(
                tar=shards / names[plan.number],
                state=_state_file(folder, names[plan.number]),
                prefix=options.prefix,
                first_pack=plan.first_pack,
                records=table.refs(plan.rows),
                offsets=plan.offsets,
                tokens=kept.refs(plan.rows) if kept else None,
            )

        self.progress.start("write", sum(len(plan.rows) for plan in plans), "samples")
        for plan, name in zip(plans, names, strict=True):
            finished = finished_shard(task_of(plan)) if _state_file(folder, name).exists() else None
            if finished is None:
                todo.append(plan)
            else:
                done[name] = finished
                self.progress.advance(len(plan.rows), len(plan.rows))
        if todo:
            self.space.open_shards()
        truncate = options.usable_len if options.overlong == "truncate" else None
        writer = ShardWriter(reader=self.reader, truncate=truncate)
        samples = {name: len(plan.rows) for plan, name in zip(plans, names, strict=True)}
        for shard in self.engine.run(writer, map(task_of, todo)):
            done[shard.name] = shard
            self.progress.advance(samples[shard.name], samples[shard.name])
        self.space.remove_strays(set(names))
        if sum(shard.packs for shard in done.values()) != sum(len(plan.offsets) - 1 for plan in plans):
            raise AssertionError("the shards do not hold every planned pack")
        return [done[name] for name in names]


def _engine(options: PackOptions) -> Engine:
    if options.engine == "ray":
        from energon_packed.build.ray_engine import RayEngine

        return RayEngine(options.ray_address, options.workers)
    return LocalEngine(options.processes)


def _state_file(folder: Path, shard: str) -> Path:
    return folder / Path(shard).with_suffix(".json").name


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
