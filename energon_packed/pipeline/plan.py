"""Stage 2, plan: what is rejected, which records share a row, and which packs make a shard."""

import itertools
from contextlib import closing
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from energon_packed.errors import Reject
from energon_packed.packing import PackPlan
from energon_packed.pipeline.chunks import STATUSES
from energon_packed.pipeline.engine import Engine
from energon_packed.pipeline.kept_tokens import KeptTokens, tokens_file
from energon_packed.pipeline.ledger import write_ledger
from energon_packed.pipeline.options import RejectOptions
from energon_packed.pipeline.reader import RecordReader
from energon_packed.pipeline.rejects import TableRejects
from energon_packed.pipeline.run_state import RunState
from energon_packed.pipeline.shard_plans import OVERLONG, ShardPlan, plan_packs, plan_shards
from energon_packed.pipeline.table import RecordTable
from energon_packed.pipeline.truncation import TruncationCheck, TruncationTask

Status = npt.NDArray[np.int8]
_TRUNCATION_BATCH = 64  # records per task


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is written.

    Attributes:
        status: int8 (n,), index into STATUSES, the rejects that `seq_len` decides included.
        supervised: int32 (n,), targets of each record after truncation, -1 where unknown.
        packs: all packs; `indices` are record numbers.
        shards: the packs of each shard.
        mixed_utilization: what `group_by='none'` would reach, where the run groups.
    """

    status: Status
    supervised: npt.NDArray[np.int32]
    packs: PackPlan
    shards: list[ShardPlan]
    mixed_utilization: float | None

    @property
    def num_bytes(self) -> int:
        """Bytes of all tars, as estimated from the bytes of media and texts."""
        return sum(shard.num_bytes for shard in self.shards)


def make_plan(state: RunState, table: RecordTable) -> Plan:
    """Plan all packs, write lengths.parquet and rejects.jsonl, and compare the rejects with the limits.

    Raises:
        RejectLimitError: more is rejected than allowed.
    """
    options, space = state.options, state.space
    state.progress.start("plan", len(table), "records")
    kept = None if options.truncate is None else kept_tokens(state, table)
    rejects, supervised = plan_rejects(table, options, state.reader, state.engine, kept=kept)
    write_ledger(rejects, usable_len=options.usable_len, space=space)
    rejects.check(options.limits, str(space.rejects))
    packs = plan_packs(table, rejects.status, options)
    mixed = None
    if options.group_by != "none":
        mixed = plan_packs(table, rejects.status, replace(options, group_by="none")).utilization
    shards = plan_shards(packs, table, options)
    if sum(len(shard.rows) for shard in shards) != len(packs.indices):
        raise AssertionError("the shards do not hold every packed sample")
    state.progress.advance(len(table), len(table))
    return Plan(status=rejects.status, supervised=supervised, packs=packs, shards=shards, mixed_utilization=mixed)


def plan_rejects(
    table: RecordTable,
    options: RejectOptions,
    reader: RecordReader,
    engine: Engine,
    *,
    kept: KeptTokens | None = None,
    max_images: int | None = None,
) -> tuple[TableRejects, npt.NDArray[np.int32]]:
    """The rejected records, those included that fit no row; and the targets of every record after truncation.

    Args:
        table: measured records.
        options: decide what happens to records longer than a row.
        reader: of the input.
        engine: truncates.
        kept: tokens of the records, if the flavor stores them.
        max_images: images that fit a row; None for any number.
    """
    status, supervised = table.status.copy(), table.supervised.copy()
    details: dict[int, str] = {}
    rejects = TableRejects(
        table=table, reader=reader, status=status, details=details, options=options, max_images=max_images
    )
    is_overlong = (status == 0) & (table.length > options.usable_len)
    if max_images is not None:
        status[(status == 0) & (table.num_images > max_images)] = OVERLONG
    if options.truncate is None:
        status[is_overlong] = OVERLONG
        return rejects, supervised
    overlong = np.flatnonzero(is_overlong & (status == 0))
    check = TruncationCheck(reader=reader, encoder=options.encoder_loader, max_length=options.truncate)
    batches = [overlong[i : i + _TRUNCATION_BATCH] for i in range(0, len(overlong), _TRUNCATION_BATCH)]
    tasks = (
        TruncationTask(rows=batch, records=table.refs(batch), tokens=kept.refs(batch) if kept else None)
        for batch in batches
    )
    with closing(engine.run(check, tasks)) as batches_done:
        for row, result in itertools.chain.from_iterable(batches_done):
            if isinstance(result, Reject):
                status[row] = STATUSES.index(result.reason.value)
                details[row] = result.detail
            else:
                supervised[row] = result
    return rejects, supervised


def kept_tokens(state: RunState, table: RecordTable) -> KeptTokens | None:
    """The tokens that measuring kept, for flavors that store them."""
    if not state.options.codec.stores_tokens:
        return None
    return KeptTokens([tokens_file(file) for file in table.files], table.file_starts, table.length)
