"""An order log and a step or an id in, the lines of the step or of the uses of the sample out."""

from pathlib import Path

from energon_packed.errors import ConfigError
from energon_packed.loading.monitoring.order_lines import Line, OrderFiles


def logged_step(folder: Path, step: int, epoch: int = 0) -> list[Line]:
    """Return the lines of the batches of all ranks in a step.

    Args:
        folder: the `order_log` of the loaders.
        step: from 1 in the epoch.
        epoch: from 0.

    Raises:
        ConfigError: the log has no such step.
        FormatError: there is no order log, or a line is damaged.
    """
    batches, last = list[Line](), 0
    for line in OrderFiles(folder).lines([epoch]):
        if line.counts and line.ids is not None:
            last = max(last, line.step)
            if line.step == step:
                batches.append(line)
    if not batches:
        raise ConfigError(
            f"`step` must be at most {last}, the logged steps of epoch {epoch}, got {step}. Pass another `epoch`."
        )
    return sorted(batches, key=lambda line: line.process.rank)


def uses_of(folder: Path, ident: str) -> list[tuple[Line, int]]:
    """Return the line of each batch that has a sample, and the index of the sample in it, in the order of steps.

    Args:
        folder: the `order_log` of the loaders.
        ident: id of the sample. An id of a split document finds its fragments, `ID#0`, `ID#1`.

    Raises:
        FormatError: there is no order log, or a line is damaged.
    """
    uses = [
        (line, index)
        for line in OrderFiles(folder).lines()
        for index, name in enumerate(line.ids or ())
        if name is not None and (name == ident or name.rpartition("#")[0] == ident)
    ]
    return sorted(uses, key=lambda use: (use[0].position, use[0].process.rank, use[0].counts))
