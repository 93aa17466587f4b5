"""Command `energon-packed order`: check an order log, or list the samples of a step.

`check` reads the files that all ranks wrote with `order_log=DIR`. `replay` computes the samples that each rank reads
at a step, from a dataset or a config.
"""

import sys
from dataclasses import asdict, replace
from pathlib import Path

import click

from energon_packed.cli.options import GroupedCommand, as_options, media_root_option
from energon_packed.cli.output import Output, output_options
from energon_packed.cli.terminal import echo
from energon_packed.loading.config import DataflowConfig, is_dataflow_config
from energon_packed.loading.monitoring.order_log import check_order
from energon_packed.loading.monitoring.replay import Run, replay, replay_config


@click.group(name="order")
def command() -> None:
    """Check which samples a run used, or show which samples a step will use.

    \b
    energon-packed order check DIR
    energon-packed order replay out --world-size 8 --step 1000
    energon-packed order replay train.yaml --world-size 8 --step 1000
    """


@command.command(name="check", cls=GroupedCommand)
@click.argument("folder", type=click.Path(path_type=Path), metavar="DIR")
@output_options
def check(folder: Path, output: Output) -> None:
    """Check the files of `order_log=DIR`; exit with status 1 if there is a problem.

    No sample may be lost or repeated, and steps that were repeated after a resume must have the same samples.
    """
    summary = check_order(folder)
    output.console.print(
        f"{summary.steps:,} steps, {summary.samples:,} samples, {summary.dropped:,} dropped items, "
        f"{summary.repeated:,} steps repeated by resuming; epochs {', '.join(map(str, summary.epochs))}, complete: "
        f"{', '.join(map(str, summary.complete)) or 'none'}",
        soft_wrap=True,
    )
    for name, count in sorted(summary.sources.items()):
        output.console.print(f"  {count / max(1, summary.samples):7.2%}  {name}", soft_wrap=True)
    for problem in summary.problems:
        echo(as_options(problem), err=output.as_json)
    output.result(asdict(summary))
    if summary.problems:
        sys.exit(1)
    output.console.print("no sample lost or repeated, equal after every resume")


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
@media_root_option
@output_options
def replay_step(
    path: Path, step: int, epoch: int, world_size: int, batch_size: int, num_workers: int, seed: int | None,
    output: Output,
) -> None:  # fmt: skip
    """Show the samples of a step on every rank.

    PATH is a dataset folder or a Metadataset, for DataflowLoader(MapDistributor(PackedDataset(PATH)), batch_size=N),
    or the YAML of a DataflowConfig, for get_raw_loader(config). Records of a config are tokenized up to that step.
    """
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
