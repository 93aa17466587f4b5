"""Command `energon-packed nv-meta`: a folder of tars in, its .nv-meta and indexes out."""

from pathlib import Path

import click

from energon_packed.cli.options import GroupedCommand, InputPath
from energon_packed.cli.output import Output, output_options
from energon_packed.formats import CODECS
from energon_packed.pipeline.options import parse_split
from energon_packed.shards.repair import make_nv_meta


@click.command(name="nv-meta", cls=GroupedCommand)
@click.argument("folder", type=InputPath(exists=True, file_okay=False), metavar="DIR")
@click.option("--sample-class", type=click.Choice(list(CODECS)),
              help="Flavor of the packs. [default: detected from the tar members]")  # fmt: skip
@click.option("--split", metavar="SHARES", help="Shares of the shards, such as train=0.98,val=0.02 or train=98,val=2. "
              "[default: the splits of split.yaml, or train=1]")  # fmt: skip
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True,
              help="Random seed for the shards of each split.")  # fmt: skip
@output_options
def command(folder: Path, sample_class: str | None, split: str | None, seed: int, output: Output) -> None:
    """Create or repair .nv-meta and the indexes of a folder of tars. The tars are not modified.

    DIR contains tars of `energon-packed pack`, or of a third-party tool that writes one of its flavors.

    \b
    energon-packed nv-meta out/webdataset
    energon-packed nv-meta /data/packed --sample-class PackedCaptioningSample --split train=0.9,val=0.1
    """
    shares = None if split is None else parse_split(split)
    repaired = make_nv_meta(folder, sample_class, split=shares, seed=seed)
    packs = sum(shard.packs for shard in repaired.shards)
    splits = {name: shards for name, shards in repaired.splits.items() if shards}
    lines = [f"{repaired.sample_class} in {repaired.folder}: {len(repaired.shards):,} shards, {packs:,} packs indexed"]
    if repaired.dropped_manifest:
        # A manifest of other shards would make loaders refuse the dataset.
        lines.append("  packing.json did not describe these shards and is kept as packing.json.stale")
    kept = " (split.yaml kept)" if repaired.kept_split else ""
    lines += [f"  {name}: {len(shards):,} shards{kept}" for name, shards in splits.items()]
    for line in lines:
        output.console.print(line, soft_wrap=True)
    output.result(
        {
            "folder": str(repaired.folder),
            "sample_class": repaired.sample_class,
            "shards": len(repaired.shards),
            "packs": packs,
            "splits": splits,
            "kept_split": repaired.kept_split,
            "dropped_manifest": repaired.dropped_manifest,
        }
    )
