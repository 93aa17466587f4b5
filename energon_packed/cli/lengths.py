"""`energon-packed lengths`."""

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from energon_packed.cli.display import unread_lines
from energon_packed.cli.options import MESSAGES, DeclaredOption, GroupedCommand, as_options, collect, options_of
from energon_packed.cli.output import Output
from energon_packed.inspection.lengths import Candidate, compare, histogram, percentiles, recommend
from energon_packed.options import make
from energon_packed.pipeline.survey import LengthsOptions, Survey, parse_seq_lens, survey_lengths

_NUMBER = re.compile(r"[0-9.]+k?", re.IGNORECASE)


@click.command(name="lengths", cls=GroupedCommand)
@click.argument("inputs", nargs=-1, metavar="INPUT...")
@click.option("--jsonl", multiple=True, metavar="FILE", cls=DeclaredOption, group="Input", help="Same as INPUT.")
@click.option("--seq-len", "seq_lens", multiple=True, metavar="N [N...]", cls=DeclaredOption, group="Packing",
              help="Candidates. [default: 2048 4096 8192 16384 32768]")  # fmt: skip
@options_of(LengthsOptions, without=["inputs", "seq_lens"])
@click.option("--json", "as_json", is_flag=True, cls=DeclaredOption, group=MESSAGES, help="Print JSON.")
def command(
    inputs: tuple[str, ...], jsonl: tuple[str, ...], seq_lens: tuple[str, ...], as_json: bool, **given: Any
) -> None:
    """Show sample lengths, and what each --seq-len would drop, waste and cost.

    It takes the input options of pack; with --output-dir, pack into the same folder reuses the measurements.

    \b
    energon-packed lengths data.jsonl --tokenizer DIR --seq-len 2048 4096 8192
    energon-packed lengths data.jsonl --tokenizer DIR --sample 20000
    """
    values = collect(given, LengthsOptions)
    files, candidates = _split((*inputs, *jsonl), seq_lens)
    values |= {"inputs": files, "sources": ()} if files else {}  # the command line wins over the config file
    values |= {"seq_lens": candidates} if candidates else {}
    if not values.get("inputs") and not values.get("sources"):
        raise click.UsageError("give at least one INPUT (or --jsonl FILE)")
    if values.get("tokenizer") is None:
        raise click.UsageError("Missing option '--tokenizer'.")
    output = Output(as_json=as_json)
    progress = output.progress()
    try:
        with output.logs():
            options = make(LengthsOptions, values, what="option")
            survey = survey_lengths(options, progress)
    finally:
        progress.stop()
    compared = compare(
        survey.lengths,
        options.seq_lens,
        records=survey.records,
        algorithm=options.algorithm,
        max_samples=options.max_samples_per_pack,
        multiple=options.pad_multiple,
    )
    best, reason = recommend(compared, survey.lengths)
    output.result(_as_dict(survey, compared, best, reason))
    console = output.console
    _show(console, survey, compared)
    if survey.rejects:
        remedy = f"; {survey.advice}" if survey.advice else ""
        console.print(f"rejected: {as_options(survey.reject_summary + remedy)}", soft_wrap=True)
    for line in unread_lines(survey):
        console.print(line, soft_wrap=True)
    if options.output is not None:
        console.print(f"{options.output}: NAME:LENGTH of {len(survey.lengths):,} records", soft_wrap=True)
    console.print(f"recommended: --seq-len {best.seq_len}: {as_options(reason)}", soft_wrap=True)


def _split(inputs: tuple[str, ...], seq_lens: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Numbers after `--seq-len N` come as inputs: `--seq-len 2048 4096 data.jsonl` has one."""
    numbers = [given for given in inputs if _NUMBER.fullmatch(given) and not Path(given).exists()] if seq_lens else []
    candidates = parse_seq_lens(" ".join((*seq_lens, *numbers)))
    return tuple(one for one in inputs if one not in numbers), candidates


def _as_dict(survey: Survey, compared: list[Candidate], best: Candidate, reason: str) -> dict[str, Any]:
    return {
        "records": survey.records,
        "is_sample": survey.is_sample,
        "rejects": survey.rejects,
        "reject_summary": survey.reject_summary,
        "unused_fields": dict(survey.unused_fields),
        "notes": dict(survey.notes),
        "percentiles": {f"{percent:g}": length for percent, length in percentiles(survey.lengths).items()},
        "candidates": [asdict(one) for one in compared],
        "recommended": best.seq_len,
        "reason": reason,
    }


def _show(console: Console, survey: Survey, compared: list[Candidate]) -> None:
    rejected = sum(survey.rejects.values())
    what = "a sample of the records" if survey.is_sample else "all records"
    tokens = int(survey.lengths.sum(dtype="int64"))
    console.print(
        f"{survey.records:,} records ({what}), {rejected:,} rejected"
        + (f" ({', '.join(f'{name} {count:,}' for name, count in survey.rejects.items())})" if rejected else "")
        + f"; {tokens:,} tokens\n",
        soft_wrap=True,
    )
    largest = max(count for _, _, count in bins) if (bins := histogram(survey.lengths)) else 1
    for first, last, count in bins:
        bar = "█" * round(40 * count / largest) or ("▏" if count else "")
        console.print(f"{first:>9,} .. {last:<9,} {count:>10,} {bar}")
    line = "  ".join(f"{percent:g}%: {length:,}" for percent, length in percentiles(survey.lengths).items())
    console.print(f"\nlength percentiles  {line}\n", soft_wrap=True)
    table = Table("seq_len")
    for name in (
        "records\ndropped",
        "tokens\ndropped",
        "packs",
        "utilization",
        "samples\nper pack",
        "mean attention\nspan (tokens)",
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
