"""Command `energon-packed materialize`: a dataset with references to images in, a self-contained dataset out."""

from pathlib import Path

import click

from energon_packed.cli.options import GroupedCommand, InputPath, media_root_option
from energon_packed.cli.output import Output, output_options
from energon_packed.files import format_bytes
from energon_packed.pipeline.media.materialize import materialize
from energon_packed.system import available_cores


@click.command(name="materialize", cls=GroupedCommand)
@click.argument("folder", type=InputPath(), metavar="DIR")
@click.option("-o", "--output-dir", type=InputPath(file_okay=False), required=True, metavar="NEW_DIR",
              help="New folder for the dataset.")  # fmt: skip
@click.option("--workers", type=click.IntRange(min=0), default=0, help="Number of processes. [default: all cores]")
@media_root_option
@output_options
def command(folder: Path, output_dir: Path, workers: int, output: Output) -> None:
    """Write a dataset of pack --media reference as a dataset with the images and videos in its tars.

    The result equals the dataset of pack --media copy. Every digest is compared: a changed, moved or missing file
    stops the command. NEW_DIR appears when it is complete.

    \b
    energon-packed materialize out -o out-copied
    """
    manifest = materialize(folder, output_dir, workers=workers or available_cores(), progress=output.progress())
    size = sum(shard.bytes for shard in manifest.shards)
    output.console.print(
        f"{output_dir}: {len(manifest.shards):,} shards, {manifest.images:,} images, {format_bytes(size)}",
        soft_wrap=True,
    )
    output.result(
        {"folder": str(output_dir), "shards": len(manifest.shards), "images": manifest.images, "bytes": size}
    )
