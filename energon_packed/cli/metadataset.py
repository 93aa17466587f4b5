"""`energon-packed metadataset`."""

import re
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from energon_packed.blends import WEIGHT_BY, Blend, BlendInput, Subflavor, make_blend, write_metadataset
from energon_packed.cli.options import GroupedCommand, as_options
from energon_packed.cli.output import Output, output_options
from energon_packed.cli.terminal import echo
from energon_packed.errors import ConfigError

_INTEGER = re.compile(r"[+-]?(0|[1-9][0-9]*)")
_MOST_DIGITS = 300
_DECIMAL = re.compile(r"[+-]?[0-9]+\.[0-9]*([eE][+-]?[0-9]+)?|[+-]?[0-9]+[eE][+-]?[0-9]+")


@click.command(
    name="metadataset",
    cls=GroupedCommand,
    short_help="Blend several datasets into one Metadataset.",
)
@click.argument("out", type=click.Path(path_type=Path, dir_okay=False))
@click.argument("inputs", nargs=-1, required=True, metavar="DIR[=WEIGHT]...")
@click.option("--weight-by", type=click.Choice(WEIGHT_BY), default="samples", show_default=True,
              help="What weights are proportional to, unless given.")  # fmt: skip
@click.option("--schema", type=click.Choice(["v2", "v1"]), default="v2", show_default=True,
              help="v1 for code without MetadatasetV2.")  # fmt: skip
@click.option("--split-from", type=click.Choice(["train", "val", "test"]), default="train", show_default=True,
              help="Split of the inputs that is trained on.")  # fmt: skip
@click.option("--epochized", is_flag=True,
              help="Every pack WEIGHT times per epoch (1 by default), instead of drawing indefinitely.")  # fmt: skip
@click.option("--relative/--absolute", default=True, show_default=True, help="Paths in the file.")
@click.option("--subflavor", "subflavors", multiple=True, metavar="K=V",
              help="Attached to every sample; true, false and numbers keep their type; may repeat.")  # fmt: skip
@click.option("--input-subflavor", "input_subflavors", multiple=True, nargs=2, metavar="DIR K=V",
              help="Attached to the samples of one input; wins over --subflavor; may repeat.")  # fmt: skip
@click.option("--val", multiple=True, metavar="DIR",
              help="Validation data; may repeat. [default: the val splits of the inputs]")  # fmt: skip
@output_options
def command(
    out: Path,
    inputs: tuple[str, ...],
    relative: bool,
    subflavors: tuple[str, ...],
    input_subflavors: tuple[tuple[str, str], ...],
    output: Output,
    **options: Any,
) -> None:
    """Blend several datasets into one weighted Metadataset.

    DIR is a folder that `energon-packed pack` wrote, any Energon dataset of packs, or another Metadataset. Where one
    has a WEIGHT, the others weigh 1.

    \b
    energon-packed metadataset mix.yaml out/node_a out/node_b
    energon-packed metadataset mix.yaml out/node_a=3 out/node_b=0.5 --val out/held_out
    """
    own: dict[str | Path, dict[str, Subflavor]] = {}
    for path, given in input_subflavors:
        own.setdefault(path, {}).update([_pair(given)])
    blend = make_blend(
        [_with_weight(given) for given in inputs],
        subflavors=dict(_pair(given) for given in subflavors),
        input_subflavors=own,
        **options,
    )
    write_metadataset(blend, out, absolute=not relative)
    output.console.print(_table(blend))
    for warning in blend.warnings():
        echo(f"note: {as_options(warning)}", err=output.as_json or output.quiet)
    output.console.print(f"{out}: get_packed_loader({str(out)!r}, encoder)", soft_wrap=True)
    output.result(_as_dict(blend, out))


def _as_dict(blend: Blend, out: Path) -> dict[str, Any]:
    return {
        "metadataset": str(out),
        "train": [
            _counts(one) | {"weight": one.weight, "weighed_by": one.weighed_by, "seen": times}
            for one, times in zip(blend.train, blend.times_seen(), strict=True)
        ],
        "val": [_counts(one) for one in blend.val],
        "epochized": blend.epochized,
        "schema": blend.schema,
        "warnings": [as_options(warning) for warning in blend.warnings()],
    }


def _table(blend: Blend) -> Table:
    total = sum(one.weight for one in blend.train)
    often = "times per epoch" if blend.epochized else "epochs per epoch of the largest input"
    table = Table(caption=f"seen: {often}")
    table.add_column("input", overflow="fold", min_width=20)
    table.add_column("split")
    for name in ("packs", "samples", "per pack", "repeated" if blend.epochized else "draws", "seen"):
        table.add_column(name, justify="right")
    rows = [
        (one, "train", f"{one.weight:g}" if blend.epochized else f"{one.weight / total:.2%}", f"{times:.2f}")
        for one, times in zip(blend.train, blend.times_seen(), strict=True)
    ]
    for one, split, share, seen in [*rows, *((one, "val", "", "1.00") for one in blend.val)]:
        counts = (f"{one.packs:,}", f"{one.samples:,}", f"{one.samples_per_pack:.2f}")
        table.add_row(str(one.path), split, *counts, share, seen)
    return table


def _counts(one: BlendInput) -> dict[str, Any]:
    return {"path": str(one.path), "split": one.split, "packs": one.packs, "samples": one.samples}


def _with_weight(given: str) -> tuple[str, float | None]:
    """`DIR=WEIGHT` in two; a folder whose name has a `=` stays whole."""
    path, equals, weight = given.rpartition("=")
    if not equals or Path(given).exists():
        return given, None
    try:
        return path, float(weight)
    except ValueError as error:
        raise ConfigError(f"weight {weight!r} of {path} is not a number") from error


def _pair(given: str) -> tuple[str, Subflavor]:
    key, equals, value = given.partition("=")
    if not equals or not key:
        raise ConfigError(f"subflavor {given!r} must have the form key=value")
    return key, _typed(value)


def _typed(text: str) -> Subflavor:
    """`true`, `false` and numbers as such; anything else is text, also a number in quotes."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if _INTEGER.fullmatch(text):
        if len(text) > _MOST_DIGITS:
            raise ConfigError(f"subflavor {text[:20]}... has {len(text)} digits; a number may have {_MOST_DIGITS}")
        return int(text)
    if _DECIMAL.fullmatch(text):
        return float(text)
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text
