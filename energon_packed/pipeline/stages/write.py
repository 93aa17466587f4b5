"""Stage 3, write.

Input: the Plan and the RecordTable of a run. Output: the tars, each written by a task, with its `.tar.idx` and a state
file with its index rows.

    Plan ──ShardTask──► write_shard (worker) ──► tar, state file;  ShardSummary ──► write_shards
"""

import hashlib
import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from energon_packed.formats import codec_for
from energon_packed.pipeline.measured.chunk_reader import RecordOffsets, TokenReader
from energon_packed.pipeline.measured.table import IN_REFS, RecordRefs, RecordTable
from energon_packed.pipeline.media.locator import MediaLocator, StoredMedia
from energon_packed.pipeline.output.run_state import RunState
from energon_packed.pipeline.output.shard_states import TarTask, finish_shard, finished_shard, state_file
from energon_packed.pipeline.reader import RecordReader
from energon_packed.pipeline.stages.plan import Plan, in_order, kept_frames, kept_tokens
from energon_packed.pipeline.stages.samples import SampleReader, SampleSettings, records_of
from energon_packed.records.normalize import TIMESTAMPS_WRITTEN
from energon_packed.shards.tar import ShardSummary, TarShardWriter

Int64 = npt.NDArray[np.int64]
_REQUESTS = 16  # at a time, to check the shards in an object store


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardTask(TarTask):
    """Shard to write.

    Attributes:
        prefix: prefix of keys.
        first_pack: index of the first pack.
        records: records of all packs, pack after pack.
        offsets: int64 (packs+1,), pack p is records offsets[p] to offsets[p + 1].
        tokens: files of the tokens of the records; None for flavors without tokens.
        frames: files of the selected frames of their videos; None if no record has videos.
        media: names of the tars with referenced images and videos that are in no file of the input.
    """

    prefix: str
    first_pack: int
    records: RecordRefs
    offsets: Int64
    tokens: RecordOffsets | None = None
    frames: RecordOffsets | None = None
    media: Sequence[str] = ()

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


def write_shard(reader: RecordReader, settings: SampleSettings, task: ShardTask) -> ShardSummary:
    """Write a shard, its index and its state file.

    Args:
        reader: reads records as the measure stage did.
        settings: the form of the samples.
        task: the shard.
    """
    codec, locator = codec_for(reader.sample_class, reader.layout), settings.locator
    seconds_before = locator.seconds if locator else 0.0
    with ExitStack() as open_files:
        shard = open_files.enter_context(TarShardWriter(task.tar, task.state.parent))
        tokens = open_files.enter_context(TokenReader(task.tokens)) if task.tokens is not None else None
        samples = SampleReader(reader=reader, settings=settings, tokens=tokens, frames=task.frames)
        stored = samples.read_all(records_of(task.records))
        for pack, (start, stop) in enumerate(itertools.pairwise(task.offsets.tolist()), start=task.first_pack):
            shard.add(f"{task.prefix}_{pack:08d}", codec.write(list(itertools.islice(stored, stop - start))))
    seconds = locator.seconds - seconds_before if locator else 0.0
    return replace(finish_shard(task, shard.rows), digest_seconds=seconds)


def write_shards(
    state: RunState, table: RecordTable, plan: Plan, stored: StoredMedia | None = None
) -> list[ShardSummary]:
    """Write the shards that no earlier run has finished.

    Args:
        state: objects of the run.
        table, plan: results of the earlier stages.
        stored: images of `out/media`; None without such images.

    Returns:
        All shards, in order.
    """
    options, output = state.options, state.output
    folder = output.write_folder(state.fingerprints.write)
    shards = {shard.name(options.prefix): shard for shard in plan.shards}
    present = {tar.name for tar in output.shards.glob("*.tar")}
    missing = [name for name in shards if name not in present or not state_file(folder, name).exists()]
    needed = sum(shards[name].num_bytes for name in missing)
    output.check_space(needed, options.unfinished_bytes)  # before anything is replaced
    output.delete_other_run()
    folder.mkdir(parents=True, exist_ok=True)
    kept, frames = kept_tokens(state, table), kept_frames(table)
    columns = [getattr(plan.entries, name) for name in IN_REFS]
    read = in_order(plan, [*columns, *(kept.arrays if kept else ()), *(frames.arrays if frames else ())])

    def task_of(name: str) -> ShardTask:
        shard = shards[name]
        records, read_own = plan.entries.records(shard.rows), partial(read, shard.span)
        return ShardTask(
            tar=output.shards / name,
            state=state_file(folder, name),
            prefix=options.prefix,
            first_pack=shard.first_pack,
            records=plan.entries.refs(shard.rows, read_own),
            offsets=shard.offsets,
            tokens=kept.refs(records, read_own) if kept else None,
            frames=frames.refs(records, read_own) if frames else None,
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
    settings = SampleSettings(
        truncate=options.truncate,
        keep_bytes=options.keep_bytes,
        extract_frames=options.extract_frames,
        timestamps=table.counts["notes"][TIMESTAMPS_WRITTEN] > 0,
        locator=locator,
    )
    write = partial(write_shard, state.reader, settings)
    with closing(state.engine.run(write, map(task_of, todo))) as summaries:
        for summary in summaries:
            finish(summary, "shards_written")
    output.remove_strays(set(shards))
    if sum(summary.packs for summary in done.values()) != plan.packs.num_packs:
        raise AssertionError("the shards do not contain every planned pack")
    return [done[name] for name in shards]
