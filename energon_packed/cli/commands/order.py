"""Command `energon-packed order`: check an order log, find the uses of a sample, or list the samples of a step.

`check`, `find` and `replay` read the files that all ranks wrote with `order_log=DIR`. `replay` also computes the
samples of a step from a dataset or a config, before training.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from energon_packed.cli.display import shown_path, turn_text
from energon_packed.cli.options import GroupedCommand, as_options, media_root_option
from energon_packed.cli.output import Output, output_options
from energon_packed.cli.terminal import echo
from energon_packed.errors import ConfigError
from energon_packed.loading.dataflow.config import DataflowConfig, is_dataflow_config
from energon_packed.loading.monitoring.order_check import check_order
from energon_packed.loading.monitoring.order_data import LoggedData
from energon_packed.loading.monitoring.order_lines import Line, files_of
from energon_packed.loading.monitoring.order_lookup import logged_step, uses_of
from energon_packed.loading.monitoring.replay import Run, replay, replay_config


@click.group(name="order")
def command() -> None:
    """Check which samples a run used, or show which samples a step will use.

    \b
    energon-packed order check DIR --data out
    energon-packed order find SAMPLE-ID DIR
    energon-packed order replay DIR --step 1000
    energon-packed order replay out --world-size 8 --step 1000
    energon-packed order replay train.yaml --world-size 8 --step 1000
    """


def _data_option(text: str) -> Callable[..., Any]:
    return click.option("--data", type=click.Path(path_type=Path), metavar="PATH", help=text)


@command.command(name="check", cls=GroupedCommand)
@click.argument("folder", type=click.Path(path_type=Path), metavar="DIR")
@_data_option("Compare with the samples of a dataset folder, a Metadataset, or the config of a loader.")
@output_options
def check(folder: Path, data: Path | None, output: Output) -> None:
    """Check the files of `order_log=DIR`; exit with status 1 if there is a problem.

    No sample may be lost or repeated, and steps that are read again after a resume must have the same samples. Of an
    epoch that is not complete, the batches in the log are checked.
    """
    summary = check_order(folder, None if data is None else LoggedData(data))
    output.console.print(
        f"{summary.steps:,} batches, {summary.samples:,} samples, {summary.dropped:,} dropped items, "
        f"{summary.replaced:,} batches replaced after a resume; epochs {', '.join(map(str, summary.epochs))}, "
        f"complete: {', '.join(map(str, summary.complete)) or 'none'}",
        soft_wrap=True,
    )
    if summary.left_out:
        output.console.print(f"{summary.left_out:,} samples of {data} were in dropped items", soft_wrap=True)
    if len(summary.processes) > 1:
        output.console.print("; ".join(summary.processes), soft_wrap=True)
    for name, count in sorted(summary.sources.items()):
        output.console.print(f"  {count / max(1, summary.samples):7.2%}  {shown_path(name)}", soft_wrap=True)
    for problem in summary.problems:
        echo(as_options(problem), err=output.as_json)
    output.result(asdict(summary))
    if summary.problems:
        sys.exit(1)
    checked = "no sample lost or repeated, equal after every resume"
    if rest := [str(epoch) for epoch in summary.epochs if epoch not in summary.complete]:
        # The samples that these epochs have not used yet are neither lost nor used.
        checked += f"; up to the last batch in the log, as these epochs are not complete: {', '.join(rest)}"
    output.console.print(checked, soft_wrap=True)


@command.command(name="find", cls=GroupedCommand)
@click.argument("ident", metavar="ID")
@click.argument("folder", type=click.Path(path_type=Path), metavar="DIR")
@output_options
def find(ident: str, folder: Path, output: Output) -> None:
    """Show when a sample was trained: epoch, step and rank of each use, in the log of `order_log=DIR`."""
    uses = uses_of(folder, ident)
    for line, index in uses:
        note = "" if line.counts else ", replaced after a resume"
        packs = f" of {', '.join(line.packs)}" if line.packs else ""
        output.console.print(
            f"epoch {line.epoch}, step {line.step}, rank {line.process.rank} of {line.process.world_size}: sample "
            f"{index} of {len(line.ids or ())}{packs}{note}",
            soft_wrap=True,
        )
    output.result({"id": ident, "uses": [_plain(line) | {"sample": index} for line, index in uses]})
    if not uses:
        raise ConfigError(f"{folder} has no sample {ident!r}. Pass an id as it is in `batch.ids`.")


@command.command(name="replay", cls=GroupedCommand)
@click.argument("path", type=click.Path(path_type=Path), metavar="PATH")
@click.option("--step", type=click.IntRange(min=1), required=True, help="Step of the epoch, from 1. [required]")
@click.option("--epoch", type=click.IntRange(min=0), default=0, show_default=True, help="Epoch, from 0.")
@click.option(
    "--world-size", type=click.IntRange(1, 1 << 16), default=1, show_default=True, help="Data-parallel ranks."
)
@click.option("--batch-size", type=click.IntRange(min=1), default=1, show_default=True, help="Rows in one batch.")
@click.option(
    "--num-workers", type=click.IntRange(min=0), default=0, show_default=True, help="Loader workers of a rank."
)
@click.option("--seed", type=click.IntRange(min=0), help="Seed of the loader. [default: 0, or the config's]")
@click.option("--content", is_flag=True, help="Show the turns of the samples; needs --data.")
@_data_option("Dataset folder or Metadataset of --content.")
@media_root_option
@output_options
def replay_step(
    path: Path, step: int, epoch: int, world_size: int, batch_size: int, num_workers: int, seed: int | None,
    content: bool, data: Path | None, output: Output,
) -> None:  # fmt: skip
    """Show the samples of a step on every rank.

    PATH is a folder that was `order_log` of a run: the samples that were trained; --step and --epoch are its only
    settings. Or it is a dataset folder or a Metadataset, for
    DataflowLoader(MapDistributor(PackedDataset(PATH)), batch_size=N), or the YAML of a DataflowConfig, for
    get_raw_loader(config). Records of a config are tokenized up to that step.
    """
    if content != (data is not None):
        raise click.UsageError("--content and --data must be set together. Pass both, or remove both.")
    if files_of(path):
        _show_logged(path, step, epoch, data, output)
        return
    if content:
        raise click.UsageError(
            f"--content needs the folder of an order log, got {path}. Pass the `order_log` of the run."
        )
    run = Run(world_size=world_size, num_workers=num_workers, batch_size=batch_size, epoch=epoch, seed=seed or 0)
    # A Metadataset and a config are both YAML: the keys of the file decide.
    if is_dataflow_config(path):
        config = DataflowConfig.from_yaml(path)
        ranks = replay_config(config, step, replace(run, seed=config.seed if seed is None else seed))
    else:
        ranks = replay(path, step, run)
    results = []
    for rank in ranks:
        results.append(asdict(rank))
        packs = f"{', '.join(rank.packs)}: " if rank.packs else ""
        line = f"{packs}{', '.join(rank.ids)}" if rank.worker is not None else f"ends after {rank.steps} steps"
        output.console.print(f"rank {rank.rank}  {line}", soft_wrap=True)
    output.result({"step": step, "epoch": epoch, "ranks": results})


def _show_logged(folder: Path, step: int, epoch: int, data: Path | None, output: Output) -> None:
    lines = logged_step(folder, step, epoch)
    texts = dict(_texts(data, lines)) if data is not None else {}
    for line in lines:
        packs = f"{', '.join(line.packs)}: " if line.packs else ""
        output.console.print(f"rank {line.process.rank}  {packs}{', '.join(map(str, line.ids or ()))}", soft_wrap=True)
        for ident in line.ids or ():
            for text in texts.get(ident, ()):
                output.console.print(text, soft_wrap=True)
    ranks = [_plain(line) for line in lines]
    turns = {"content": texts} if data is not None else {}
    output.result({"step": step, "epoch": epoch, "ranks": ranks} | turns)


def _plain(line: Line) -> dict[str, Any]:
    """Return the batch of a line as JSON output."""
    place = {"rank": line.process.rank, "world_size": line.process.world_size}
    samples = {"packs": line.packs, "ids": line.ids, "sources": line.sources}
    return {"epoch": line.epoch, "step": line.step} | place | samples | {"replaced": not line.counts}


def _texts(data: Path, lines: list[Line]) -> Iterator[tuple[str | None, list[str]]]:
    """Yield (id, turns) of the samples of batches."""
    wanted = {ident for line in lines for ident in line.ids or () if ident is not None}
    for ident, conversation in LoggedData(data).samples(wanted):
        turns = [(message.role, message.content) for message in conversation.messages]
        if conversation.text is not None:
            turns = [("text", conversation.text)]
        yield ident, [f"  {ident}", *(turn_text(role, text) for role, text in turns)]
