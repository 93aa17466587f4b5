"""The files of an order log in, an OrderReport out: samples that are lost or used twice, and lines that are missing.

`order_epoch.py` checks an epoch, and `order_missing.py` the lines. Samples are in files, about 50 bytes
for each sample of an epoch. Small epochs are read together.
"""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from energon_packed.errors import ConfigError
from energon_packed.loading.monitoring.order_data import LoggedData
from energon_packed.loading.monitoring.order_epoch import Epoch
from energon_packed.loading.monitoring.order_lines import OrderFiles, files_of, intervals
from energon_packed.loading.monitoring.order_missing import MissingLines


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderReport:
    """Result of a check of an order log.

    Attributes:
        steps: batches of all ranks, each counted once.
        replaced: batches after the checkpoint of a resume, which are read again; they do not count as steps.
        samples: samples in these batches.
        dropped: items that were read or left out, but are in no batch.
        left_out: samples of the data that are missing because their items were dropped; 0 without data.
        complete: epochs that every rank has read to the end.
        epochs: epochs with a line.
        sources: samples of each dataset.
        processes: starts of the run, such as `3 ranks after epoch 0, step 40`.
        problems: lost, repeated or different items, one line each.
    """

    steps: int
    replaced: int
    samples: int
    dropped: int
    left_out: int
    complete: list[int]
    epochs: list[int]
    sources: dict[str, int]
    processes: list[str]
    problems: list[str] = field(default_factory=list)


def check_order(folder: Path, data: LoggedData | None = None) -> OrderReport:
    """Read the logs of all ranks, and find items that are lost, used twice, or different after a resume.

    Args:
        folder: the `order_log` of the loaders.
        data: data with which each epoch is compared; None compares the ranks with each other.

    Raises:
        FormatError: there is no order log, or a line is damaged.
        ConfigError: the loader was a JointLoader, which has a folder for each of its loaders.
    """
    if not files_of(folder) and (inner := [each for each in sorted(folder.glob("*/")) if files_of(each)]):
        raise ConfigError(f"{folder} has the logs of several loaders. Pass one of {', '.join(map(str, inner))}.")
    files = OrderFiles(folder)
    problems, complete, missing = list[str](), list[int](), MissingLines(files)
    total, sources = Counter[str](), Counter[str]()
    for numbers in files.groups():
        epochs = {number: Epoch(number) for number in numbers}
        for line in files.lines(epochs):
            missing.add(line)
            epochs[line.epoch].add(line)
        for number, epoch in epochs.items():
            if not epoch.facts:  # all lines were replaced
                continue
            problems += epoch.problems()
            if data is not None:
                differences, left_out = data.compare(epoch)
                problems += differences
                total["left_out"] += left_out
            complete += [number] if epoch.complete else []
            total.update(epoch.totals)
            sources.update(epoch.sources)
    return OrderReport(
        **{name: total[name] for name in ("steps", "replaced", "samples", "dropped", "left_out")},
        complete=complete,
        epochs=list(files.epochs),
        sources=dict(sources),
        processes=list(intervals(files.last)),
        problems=[*files.problems, *missing.problems(), *problems],
    )
