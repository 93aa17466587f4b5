"""`energon-packed state`."""

import re
from pathlib import Path

import click

from energon_packed.cli.options import GroupedCommand
from energon_packed.cli.output import Output, output_options
from energon_packed.errors import ConfigError


@click.group(name="state")
def command() -> None:
    """Work with saved states of loaders."""


@command.command(name="redist", cls=GroupedCommand)
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False), metavar="DIR")
@click.argument("output_folder", type=click.Path(path_type=Path, file_okay=False), metavar="NEW_DIR")
@click.option("--world-size", type=click.IntRange(min=1), required=True, help="Data-parallel ranks to continue with.")
@output_options
def redist(folder: Path, output_folder: Path, world_size: int, output: Output) -> None:
    """Redistribute the states of all ranks to another number of ranks.

    DIR holds one .pt file for each data-parallel rank, as Megatron saves them. World size times loader workers stays
    the same, so that every worker resumes where it stopped: no pack is lost or repeated.

    \b
    energon-packed state redist data/iter_0000100/mp_rank_00 new/iter_0000100/mp_rank_00 --world-size 2
    """
    from energon_packed.loading.energon.states import (
        StateFile,
        read_state,
        redistribute,  # imports torch
        write_state,
    )

    files = sorted(folder.glob("*.pt"))
    if not files:
        raise ConfigError(f"{folder} has no .pt file; pass the folder with train_dataloader_dprank000.pt")
    matched = re.fullmatch(r"(.*?)(\d+)(\.pt)", files[0].name)
    if matched is None:
        raise ConfigError(f"{files[0]} has no rank number in its name, such as train_dataloader_dprank000.pt")
    if output_folder.is_dir() and any(output_folder.glob("*.pt")):
        raise ConfigError(f"{output_folder} already has .pt files; pass a new folder")
    saved = [read_state(file) for file in files]
    new = redistribute([one.state for one in saved], world_size)
    output_folder.mkdir(parents=True, exist_ok=True)
    for rank, state in enumerate(new):
        name = f"{matched[1]}{rank:0{len(matched[2])}d}{matched[3]}"
        write_state(output_folder / name, StateFile(state, saved[0].megatron))
    workers = new[0]["identity"]["num_workers"]
    output.console.print(
        f"ranks x workers: {len(saved)} x {saved[0].state['identity']['num_workers']} -> {world_size} x {workers}, in "
        f"{output_folder}; continue with num_workers={workers}",
        soft_wrap=True,
    )
    output.result({"folder": str(output_folder), "world_size": world_size, "num_workers": workers})
