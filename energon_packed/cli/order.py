"""`energon-packed order`: check the log of a run's order, and show what a step will hold."""

import sys
from dataclasses import asdict, replace
from pathlib import Path

import click

from energon_packed.cli.options import GroupedCommand, as_options
from energon_packed.cli.output import Output, output_options
from energon_packed.cli.terminal import echo
from energon_packed.loading.config import DataflowConfig, is_dataflow_config
from energon_packed.loading.order_log import check_order
from energon_packed.loading.replay import Run, replay, replay_config


@click.group(name="order")
def command() -> None:
    """Check which samples a run used, or show which ones a step will use.

    \b
    energon-packed order check DIR
    energon-packed order replay out --world-size 8 --step 1000
    energon-packed order replay train.yaml --world-size 8 --step 1000
    """


@command.command(name="check", cls=GroupedCommand)
@click.argument("folder", type=click.Path(path_type=Path), metavar="DIR")
@output_options
def check(folder: Path, output: Output) -> None:
    """Check the files of `order_log=DIR`: no sample lost, none twice, the same after a resume.

    Exit status 1 when one of these does not hold.
    """
    found = check_order(folder)
    output.console.print(
        f"{found.steps:,} steps, {found.samples:,} samples, {found.dropped:,} dropped items, {found.repeated:,} steps "
        f"repeated by resuming; epochs {', '.join(map(str, found.epochs))}, complete: "
        f"{', '.join(map(str, found.complete)) or 'none'}",
        soft_wrap=True,
    )
    for name, count in sorted(found.sources.items()):
        output.console.print(f"  {count / max(1, found.samples):7.2%}  {name}", soft_wrap=True)
    for problem in found.problems:
        echo(as_options(problem), err=output.as_json)
    output.result(asdict(found))
    if found.problems:
        sys.exit(1)
    output.console.print("no sample lost, none twice, equal after every resume")


@command.command(name="replay", cls=GroupedCommand)
@click.argument("path", type=click.Path(path_type=Path), metavar="PATH")
@click.option("--step", type=click.IntRange(min=1), required=True, help="Step of the epoch, from 1. [required]")
@click.option("--epoch", type=click.IntRange(min=0), default=0, show_default=True, help="Epoch, from 0.")
@click.option(
    "--world-size", type=click.IntRange(1, 1 << 16), default=1, show_default=True, help="Data-parallel ranks."
)
@click.option("--batch-size", type=click.IntRange(min=1), default=1, show_default=True, help="Rows in one batch.")
@click.option("--num-workers", type=click.IntRange(min=0), default=0, show_default=True, help="Workers of a rank.")
@click.option("--seed", type=click.IntRange(min=0), help="Seed of the loader. [default: 0, or the config's]")
@output_options
def replay_step(
    path: Path, step: int, epoch: int, world_size: int, batch_size: int, num_workers: int, seed: int | None,
    output: Output,
) -> None:  # fmt: skip
    """Show what a step will hold on every rank.

    PATH is a dataset folder or a Metadataset, for DataflowLoader(MapDistributor(PackedDataset(PATH)), batch_size=N),
    or the YAML of a DataflowConfig, for get_raw_loader(config): its records are tokenized up to that step.
    """
    run = Run(world_size=world_size, num_workers=num_workers, batch_size=batch_size, epoch=epoch, seed=seed or 0)
    if is_dataflow_config(path):
        config = DataflowConfig.from_yaml(path)
        found = replay_config(config, step, replace(run, seed=config.seed if seed is None else seed))
    else:
        found = replay(path, step, run)
    ranks = []
    for one in found:
        ranks.append(asdict(one))
        packs = f"{', '.join(one.packs)}: " if one.packs else ""
        what = f"{packs}{', '.join(one.ids)}" if one.worker is not None else f"ends after {one.steps} steps"
        output.console.print(f"rank {one.rank}  {what}", soft_wrap=True)
    output.result({"step": step, "epoch": epoch, "ranks": ranks})
