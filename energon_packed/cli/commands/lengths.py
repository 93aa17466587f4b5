"""Command `energon-packed lengths`: records in, a table of candidate values of --seq-len out."""

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from energon_packed.cli.display import unused_lines
from energon_packed.cli.options import (
    MESSAGES,
    GroupedCommand,
    as_options,
    group_option,
    options_of,
    require,
    set_inputs,
    wrong_usage,
)
from energon_packed.cli.output import Output
from energon_packed.inspection.lengths import Candidate, compare, histogram, percentiles, recommend
from energon_packed.options import make
from energon_packed.pipeline.rejects import main_reason
from energon_packed.pipeline.survey import LengthsOptions, Survey, survey_lengths

_COLUMNS = {  # attribute of a Candidate and its format, by title
    "seq_len": ("seq_len", ","),
    "records\ndropped": ("dropped_records", ".2%"),
    "tokens\ndropped": ("dropped_tokens", ".2%"),
    "packs": ("packs", ","),
    "utilization": ("utilization", ".2%"),
    "samples\nper pack": ("samples_per_pack", ".2f"),
    "mean attention\nspan (tokens)": ("attention", ",.0f"),
}
_NUMBER = re.compile(r"[0-9.]+k?", re.IGNORECASE)


_COMMON = ("image_root", "tokenizer", "processor", "max_pixels", "seq_lens", "sample", "output_dir", "output",
           "workers", "config")  # fmt: skip


@click.command(name="lengths", cls=GroupedCommand, common=_COMMON)
@click.argument("inputs", nargs=-1, metavar="INPUT...")
@group_option("--jsonl", multiple=True, metavar="FILE", group="Input", help="Same as INPUT.")
@group_option("--seq-len", "seq_lens", multiple=True, metavar="N [N...]", group="Packing",
              help="Candidate values. [default: 2048 4096 8192 16384 32768]")  # fmt: skip
@options_of(LengthsOptions, without=["inputs", "seq_lens"])
@group_option("--json", "as_json", is_flag=True, group=MESSAGES, help="Print JSON.")
def command(
    inputs: tuple[str, ...], jsonl: tuple[str, ...], seq_lens: tuple[str, ...], as_json: bool, values: dict[str, Any]
) -> None:
    """Show sample lengths, and the dropped tokens, utilization and attention span of each --seq-len.

    The input options are the same as for pack. With --output-dir, pack into the same folder reuses the measurements.

    \b
    energon-packed lengths data.jsonl --tokenizer DIR --seq-len 2048 4096 8192
    energon-packed lengths data.jsonl --tokenizer DIR --sample 20000
    """
    files, candidates = _split((*inputs, *jsonl), seq_lens)
    set_inputs(values, files)
    require(values, "tokenizer")
    values |= {"seq_lens": candidates} if candidates else {}
    output = Output(as_json=as_json)
    progress = output.progress()
    try:
        with output.logs():
            with wrong_usage():
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
    output.result(
        {
            "records": survey.records,
            "is_sample": survey.is_sample,
            "rejects": survey.rejects,
            "reject_summary": survey.reject_summary,
            "unused_fields": dict(survey.unused_fields),
            "notes": dict(survey.notes),
            "videos": survey.videos,
            "frames": survey.frames,
            **({"audios": survey.audios, "audio_seconds": survey.audio_seconds} if survey.audio_seconds else {}),
            "ignored_entries": [asdict(entries) for entries in survey.ignored_entries],
            "percentiles": {f"{percent:g}": length for percent, length in percentiles(survey.lengths).items()},
            "candidates": [asdict(candidate) for candidate in compared],
            "recommended": best.seq_len,
            "reason": reason,
        }
    )
    console = output.console
    _show(console, survey, compared)
    if survey.rejects:
        console.print(f"rejected: {as_options(survey.reject_summary)}", soft_wrap=True)
        remedy = f"{main_reason(survey.rejects)}: {survey.advice}; " if survey.advice else ""
        console.print(as_options(f"{remedy}pack lists all rejected records in rejects.jsonl"), soft_wrap=True)
    for line in unused_lines(survey):
        console.print(line, soft_wrap=True)
    if options.output is not None:
        console.print(f"{options.output}: NAME:LENGTH of {len(survey.lengths):,} records", soft_wrap=True)
    console.print(f"recommended: --seq-len {best.seq_len}: {as_options(reason)}", soft_wrap=True)


def _split(inputs: tuple[str, ...], seq_lens: tuple[str, ...]) -> tuple[tuple[str, ...], str]:
    """Separate the inputs from the candidates: click passes 4096 of `--seq-len 2048 4096 data.jsonl` as an input."""
    # A file whose name is a number stays an input.
    numbers = [name for name in inputs if _NUMBER.fullmatch(name) and not Path(name).exists()] if seq_lens else []
    return tuple(name for name in inputs if name not in numbers), " ".join((*seq_lens, *numbers))


def _show(console: Console, survey: Survey, compared: list[Candidate]) -> None:
    rejected = sum(survey.rejects.values())
    scope = "a sample of the records" if survey.is_sample else "all records"
    tokens = int(survey.lengths.sum(dtype="int64"))
    console.print(
        f"{survey.records:,} records ({scope}), {rejected:,} rejected"
        + (f" ({', '.join(f'{name} {count:,}' for name, count in survey.rejects.items())})" if rejected else "")
        + f"; {tokens:,} tokens"
        + (f"; {survey.videos:,} videos with {survey.frames:,} selected frames" if survey.videos else "")
        + (
            f"; {survey.audios:,} audio files, {survey.audio_seconds / 3600:,.2f} hours of audio"
            if survey.audio_seconds
            else ""
        )
        + "\n",
        soft_wrap=True,
    )
    # Bars are scaled to 40 characters; a bin that is not empty has at least a thin bar.
    largest = max(count for _, _, count in bins) if (bins := histogram(survey.lengths)) else 1
    for first, last, count in bins:
        bar = "█" * round(40 * count / largest) or ("▏" if count else "")
        console.print(f"{first:>9,} .. {last:<9,} {count:>10,} {bar}")
    line = "  ".join(f"{percent:g}%: {length:,}" for percent, length in percentiles(survey.lengths).items())
    console.print(f"\nlength percentiles  {line}\n", soft_wrap=True)
    table = Table("seq_len")
    for title in list(_COLUMNS)[1:]:
        table.add_column(title, justify="right")
    for candidate in compared:
        table.add_row(*(format(getattr(candidate, name), spec) for name, spec in _COLUMNS.values()))
    console.print(table)
