"""`energon-packed pack`."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from energon_packed.cli.display import dry_run_table, result_dict, result_table, turn_text, unread_lines
from energon_packed.cli.options import DeclaredOption, GroupedCommand, as_options, collect, options_of
from energon_packed.cli.output import Output, output_options
from energon_packed.options import make
from energon_packed.pipeline import PackOptions, dry_run, pack
from energon_packed.pipeline.run import run_status
from energon_packed.shards.steps import steps_of_ranks

_PLACE = {"world_size": 1, "micro_batch_size": 1, "num_workers": 2}


@click.command(cls=GroupedCommand)
@click.argument("inputs", nargs=-1, metavar="INPUT...")
@click.option("--jsonl", multiple=True, metavar="FILE", cls=DeclaredOption, group="Input", help="Same as INPUT.")
@options_of(PackOptions, without=["inputs"])
@click.option("--world-size", type=click.IntRange(min=1), default=1, show_default=True, cls=DeclaredOption,
              group="Table", help="Ranks, for the steps in the table.")  # fmt: skip
@click.option("--micro-batch-size", type=click.IntRange(min=1), default=1, show_default=True, cls=DeclaredOption,
              group="Table", help="Packs in a step, for the table.")  # fmt: skip
@click.option("--loader-workers", type=click.IntRange(min=0), default=2, show_default=True, cls=DeclaredOption,
              group="Table", help="Loader workers, for the table.")  # fmt: skip
@click.option("--dry-run", "is_dry", is_flag=True, cls=DeclaredOption, group="Run",
              help="Tell what would be measured, reused, planned and written, and write nothing.")  # fmt: skip
@click.option("--status", "is_status", is_flag=True, cls=DeclaredOption, group="Run",
              help="Tell how far the run in --output-dir is; no other option is needed.")  # fmt: skip
@output_options
def command(
    inputs: tuple[str, ...], jsonl: tuple[str, ...], is_dry: bool, is_status: bool, output: Output, **given: Any
) -> None:
    """Pack conversations with images into an Energon dataset.

    INPUT: .jsonl .jsonl.gz .jsonl.zst .json .parquet .arrow .feather .csv files, globs, or Hugging Face
    save_to_disk folders; several at once.

    \b
    energon-packed pack data.jsonl -o out --seq-len 4096 --tokenizer DIR
    energon-packed pack 'part-*.parquet' -o out --seq-len 8192 --tokenizer DIR --workers 16 \\
        --sample-class PackedTokensSample --split train=0.98,val=0.02
    energon-packed pack --config pack.yaml

    \b
    out/webdataset/      the dataset: tars and .nv-meta, ready for Energon
    out/lengths.parquet  one row per record
    out/rejects.jsonl    every rejected record, with the reason
    """
    place = {name: given.pop(name) for name in ("world_size", "micro_batch_size")}
    place["num_workers"] = given.pop("loader_workers")
    values = collect(given, PackOptions)
    if is_status:
        if values.get("output_dir") is None:
            raise click.UsageError("--status needs '--output-dir'.")
        show_status(Path(values["output_dir"]), output)
        return
    if inputs or jsonl:
        values |= {"inputs": (*inputs, *jsonl), "sources": ()}  # the command line wins over the config file
    if not values.get("inputs") and not values.get("sources"):
        raise click.UsageError("give at least one INPUT (or --jsonl FILE)")
    for name in ("output_dir", "seq_len", "tokenizer"):
        if values.get(name) is None:
            raise click.UsageError(f"Missing option '--{name.replace('_', '-')}' (or `{name}` in --config).")
    if is_dry:
        show_dry_run(make(PackOptions, values, what="option"), output)
        return
    show_run(make(PackOptions, values, what="option"), place=place, output=output)


def show_status(output_dir: Path, output: Output) -> None:
    """Print the state of an output folder, a line for each part."""
    found = run_status(output_dir)
    for one in found:
        parts = [f"{one.measured:,} records measured"] if one.measured else []
        parts += [f"{one.shards:,} shards written"] if one.shards else []
        parts += [f"{one.packs:,} packs of seq_len {one.seq_len:,}"] if one.packs is not None else []
        parts += [f"utilization {one.utilization:.2%}"] if one.utilization is not None else []
        state = "done" if one.stage == "done" else "not finished" if parts else "nothing there"
        state = f"running ({one.running})" if one.running else state
        output.console.print(f"{one.output_dir}: {'; '.join([state, *parts])}", soft_wrap=True)
    output.result({"status": [asdict(one) for one in found]})


def show_dry_run(options: PackOptions, output: Output) -> None:
    """Print what a run would do."""
    found = dry_run(options)
    output.console.print(dry_run_table(found))
    if found.reject_summary:
        output.console.print(f"rejected: {as_options(found.reject_summary)}", soft_wrap=True)
    for line in unread_lines(found):
        output.console.print(line, soft_wrap=True)
    if found.example:
        output.console.print("the first record that would be packed:", soft_wrap=True)
    for role, text in found.example:
        output.console.print(turn_text(role, text), soft_wrap=True)
    output.console.print("dry run: nothing is written", soft_wrap=True)
    output.result(asdict(found) | {"output_dir": str(options.output_dir)})


def show_run(options: PackOptions, *, place: Mapping[str, Any] = _PLACE, output: Output | None = None) -> None:
    """Pack with a bar per stage, and print the table.

    Args:
        options: of the run.
        place: `world_size`, `micro_batch_size` and `num_workers`, for the steps in the table.
        output: where it is printed.
    """
    output = output or Output()
    console = output.console
    progress = output.progress()
    try:
        result = pack(options, progress=progress)
    finally:
        progress.stop()
    manifest, steps = result.manifest, []
    if manifest.algorithm != "none":  # otherwise packing on the fly decides the steps
        steps = steps_of_ranks([(manifest.packs_in("train"), 1)], **place)
    console.print(f"\n{manifest.sample_class} in {result.shards}", soft_wrap=True)
    console.print(result_table(result, steps, place))
    if manifest.rejects:
        console.print(f"rejected records, with reasons: {result.rejects}", soft_wrap=True)
    output.result(result_dict(result, steps))
