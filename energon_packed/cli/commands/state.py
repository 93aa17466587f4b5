"""Command `energon-packed state redist`: the loader states of all ranks in, states for another number of ranks out."""

import re
from pathlib import Path

import click

from energon_packed.cli.options import GroupedCommand
from energon_packed.cli.output import Output, output_options
from energon_packed.errors import ConfigError
from energon_packed.options import refuse_remote


@click.group(name="state")
def command() -> None:
    """Work with saved loader states."""


@command.command(name="redist", cls=GroupedCommand)
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False), metavar="DIR")
@click.argument("output_folder", type=click.Path(path_type=Path, file_okay=False), metavar="NEW_DIR")
@click.option("--world-size", type=click.IntRange(min=1), required=True, help="Data-parallel ranks to continue with.")
@output_options
def redist(folder: Path, output_folder: Path, world_size: int, output: Output) -> None:
    """Redistribute the loader states of all ranks to another number of ranks.

    DIR contains one .pt file for each data-parallel rank, as saved by Megatron. World size times loader workers stays
    the same, so that every worker resumes at its last position: no pack is lost or repeated.

    \b
    energon-packed state redist data/iter_0000100/mp_rank_00 new/iter_0000100/mp_rank_00 --world-size 2
    """
    # Imported here, because it imports torch.
    from energon_packed.loading.dataflow.state_files import StateFile, read_state, redistribute, write_state

    refuse_remote(output_folder)
    files = sorted(folder.glob("*.pt"))
    if not files:
        raise ConfigError(f"{folder} has no .pt file. Pass the folder with train_dataloader_dprank000.pt.")
    # The new files follow the name pattern of the old files, with the same number of digits.
    match = re.fullmatch(r"(.*?)(\d+)(\.pt)", files[0].name)
    if match is None:
        raise ConfigError(f"file names must contain the rank, as in train_dataloader_dprank000.pt, got {files[0]}.")
    if output_folder.is_dir() and any(output_folder.glob("*.pt")):
        raise ConfigError(f"{output_folder} already contains .pt files. Pass a new folder.")
    saved = [read_state(file) for file in files]
    new = redistribute([file.state for file in saved], world_size)
    output_folder.mkdir(parents=True, exist_ok=True)
    for rank, state in enumerate(new):
        name = f"{match[1]}{rank:0{len(match[2])}d}{match[3]}"
        write_state(output_folder / name, StateFile(state, saved[0].megatron))
    workers = new[0]["num_workers"]
    output.console.print(
        f"ranks x workers: {len(saved)} x {saved[0].state['num_workers']} -> {world_size} x {workers}, in "
        f"{output_folder}; continue with num_workers={workers}",
        soft_wrap=True,
    )
    output.result({"folder": str(output_folder), "world_size": world_size, "num_workers": workers})
