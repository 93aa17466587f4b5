"""Stage 3, write: shards in parallel, each by one worker; index rows are collected on the way."""

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from energon_packed.pipeline.plan import Plan, kept_tokens
from energon_packed.pipeline.run_state import RunState
from energon_packed.pipeline.shard_plans import ShardPlan
from energon_packed.pipeline.shard_writer import ShardTask, ShardWriter, finished_shard
from energon_packed.pipeline.table import RecordTable
from energon_packed.shards.tar import ShardSummary


@dataclass(frozen=True, slots=True)
class WriteStage:
    """Writes the shards that no earlier run has finished.

    Attributes:
        state: of the run.
        key: names the folder of the index rows.
    """

    state: RunState
    key: str
    name = "write"

    def run(self, table: RecordTable, plan: Plan) -> list[ShardSummary]:
        """All shards, in order."""
        state, options = self.state, self.state.options
        folder = state.space.write_folder(self.key)
        self._check_space(plan, folder)
        state.space.claim(self.key)
        folder.mkdir(parents=True, exist_ok=True)
        names = [f"{options.prefix}-{shard.number:06d}.tar" for shard in plan.shards]
        kept = kept_tokens(state, table)

        def task_of(shard: ShardPlan) -> ShardTask:
            name = names[shard.number]
            return ShardTask(
                tar=state.space.shards / name,
                state=state_file(folder, name),
                prefix=options.prefix,
                first_pack=shard.first_pack,
                records=table.refs(shard.rows),
                offsets=shard.offsets,
                tokens=kept.refs(shard.rows) if kept else None,
            )

        done: dict[str, ShardSummary] = {}
        todo: list[ShardPlan] = []
        state.progress.start(self.name, sum(len(shard.rows) for shard in plan.shards), "samples")
        for shard, name in zip(plan.shards, names, strict=True):
            finished = finished_shard(task_of(shard)) if state_file(folder, name).exists() else None
            if finished is None:
                todo.append(shard)
            else:
                done[name] = finished
                state.counters["shards_reused"] += 1
                state.progress.advance(len(shard.rows), len(shard.rows))
        if todo:
            state.space.open_shards()
        writer = ShardWriter(reader=state.reader, truncate=options.truncate, keep_bytes=options.keep_bytes)
        samples = {name: len(shard.rows) for shard, name in zip(plan.shards, names, strict=True)}
        with closing(state.engine.run(writer, map(task_of, todo))) as summaries:
            for summary in summaries:
                done[summary.name] = summary
                state.counters["shards_written"] += 1
                state.progress.advance(samples[summary.name], samples[summary.name])
        state.space.remove_strays(set(names))
        if sum(summary.packs for summary in done.values()) != plan.packs.num_packs:
            raise AssertionError("the shards do not hold every planned pack")
        return [done[name] for name in names]

    def _check_space(self, plan: Plan, folder: Path) -> None:
        """Refuse a disk that is too small before anything is replaced; finished shards need no space."""
        space, prefix = self.state.space, self.state.options.prefix
        names = {shard.number: f"{prefix}-{shard.number:06d}.tar" for shard in plan.shards}
        todo = [
            shard
            for shard in plan.shards
            if not (state_file(folder, names[shard.number]).exists() and (space.shards / names[shard.number]).exists())
        ]
        space.check_space(sum(shard.num_bytes for shard in todo), self.key)


def state_file(folder: Path, shard: str) -> Path:
    """Where the index rows of a finished shard are."""
    return folder / Path(shard).with_suffix(".json").name
