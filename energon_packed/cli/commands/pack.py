"""Command `energon-packed pack`: options of the command line in, a dataset and a summary table out."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from energon_packed.cli.display import dry_run_table, result_dict, result_table, turn_text, unused_lines
from energon_packed.cli.options import (
    GroupedCommand,
    as_options,
    group_option,
    options_of,
    require,
    set_inputs,
    wrong_usage,
)
from energon_packed.cli.output import Output, output_options
from energon_packed.options import make
from energon_packed.pipeline import PackOptions, dry_run, pack
from energon_packed.pipeline.output.folder import work_folder
from energon_packed.pipeline.output.run_status import run_status
from energon_packed.shards.loading_code import RANKS, loading_code
from energon_packed.shards.steps import steps_of_ranks
from energon_packed.storage import as_path

_COMMON = ("image_root", "tokenizer", "loss_on", "processor", "max_pixels", "seq_len", "overlong", "split",
           "output_dir", "sample_class", "workers", "max_reject_rate", "overwrite", "config", "is_dry")  # fmt: skip


@click.command(cls=GroupedCommand, common=_COMMON)
@output_options
@click.argument("inputs", nargs=-1, metavar="INPUT...")
@group_option("--jsonl", multiple=True, metavar="FILE", group="Input", help="Same as INPUT.")
@options_of(PackOptions, without=["inputs"])
@group_option("--world-size", type=click.IntRange(min=1), default=1, show_default=True, group="Table",
              help="Data-parallel ranks, for the steps in the table and the code.")  # fmt: skip
@group_option("--micro-batch-size", type=click.IntRange(min=1), default=1, show_default=True, group="Table",
              help="Packs per step, for the table and the code.")  # fmt: skip
@group_option("--loader-workers", type=click.IntRange(min=0), default=2, show_default=True, group="Table",
              help="Loader workers per rank, for the table and the code.")  # fmt: skip
@group_option("--dry-run", "is_dry", is_flag=True, group="Run",
              help="Show the work of a run without writing: what it would reuse, measure and write.")  # fmt: skip
@group_option("--status", "is_status", is_flag=True, group="Run",
              help="Show the progress of the run in --output-dir; needs no other option.")  # fmt: skip
def command(
    inputs: tuple[str, ...],
    jsonl: tuple[str, ...],
    world_size: int,
    micro_batch_size: int,
    loader_workers: int,
    is_dry: bool,
    is_status: bool,
    values: dict[str, Any],
    output: Output,
) -> None:
    """Pack conversations with images, videos and audio into an Energon dataset.

    INPUT: .jsonl .ndjson .json (also .gz .zst .bz2 .xz), .parquet .arrow .feather .csv .tsv .tar files, .trans.txt of
    LibriSpeech, wav.scp of Kaldi, globs, folders, Hugging Face save_to_disk folders, names of datasets in the Hugging
    Face cache, Energon datasets or Metadatasets; several at once.

    \b
    energon-packed pack data.jsonl -o out --seq-len 4096 --tokenizer DIR
    energon-packed pack 'part-*.parquet' -o out --seq-len 8192 --tokenizer DIR --workers 16 \\
        --sample-class PackedTokensSample --split train=0.98,val=0.02
    energon-packed pack --config pack.yaml

    \b
    out/webdataset/      the dataset: tars and .nv-meta, ready for Energon
    out/lengths.parquet  length and status of every record
    out/rejects.jsonl    every rejected record, with the reason
    out/media/           with --media reference: images that are in no file of the input
    """
    # --status reads an output folder, so the inputs are not needed.
    if is_status:
        if values.get("output_dir") is None:
            raise click.UsageError("--status needs '--output-dir'.")
        show_status(as_path(str(values["output_dir"])), output, values.get("work_dir"))
        return
    set_inputs(values, (*inputs, *jsonl))
    require(values, "output_dir", "seq_len", "tokenizer")
    with wrong_usage():
        options = make(PackOptions, values, what="option")
        work_folder(options.output_dir, options.work_dir)  # refuses a `work_dir` that has no use
    if is_dry:
        show_dry_run(options, output)
        return
    ranks = {"world_size": world_size, "micro_batch_size": micro_batch_size, "num_workers": loader_workers}
    show_run(options, ranks=ranks, output=output)


def show_status(output_dir: Path, output: Output, work_dir: str | None = None) -> None:
    """Print the progress of the runs in an output folder: one line for each input part."""
    statuses = run_status(output_dir, None if work_dir is None else Path(work_dir))
    for status in statuses:
        details = [f"{status.measured:,} records measured"] if status.measured else []
        details += [f"{status.shards:,} shards written"] if status.shards else []
        details += [f"{status.packs:,} packs of seq_len {status.seq_len:,}"] if status.packs is not None else []
        details += [f"utilization {status.utilization:.2%}"] if status.utilization is not None else []
        state = "done" if status.stage == "done" else "not finished" if details else "no run found"
        state = f"running ({status.running})" if status.running else state
        output.console.print(f"{status.output_dir}: {'; '.join([state, *details])}", soft_wrap=True)
    output.result({"status": [asdict(status) for status in statuses]})


def show_dry_run(options: PackOptions, output: Output) -> None:
    """Print what a run would measure, reuse, plan and write."""
    result = dry_run(options)
    output.console.print(dry_run_table(result))
    if result.reject_summary:
        output.console.print(f"rejected: {as_options(result.reject_summary)}", soft_wrap=True)
    for line in unused_lines(result):
        output.console.print(line, soft_wrap=True)
    if result.example:
        output.console.print("the first record that would be packed:", soft_wrap=True)
    for role, text in result.example:
        output.console.print(turn_text(role, text), soft_wrap=True)
    output.console.print("dry run: no files were written", soft_wrap=True)
    output.result(asdict(result) | {"output_dir": str(options.output_dir)})


def show_run(options: PackOptions, *, ranks: Mapping[str, int] = RANKS, output: Output | None = None) -> None:
    """Pack with a progress bar per stage, and print the summary table.

    Args:
        options: options of `pack`.
        ranks: `world_size`, `micro_batch_size` and `num_workers`, for the steps in the table and the code.
        output: verbosity and destination of the output.
    """
    output = output or Output()
    console = output.console
    progress = output.progress()
    try:
        result = pack(options, progress=progress)
    finally:
        # Also after an error or Ctrl-C: a running bar would overwrite the error message.
        progress.stop()
    manifest, steps = result.manifest, None
    if manifest.algorithm != "none":  # on-the-fly packing decides the steps of single samples
        # Of the rank with the most: with the default `epoch_end`, the other ranks repeat a row without targets.
        layout: Any = ranks
        steps = max(steps_of_ranks([(manifest.packs_in("train"), 1)], **layout))
    console.print(f"\n{manifest.sample_class} in {result.shards}", soft_wrap=True)
    console.print(result_table(result, steps, ranks))
    if manifest.rejects:
        console.print(f"rejected records, with reasons: {result.rejects}", soft_wrap=True)
    if code := loading_code(manifest, result.shards, ranks=ranks):
        console.print("\nload it in Python:")
        console.print("\n".join(code), soft_wrap=True)
    output.result(result_dict(result, steps))
