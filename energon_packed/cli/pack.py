"""`energon-packed pack`."""

from pathlib import Path
from typing import Any

import click
from rich.console import Console

from energon_packed.build import PackOptions, pack
from energon_packed.build.options import EncoderOptions, known_algorithms, parse_part, parse_split
from energon_packed.cli.display import TerminalProgress, result_table
from energon_packed.cli.parameters import ByteSize
from energon_packed.shards.layouts import LAYOUTS

_FOLDER = click.Path(path_type=Path, file_okay=False)


@click.command()
@click.argument("inputs", nargs=-1, metavar="INPUT...")
@click.option("--jsonl", multiple=True, metavar="FILE", help="Same as INPUT.")
@click.option("--output-dir", "-o", required=True, type=_FOLDER, help="Folder for the data set and its reports.")
@click.option("--seq-len", required=True, type=int, help="Tokens in one row.")
@click.option("--tokenizer", required=True, type=_FOLDER, help="Folder with tokenizer.json and a chat template.")
@click.option("--processor", type=_FOLDER, help="Folder with preprocessor_config.json. [default: --tokenizer]")
@click.option("--image-processor", metavar="NAME", help="Image processor by name, such as Qwen2_5_VLProcessor.")
@click.option("--factor", type=int, help="Pixels per token side: patch size times merge size.")
@click.option("--min-pixels", type=int, help="Least pixels of a resized image.")
@click.option("--max-pixels", type=int, help="Most pixels of a resized image.")
@click.option("--image-root", type=_FOLDER, help="Folder that image paths start from and must stay in. "
              "[default: the folder of each input]")  # fmt: skip
@click.option("--no-npy", is_flag=True, help="Ignore patch_positions in the records.")
@click.option("--sample-class", type=click.Choice(list(LAYOUTS)), default="PackedCaptioningSample", show_default=True,
              help="Flavor to write.")  # fmt: skip
@click.option("--shard-prefix", default="pack", show_default=True, help="Start of shard names and keys.")
@click.option("--max-samples-per-pack", type=int, help="Most samples in one pack.")
@click.option("--max-packs-per-shard", type=int, default=1000, show_default=True, help="Most packs in one shard.")
@click.option("--max-shard-size", type=ByteSize(), default="1G", show_default=True, help="Most bytes in one shard.")
@click.option("--algorithm", default="bfd", show_default=True, help=f"Planner: {known_algorithms()}.")
@click.option("--group-by", type=click.Choice(["none", "media"]), default="none", show_default=True,
              help="media: text, image and video samples in packs of their own.")  # fmt: skip
@click.option("--pad-multiple", type=int, default=1, show_default=True,
              help="Plan each sample rounded up to a multiple of this (context parallelism: 2 * cp).")  # fmt: skip
@click.option("--overlong", type=click.Choice(["drop", "error", "truncate"]), default="drop", show_default=True,
              help="Samples longer than a row.")  # fmt: skip
@click.option("--loss-on", type=click.Choice(["assistant", "last", "all"]), default="assistant", show_default=True,
              help="Text that is supervised: all assistant turns, the last one, everything.")  # fmt: skip
@click.option("--split", default="train=1", show_default=True, help="Shares, such as train=0.98,val=0.02.")
@click.option("--seed", type=int, default=0, show_default=True, help="Order of the packs.")
@click.option("--workers", type=int, default=0, help="Processes. [default: all cores]")
@click.option("--engine", type=click.Choice(["local", "ray"]), default="local", show_default=True,
              help="Where tasks run: processes of this machine, or a Ray cluster.")  # fmt: skip
@click.option("--ray-address", help="Address of the Ray cluster. [default: the running one, else one on this machine]")
@click.option("--part", metavar="I/N|auto",
              help="Pack the I-th of N parts of the input alone; auto takes both from SLURM.")  # fmt: skip
@click.option("--max-reject-rate", type=float, default=0.05, show_default=True,
              help="Stop before writing when a larger share of the records is left out.")  # fmt: skip
@click.option("--strict", is_flag=True, help="Stop at the first record that is left out.")
@click.option("--resume/--no-resume", default=True, show_default=True, help="Take up what an earlier run has done.")
@click.option("--overwrite", is_flag=True, help="Replace shards of another build in the output folder.")
@click.option(
    "--world-size", type=click.IntRange(min=1), default=1, show_default=True, help="Ranks, for the steps in the table."
)
@click.option(
    "--micro-batch-size", type=click.IntRange(min=1), default=1, show_default=True, help="Packs a step, for the table."
)
@click.option(
    "--loader-workers", type=click.IntRange(min=0), default=2, show_default=True, help="Loader workers, for the table."
)
def command(**options: Any) -> None:
    """Pack conversations with images into an Energon data set.

    INPUT: .jsonl .jsonl.gz .jsonl.zst .json .parquet .arrow .feather .csv files, globs, or Hugging Face
    save_to_disk folders; several at once.

    \b
    energon-packed pack data.jsonl -o out --seq-len 4096 --tokenizer DIR
    energon-packed pack 'part-*.parquet' -o out --seq-len 8192 --tokenizer DIR --workers 16 \\
        --sample-class PackedTokensSample --split train=0.98,val=0.02

    \b
    out/webdataset/      the data set: tars and .nv-meta, ready for Energon
    out/lengths.parquet  one row per record
    out/rejects.jsonl    every record left out, with the reason
    """
    inputs = (*options["inputs"], *options["jsonl"])
    if not inputs:
        raise click.UsageError("give at least one INPUT (or --jsonl FILE)")
    build = PackOptions(
        inputs=inputs,
        encoder=EncoderOptions(
            tokenizer=options["tokenizer"],
            **{
                name: options[name]
                for name in ("processor", "image_processor", "factor", "min_pixels", "max_pixels", "loss_on")
            },
        ),
        use_patch_positions=not options["no_npy"],
        max_shard_bytes=options["max_shard_size"],
        split=parse_split(options["split"]),
        part=parse_part(options["part"]) if options["part"] else None,
        **{
            name: options[name]
            for name in (
                "output_dir",
                "seq_len",
                "image_root",
                "sample_class",
                "shard_prefix",
                "max_samples_per_pack",
                "max_packs_per_shard",
                "algorithm",
                "group_by",
                "pad_multiple",
                "overlong",
                "seed",
                "workers",
                "engine",
                "ray_address",
                "max_reject_rate",
                "strict",
                "resume",
                "overwrite",
            )
        },
    )
    show_build(build, options["world_size"], options["micro_batch_size"], options["loader_workers"])


def show_build(options: PackOptions, world_size: int = 1, micro_batch_size: int = 1, num_workers: int = 2) -> None:
    """Run a build with a bar per stage, and print its table."""
    console = Console(markup=False)
    progress = TerminalProgress(console)
    try:
        result = pack(options, progress)
    finally:
        progress.stop()
    console.print(f"\n{result.manifest.sample_class} in {result.shards}", highlight=False, soft_wrap=True)
    console.print(
        result_table(result, world_size=world_size, micro_batch_size=micro_batch_size, num_workers=num_workers)
    )
    if result.manifest.rejects:
        console.print(f"left out, with reasons: {result.rejects}", highlight=False, soft_wrap=True)
