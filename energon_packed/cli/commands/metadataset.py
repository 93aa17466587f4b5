"""Command `energon-packed metadataset`: datasets and weights in, a Metadataset YAML and a table of its draws out."""

import math
import re
from pathlib import Path
from typing import Any, get_args

import click
from rich.table import Table

from energon_packed.blends import (
    Blend,
    BlendInput,
    Schema,
    SharesOf,
    Subflavor,
    WeightBy,
    make_blend,
    write_metadataset,
)
from energon_packed.cli.options import GroupedCommand, InputPath, as_options
from energon_packed.cli.output import Output, output_options
from energon_packed.cli.terminal import echo
from energon_packed.storage import as_path

# Numbers of JSON, so that 007 and 1_000 stay strings.
_INTEGER = re.compile(r"[+-]?(0|[1-9][0-9]*)")
_MAX_DIGITS = 300  # Python refuses to print integers of more than 4,300 digits
_DECIMAL = re.compile(r"[+-]?[0-9]+\.[0-9]*([eE][+-]?[0-9]+)?|[+-]?[0-9]+[eE][+-]?[0-9]+")


@click.command(name="metadataset", cls=GroupedCommand, short_help="Blend several datasets into one Metadataset.")
@click.argument("inputs", nargs=-1, required=True, metavar="[FILE] DIR[=WEIGHT]...")
@click.option("--output", "-o", "out", type=InputPath(dir_okay=False), metavar="FILE",
              help="YAML file to write. [default: the first argument]")  # fmt: skip
@click.option("--weight-by", type=click.Choice(get_args(WeightBy)), default="samples", show_default=True,
              help="Quantity that default weights are proportional to.")  # fmt: skip
@click.option("--shares-of", type=click.Choice(get_args(SharesOf)), default="packs", show_default=True,
              help="Unit of each WEIGHT as a share. Energon draws packs: for samples or tokens, the weights of packs "
              "are computed from packing.json.")  # fmt: skip
@click.option("--schema", type=click.Choice(get_args(Schema)), default="v2", show_default=True,
              help="Metadataset version; v1 for Energon releases without MetadatasetV2.")  # fmt: skip
@click.option("--split-from", type=click.Choice(["train", "val", "test"]), default="train", show_default=True,
              help="Split of the inputs to train on.")  # fmt: skip
@click.option("--epochized", is_flag=True,
              help="Read every pack WEIGHT times per epoch (default 1), instead of drawing indefinitely.")  # fmt: skip
@click.option("--relative/--absolute", default=True, show_default=True, help="Form of the paths in the file.")
@click.option("--subflavor", "subflavors", multiple=True, metavar="K=V",
              help="Attach K=V to every sample; true, false and numbers keep their type; repeatable.")  # fmt: skip
@click.option("--input-subflavor", "input_subflavors", multiple=True, nargs=2, metavar="DIR K=V",
              help="Attach K=V to the samples of an input; overrides --subflavor; repeatable.")  # fmt: skip
@click.option("--val", multiple=True, metavar="DIR",
              help="Validation dataset; repeatable. [default: the val splits of the inputs]")  # fmt: skip
@click.option("--overwrite", is_flag=True, help="Replace a file that this command did not write.")
@output_options
def command(
    inputs: tuple[str, ...],
    out: Path | None,
    weight_by: WeightBy,
    shares_of: SharesOf,
    schema: Schema,
    split_from: str,
    epochized: bool,
    relative: bool,
    subflavors: tuple[str, ...],
    input_subflavors: tuple[tuple[str, str], ...],
    val: tuple[str, ...],
    overwrite: bool,
    output: Output,
) -> None:
    """Blend several datasets into one weighted Metadataset.

    DIR is a folder that `energon-packed pack` wrote, any Energon dataset of packs, or another Metadataset. If an input
    has a WEIGHT, inputs without WEIGHT have weight 1.

    \b
    energon-packed metadataset -o mix.yaml out/node_a out/node_b
    energon-packed metadataset -o mix.yaml out/node_a=3 out/node_b=0.5 --val out/held_out
    """
    if out is None:
        out, inputs = as_path(inputs[0]), inputs[1:]
    if not inputs:
        raise click.UsageError(f"DIR must be at least one dataset, got none beside the file {out}.")
    by_input: dict[str | Path, dict[str, Subflavor]] = {}
    for path, pair in input_subflavors:
        by_input.setdefault(path, {}).update([_pair(pair)])
    blend = make_blend(
        [_with_weight(argument) for argument in inputs],
        val=val,
        weight_by=weight_by,
        split_from=split_from,
        schema=schema,
        epochized=epochized,
        shares_of=shares_of,
        subflavors=dict(_pair(pair) for pair in subflavors),
        input_subflavors=by_input,
    )
    write_metadataset(blend, out, absolute=not relative, overwrite=overwrite)
    output.console.print(_table(blend))
    for warning in blend.warnings():
        echo(f"note: {as_options(warning)}", err=output.as_json or output.quiet)
    output.console.print(f"{out}: get_packed_loader({str(out)!r}, encoder)", soft_wrap=True)
    output.result(_as_dict(blend, out))


def _as_dict(blend: Blend, out: Path) -> dict[str, Any]:
    return {
        "metadataset": str(out),
        "train": [
            _counts(entry) | {"weight": entry.weight, "weighed_by": entry.weighed_by, "seen": times}
            for entry, times in zip(blend.train, blend.times_seen(), strict=True)
        ],
        "val": [_counts(entry) for entry in blend.val],
        "epochized": blend.epochized,
        "schema": blend.schema,
        "warnings": [as_options(warning) for warning in blend.warnings()],
    }


def _table(blend: Blend) -> Table:
    total = sum(entry.weight for entry in blend.train)
    unit = "times per epoch"
    table = Table(caption=f"seen: {unit}")
    table.add_column("input", overflow="fold", min_width=20)
    table.add_column("split")
    for name in ("packs", "samples", "per pack", "repeated" if blend.epochized else "draws", "seen"):
        table.add_column(name, justify="right")
    rows = [
        (entry, "train", f"{entry.weight:g}" if blend.epochized else f"{entry.weight / total:.2%}", f"{times:.2f}")
        for entry, times in zip(blend.train, blend.times_seen(), strict=True)
    ]
    for entry, split, share, seen in [*rows, *((entry, "val", "", "1.00") for entry in blend.val)]:
        counts = (f"{entry.packs:,}", f"{entry.samples:,}", f"{entry.samples_per_pack:.2f}")
        table.add_row(str(entry.path), split, *counts, share, seen)
    return table


def _counts(entry: BlendInput) -> dict[str, Any]:
    return {"path": str(entry.path), "split": entry.split, "packs": entry.packs, "samples": entry.samples}


def _with_weight(argument: str) -> tuple[str, float | None]:
    """Split `DIR=WEIGHT`; an existing path that contains `=` has no weight."""
    # The last `=`, as folder names may contain `=`.
    path, equals, weight = argument.rpartition("=")
    if not equals or as_path(argument).exists():
        return argument, None
    try:
        number = float(weight)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise click.UsageError(f"the weight of {path} must be a finite number >= 0, got {weight!r}.")
    return path, number


def _pair(argument: str) -> tuple[str, Subflavor]:
    key, equals, value = argument.partition("=")
    if not equals or not key:
        raise click.UsageError(f"a subflavor must have the form key=value, got {argument!r}.")
    return key, _typed(value)


def _typed(text: str) -> Subflavor:
    """Convert `true`, `false` and numbers; other values are strings, and so are values in quotes."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if _INTEGER.fullmatch(text):
        if len(text) > _MAX_DIGITS:
            raise click.UsageError(
                f"a subflavor must have at most {_MAX_DIGITS} digits, got {len(text)}: {text[:20]}..."
            )
        return int(text)
    if _DECIMAL.fullmatch(text):
        return float(text)
    # Quotes keep a number or a boolean as a string.
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text
