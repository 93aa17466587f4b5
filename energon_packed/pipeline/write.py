"""Stage 3, write: shards in parallel, each by one worker; index rows are collected on the way."""

from contextlib import closing
from pathlib import Path

from energon_packed.pipeline.plan import Plan, kept_tokens
from energon_packed.pipeline.run_state import RunState
from energon_packed.pipeline.shard_writer import ShardTask, ShardWriter, finished_shard
from energon_packed.pipeline.table import RecordTable
from energon_packed.shards.tar import ShardSummary


def write_shards(state: RunState, key: str, table: RecordTable, plan: Plan) -> list[ShardSummary]:
    """Write the shards that no earlier run has finished.

    Args:
        state: of the run.
        key: names the folder of the index rows.
        table, plan: of the earlier stages.

    Returns:
        All shards, in order.
    """
    options, space = state.options, state.space
    folder = space.write_folder(key)
    shards = {f"{options.prefix}-{shard.number:06d}.tar": shard for shard in plan.shards}
    missing = [name for name in shards if not (state_file(folder, name).exists() and (space.shards / name).exists())]
    space.check_space(sum(shards[name].num_bytes for name in missing), key)  # before anything is replaced
    space.claim(key)
    folder.mkdir(parents=True, exist_ok=True)
    kept = kept_tokens(state, table)

    def task_of(name: str) -> ShardTask:
        shard = shards[name]
        return ShardTask(
            tar=space.shards / name,
            state=state_file(folder, name),
            prefix=options.prefix,
            first_pack=shard.first_pack,
            records=table.refs(shard.rows),
            offsets=shard.offsets,
            tokens=kept.refs(shard.rows) if kept else None,
        )

    done: dict[str, ShardSummary] = {}

    def finish(summary: ShardSummary, counter: str) -> None:
        done[summary.name] = summary
        state.counters[counter] += 1
        samples = len(shards[summary.name].rows)
        state.progress.advance(samples, samples)

    state.progress.start("write", sum(len(shard.rows) for shard in plan.shards), "samples")
    for name in shards:
        if state_file(folder, name).exists() and (finished := finished_shard(task_of(name))) is not None:
            finish(finished, "shards_reused")
    todo = [name for name in shards if name not in done]
    if todo:
        space.open_shards()
    writer = ShardWriter(reader=state.reader, truncate=options.truncate, keep_bytes=options.keep_bytes)
    with closing(state.engine.run(writer, map(task_of, todo))) as summaries:
        for summary in summaries:
            finish(summary, "shards_written")
    space.remove_strays(set(shards))
    if sum(summary.packs for summary in done.values()) != plan.packs.num_packs:
        raise AssertionError("the shards do not hold every planned pack")
    return [done[name] for name in shards]


def state_file(folder: Path, shard: str) -> Path:
    """Where the index rows of a finished shard are."""
    return folder / Path(shard).with_suffix(".json").name
