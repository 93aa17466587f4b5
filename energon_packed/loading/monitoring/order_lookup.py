"""An order log and a step or an id in, the batches of the step or the uses of the sample out."""

from dataclasses import dataclass
from pathlib import Path

from energon_packed.errors import ConfigError
from energon_packed.loading.monitoring.order_lines import Line, OrderFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedBatch:
    """A batch of a rank, as it was trained on.

    Attributes:
        epoch, step, rank, world_size: of the batch; steps count from 1 in an epoch.
        packs: keys of its packs, if Energon chose them.
        ids, sources: id and dataset of each sample.
        replaced: the batch was lost with a kill, and a later process of the run replaced it.
    """

    epoch: int
    step: int
    rank: int
    world_size: int
    packs: list[str]
    ids: list[str | None]
    sources: list[str | None]
    replaced: bool

    @classmethod
    def of(cls, line: Line) -> "LoggedBatch":
        """Return the batch of a line."""
        entries, process = line.entries, line.process
        return cls(
            epoch=entries["epoch"],
            step=entries["step"],
            rank=process.rank,
            world_size=process.world_size,
            packs=entries.get("packs", []),
            ids=entries["ids"],
            sources=entries["sources"],
            replaced=not line.counts,
        )


def logged_step(folder: Path, step: int, epoch: int = 0) -> list[LoggedBatch]:
    """Return the batches of all ranks in a step.

    Args:
        folder: the `order_log` of the loaders.
        step: from 1 in the epoch.
        epoch: from 0.

    Raises:
        ConfigError: the log has no such step.
        FormatError: there is no order log, or a line is damaged.
    """
    batches, last = list[LoggedBatch](), 0
    for line in OrderFiles(folder).lines([epoch]):
        if line.counts and line.has_batch:
            last = max(last, line.entries["step"])
            if line.entries["step"] == step:
                batches.append(LoggedBatch.of(line))
    if not batches:
        raise ConfigError(
            f"`step` must be at most {last}, the logged steps of epoch {epoch}, got {step}. Pass another `epoch`."
        )
    return sorted(batches, key=lambda batch: batch.rank)


def uses_of(folder: Path, ident: str) -> list[tuple[LoggedBatch, int]]:
    """Return each batch that has a sample, and the index of the sample in it; in the order of epochs and steps.

    Args:
        folder: the `order_log` of the loaders.
        ident: id of the sample. An id of a split document finds its fragments, `ID#0`, `ID#1`.

    Raises:
        FormatError: there is no order log, or a line is damaged.
    """
    uses = [
        (LoggedBatch.of(line), index)
        for line in OrderFiles(folder).lines()
        if line.has_batch
        for index, name in enumerate(line.entries["ids"])
        if name is not None and (name == ident or name.rpartition("#")[0] == ident)
    ]
    return sorted(uses, key=lambda use: (use[0].epoch, use[0].step, use[0].rank, not use[0].replaced))
