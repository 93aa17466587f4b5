"""Stage 2, plan: what is rejected, which records share a row, and which packs make a shard."""

import itertools
from contextlib import closing
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from energon_packed.errors import Reject
from energon_packed.packing import PackPlan
from energon_packed.pipeline.chunks import STATUSES
from energon_packed.pipeline.kept_tokens import KeptTokens, tokens_file
from energon_packed.pipeline.ledger import write_ledger
from energon_packed.pipeline.limits import check_limits
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


@dataclass(frozen=True, slots=True)
class PlanStage:
    """Plans all packs, writes lengths.parquet and rejects.jsonl, and holds the rejects to the limits."""

    state: RunState
    name = "plan"

    def run(self, table: RecordTable) -> Plan:
        """The plan.

        Raises:
            RejectLimitError: more is rejected than allowed.
        """
        options = self.state.options
        self.state.progress.start(self.name, len(table), "records")
        status, details, supervised = self._status(table)
        self._account(table, status, details)
        packs = plan_packs(table, status, options)
        mixed = None
        if options.group_by != "none":
            mixed = plan_packs(table, status, replace(options, group_by="none")).utilization
        shards = plan_shards(packs, table, options)
        if sum(len(shard.rows) for shard in shards) != len(packs.indices):
            raise AssertionError("the shards do not hold every packed sample")
        self.state.progress.advance(len(table), len(table))
        return Plan(status=status, supervised=supervised, packs=packs, shards=shards, mixed_utilization=mixed)

    def _status(self, table: RecordTable) -> tuple[Status, dict[int, str], npt.NDArray[np.int32]]:
        """Status of every record; details, by record number, where truncation fails; targets of every record."""
        options = self.state.options
        status, supervised = table.status.copy(), table.supervised.copy()
        details: dict[int, str] = {}
        overlong = self._overlong(table)
        if options.truncate is None:
            status[overlong] = OVERLONG
            return status, details, supervised
        check = TruncationCheck(reader=self.state.reader, encoder=options.encoder_loader, max_length=options.truncate)
        batches = [overlong[i : i + _TRUNCATION_BATCH] for i in range(0, len(overlong), _TRUNCATION_BATCH)]
        kept = kept_tokens(self.state, table)
        tasks = (
            TruncationTask(rows=batch, records=table.refs(batch), tokens=kept.refs(batch) if kept else None)
            for batch in batches
        )
        with closing(self.state.engine.run(check, tasks)) as batches_done:
            for row, result in itertools.chain.from_iterable(batches_done):
                if isinstance(result, Reject):
                    status[row] = STATUSES.index(result.reason.value)
                    details[row] = result.detail
                else:
                    supervised[row] = result
        return status, details, supervised

    def _account(self, table: RecordTable, status: Status, details: dict[int, str]) -> None:
        """Write both reports, then stop where too much is rejected."""
        state, options = self.state, self.state.options

        def detail_of(row: int) -> str:
            if row in details:
                return details[row]
            limit = f"{table.length[row]} tokens, more than seq_len {options.seq_len}"
            if options.usable_len != options.seq_len:
                limit += f" down to a multiple of pad_multiple {options.pad_multiple}, {options.usable_len}"
            return limit

        space = state.space
        write_ledger(table, status, detail_of, state.reader, usable_len=options.usable_len, space=space)
        check_limits(
            table,
            status,
            self._overlong(table),
            options=options,
            reader=state.reader,
            space=space,
            detail_of=detail_of,
        )

    def _overlong(self, table: RecordTable) -> npt.NDArray[np.int64]:
        """Records longer than a row, int64 (k,)."""
        return np.flatnonzero((table.status == 0) & (table.length > self.state.options.usable_len))


def kept_tokens(state: RunState, table: RecordTable) -> KeptTokens | None:
    """The tokens that measuring kept, for flavors that store them."""
    if not state.options.codec.stores_tokens:
        return None
    return KeptTokens([tokens_file(file) for file in table.files], table.file_starts, table.length)
