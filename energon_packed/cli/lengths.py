"""`energon-packed lengths`."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import orjson
from rich.console import Console
from rich.table import Table

from energon_packed.build.options import EncoderOptions, known_algorithms
from energon_packed.build.survey import Survey, survey_lengths
from energon_packed.cli.display import TerminalProgress
from energon_packed.encoding.rendering import LOSS_ON
from energon_packed.errors import ConfigError
from energon_packed.inspection.lengths import Candidate, compare, histogram, percentiles, recommend
from energon_packed.packing import check_algorithm
from energon_packed.shards.layouts import LAYOUTS

_FOLDER = click.Path(path_type=Path, file_okay=False)
_DRAWN = (".png", ".svg", ".pdf", ".jpg")
_DEFAULT = (2048, 4096, 8192, 16384, 32768)


@click.command(name="lengths")
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@click.option("--tokenizer", required=True, type=_FOLDER, help="Folder with tokenizer.json and a chat template.")
@click.option("--seq-len", "seq_lens", multiple=True, metavar="N [N...]",
              help="Candidates. [default: 2048 4096 8192 16384 32768]")  # fmt: skip
@click.option(
    "--sample", type=click.IntRange(min=1), metavar="N", help="Look at about N records, from all over the input."
)
@click.option("--processor", type=_FOLDER, help="Folder with preprocessor_config.json. [default: --tokenizer]")
@click.option("--image-processor", metavar="NAME", help="Image processor by name, such as Qwen2_5_VLProcessor.")
@click.option("--factor", type=int, help="Pixels per token side: patch size times merge size.")
@click.option("--min-pixels", type=int, help="Least pixels of a resized image.")
@click.option("--max-pixels", type=int, help="Most pixels of a resized image.")
@click.option("--image-root", type=_FOLDER, help="Folder that image paths start from and must stay in.")
@click.option("--sample-class", type=click.Choice(list(LAYOUTS)), default="PackedCaptioningSample", show_default=True,
              help="Flavor that would be written.")  # fmt: skip
@click.option("--loss-on", type=click.Choice(LOSS_ON), default="assistant", show_default=True,
              help="Supervised text: samples without any are left out.")  # fmt: skip
@click.option("--algorithm", default="bfd", show_default=True, help=f"Planner: {known_algorithms()}.")
@click.option("--max-samples-per-pack", type=click.IntRange(min=1), help="Most samples in a row.")
@click.option("--pad-multiple", type=click.IntRange(min=1), default=1, show_default=True,
              help="Round each sample up to a multiple of this many tokens.")  # fmt: skip
@click.option("--workers", type=click.IntRange(min=0), default=0, help="Processes. [default: all cores]")
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE.png", help="Draw a histogram.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(inputs: tuple[str, ...], seq_lens: tuple[str, ...], **options: Any) -> None:
    """Show how long samples are, and what each --seq-len would drop, waste and cost.

    \b
    energon-packed lengths data.jsonl --tokenizer DIR --seq-len 2048 4096 8192
    energon-packed lengths data.jsonl --tokenizer DIR --sample 20000 --plot lengths.png
    """
    inputs, candidates = _split(inputs, seq_lens)
    _check_plot(options["plot"])
    check_algorithm(options["algorithm"])
    console = Console(stderr=options["as_json"], highlight=False)
    progress = TerminalProgress(console)
    names = ("tokenizer", "processor", "image_processor", "factor", "min_pixels", "max_pixels", "loss_on")
    try:
        survey = survey_lengths(
            inputs,
            EncoderOptions(**{name: options[name] for name in names}),
            image_root=options["image_root"],
            sample_class=options["sample_class"],
            processes=options["workers"] or len(os.sched_getaffinity(0)),
            sample=options["sample"],
            progress=progress,
        )
    finally:
        progress.stop()
    compared = compare(
        survey.lengths,
        candidates,
        records=survey.records,
        algorithm=options["algorithm"],
        max_samples=options["max_samples_per_pack"],
        multiple=options["pad_multiple"],
    )
    best, reason = recommend(compared, survey.lengths)
    if options["plot"] is not None:
        _plot(options["plot"], survey, candidates)
    if options["as_json"]:
        value = {
            "records": survey.records,
            "is_sample": survey.is_sample,
            "rejects": survey.rejects,
            "percentiles": {f"{percent:g}": length for percent, length in percentiles(survey.lengths).items()},
            "candidates": [asdict(one) for one in compared],
            "recommended": best.seq_len,
            "reason": reason,
        }
        click.echo(orjson.dumps(value, option=orjson.OPT_INDENT_2))
        return
    _show(console, survey, compared)
    console.print(f"take --seq-len {best.seq_len}: {reason}", soft_wrap=True)


def _split(inputs: tuple[str, ...], seq_lens: tuple[str, ...]) -> tuple[tuple[str, ...], list[int]]:
    """Numbers after `--seq-len N` come as inputs: `--seq-len 2048 4096 data.jsonl` has one."""
    numbers = [given for given in inputs if given.isdigit() and not Path(given).exists()] if seq_lens else []
    given = [part for text in seq_lens for part in text.split(",")]
    try:
        candidates = [int(text) for text in (*given, *numbers)] or list(_DEFAULT)
    except ValueError as error:
        raise ConfigError(f"--seq-len {', '.join(seq_lens)} must be whole numbers") from error
    files = tuple(one for one in inputs if one not in numbers)
    if not files:
        raise click.UsageError("give at least one INPUT")
    return files, candidates


def _show(console: Console, survey: Survey, compared: list[Candidate]) -> None:
    rejected = sum(survey.rejects.values())
    what = "a sample of the records" if survey.is_sample else "all records"
    tokens = int(survey.lengths.sum(dtype="int64"))
    console.print(
        f"{survey.records:,} records ({what}), {rejected:,} of them cannot be packed"
        + (f" ({', '.join(f'{name} {count:,}' for name, count in survey.rejects.items())})" if rejected else "")
        + f"; {tokens:,} tokens\n",
        soft_wrap=True,
    )
    most = max(count for _, _, count in bins) if (bins := histogram(survey.lengths)) else 1
    for first, last, count in bins:
        bar = "█" * round(40 * count / most) or ("▏" if count else "")
        console.print(f"{first:>9,} .. {last:<9,} {count:>10,} {bar}")
    line = "  ".join(f"{percent:g}%: {length:,}" for percent, length in percentiles(survey.lengths).items())
    console.print(f"\ntokens at most  {line}\n", soft_wrap=True)
    table = Table("seq_len")
    for name in (
        "records\ndropped",
        "tokens\ndropped",
        "packs",
        "utilization",
        "samples\nper pack",
        "looks back\non tokens",
    ):
        table.add_column(name, justify="right")
    for one in compared:
        table.add_row(
            f"{one.seq_len:,}",
            f"{one.dropped_records:.2%}",
            f"{one.dropped_tokens:.2%}",
            f"{one.packs:,}",
            f"{one.utilization:.2%}",
            f"{one.samples_per_pack:.2f}",
            f"{one.attention:,.0f}",
        )
    console.print(table)


def _check_plot(path: Path | None) -> None:
    """Before anything is measured."""
    if path is None:
        return
    if path.suffix.lower() not in _DRAWN:
        raise ConfigError(f"--plot {path} must end in {', '.join(_DRAWN)}")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no folder {path.absolute().parent}")


def _plot(path: Path, survey: Survey, candidates: list[int]) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib; run pip install 'energon-packed[report]'") from error
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    bins = histogram(survey.lengths, 60)
    axes.stairs([count for _, _, count in bins], [bins[0][0], *(last + 1 for _, last, _ in bins)], fill=True)
    axes.set(xscale="log", xlabel="tokens", ylabel="samples")
    for seq_len in candidates:
        axes.axvline(seq_len, color="black", linestyle=":")
        axes.annotate(
            f"{seq_len:,}", (seq_len, 1), xycoords=("data", "axes fraction"), rotation=90, va="top", ha="right"
        )
    figure.savefig(path, dpi=150)
