"""Command `energon-packed steps`: a dataset and a number of GPUs in, steps per epoch and their imbalance out."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import click

from energon_packed.cli.options import GroupedCommand, InputPath, as_options, group_option, media_root_option
from energon_packed.cli.output import Output, output_options
from energon_packed.errors import ConfigError
from energon_packed.inspection.steps import MAX_PACKS, ExpectedSteps, expected_steps, read_sizes
from energon_packed.loading.costs.model import CostModel, cost_model

_ONE = click.IntRange(min=1)


@click.command(name="steps", cls=GroupedCommand)
@click.argument("path", type=InputPath(), metavar="DIR|METADATASET")
@group_option("--world-size", type=click.IntRange(1, 1 << 20), required=True, group="Training",
              help="Number of GPUs. [required]")  # fmt: skip
@group_option("--micro-batch-size", type=_ONE, default=1, show_default=True, group="Training",
              help="Packs in a micro batch.")  # fmt: skip
@group_option("--accumulation", type=_ONE, default=1, show_default=True, group="Training",
              help="Micro batches of a step on each rank.")  # fmt: skip
@group_option("--tp", type=_ONE, default=1, show_default=True, group="Training",
              help="GPUs that share a layer (tensor parallelism).")  # fmt: skip
@group_option("--cp", type=_ONE, default=1, show_default=True, group="Training",
              help="GPUs that share a row (context parallelism); samples are padded to 2 x N tokens.")  # fmt: skip
@group_option("--pp", type=_ONE, default=1, show_default=True, group="Training",
              help="GPUs that share the layers (pipeline parallelism).")  # fmt: skip
@group_option("--balance", type=click.Choice(["attention", "tokens"]), default="attention", show_default=True,
              group="Costs", help="Costs of an 8B model, or the number of tokens.")  # fmt: skip
@group_option("--model-config", type=click.Path(path_type=Path, exists=True), metavar="DIR", group="Costs",
              help="Folder with the config.json of the model, instead of --balance.")  # fmt: skip
@group_option("--frozen-vision", is_flag=True, group="Costs",
              help="The vision tower is not trained (with --model-config).")  # fmt: skip
@group_option("--split", type=click.Choice(["train", "val", "test"]), default="train", show_default=True, group="Data",
              help="Split to read.")  # fmt: skip
@group_option("--tokenizer", type=click.Path(path_type=Path, exists=True, file_okay=False), group="Data",
              help="Tokenizer, to count images. [default: tokenizer in packing.json]")  # fmt: skip
@group_option("--max-packs", type=_ONE, default=MAX_PACKS, show_default=True, group="Data",
              help="Packs whose lengths are read; the others count as if they were like them.")  # fmt: skip
@group_option("--seed", type=click.IntRange(min=0), default=0, show_default=True, group="Data",
              help="Seed of the order, and of the packs that are read.")  # fmt: skip
@media_root_option
@output_options
def command(
    path: Path, world_size: int, micro_batch_size: int, accumulation: int, tp: int, cp: int, pp: int, balance: str,
    model_config: Path | None, frozen_vision: bool, split: str, tokenizer: Path | None, max_packs: int, seed: int,
    output: Output,
) -> None:  # fmt: skip
    """Show the steps of an epoch, and how long ranks wait for the slowest rank, shuffled and with balance.

    \b
    energon-packed steps out --world-size 64
    energon-packed steps mix.yaml --world-size 512 --tp 4 --cp 2 --accumulation 8 --model-config DIR
    """
    shared = tp * cp * pp
    if world_size % shared:
        raise click.UsageError(f"--world-size must be a multiple of --tp x --cp x --pp = {shared}, got {world_size}.")
    cost = cost_model(balance) if model_config is None else _cost_of(model_config, trains_vision=not frozen_vision)
    multiple = 1 if cp == 1 else 2 * cp
    epoch = read_sizes(path, split=split, tokenizer=tokenizer, multiple=multiple, max_packs=max_packs, seed=seed)
    steps = expected_steps(
        epoch.sizes,
        cost,
        ranks=world_size // shared,
        micro_batch_size=micro_batch_size,
        accumulation=accumulation,
        seed=seed,
    )
    for line in _lines(steps):
        output.console.print(line, soft_wrap=True)
    if epoch.read < steps.packs:
        output.console.print(f"lengths of {epoch.read:,} packs were read", soft_wrap=True)
    for note in epoch.notes:
        output.console.print(as_options(note), soft_wrap=True)
    output.result({**asdict(steps), "read": epoch.read, "notes": epoch.notes, "cost": cost.constants()})


def _lines(steps: ExpectedSteps) -> Iterator[str]:
    """Table of the imbalance, and the number of steps."""
    rows = {"shuffled": asdict(steps.shuffled), "aligned": asdict(steps.aligned)}
    yield f"{'slowest rank / mean rank':24}" + "".join(f"{name:>9}" for name in rows["shuffled"])
    for name, values in rows.items():
        yield f"{name:24}" + "".join(f"{value:9.3f}" for value in values.values())
    width = steps.ranks * steps.micro_batch_size * steps.accumulation
    last = f", and {steps.rest:,} in the last step" if steps.rest else ""
    yield (
        f"{steps.packs:,} packs: {steps.steps:,} steps of {width:,} packs ({steps.ranks:,} ranks x micro batch size "
        f"{steps.micro_batch_size} x accumulation {steps.accumulation}){last}"
    )


def _cost_of(folder: Path, *, trains_vision: bool) -> CostModel:
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"`model_config` {folder} has no config.json that Transformers can read: {error}") from error
    return CostModel.from_config(config, trains_vision=trains_vision)
