"""Command `energon-packed report`: a dataset, two datasets or a Metadataset in, one HTML page out."""

from pathlib import Path
from typing import Any

import click

from energon_packed.cli.options import InputPath, as_options, media_root_option
from energon_packed.cli.terminal import echo
from energon_packed.encoding import ChatEncoder
from energon_packed.errors import ConfigError
from energon_packed.files import atomic_write, format_bytes
from energon_packed.inspection.blend import read_blend
from energon_packed.inspection.compare import compare
from energon_packed.inspection.folder import PackedFolder
from energon_packed.inspection.report import render_report
from energon_packed.inspection.report_data import ReportData
from energon_packed.metadatasets import read_metadataset


@click.command(name="report")
@click.argument("path", type=InputPath(), metavar="DIR|METADATASET")
@click.argument("other", type=InputPath(), required=False, metavar="[DIR]")
@click.option("-o", "--output", type=InputPath(dir_okay=False), default=Path("report.html"),
              show_default=True, help="Output HTML file.")  # fmt: skip
@click.option("--tokenizer", type=click.Path(path_type=Path, exists=True, file_okay=False),
              help="Tokenizer used to classify tokens (text, image, supervised). "
              "[default: tokenizer in packing.json]")  # fmt: skip
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True,
              help="Random seed of the packs that are shown.")  # fmt: skip
@click.option("--view", metavar="URL", help="Address of energon-packed view --port N for this dataset, such as "
              "http://127.0.0.1:8000: packs and samples are links to it.")  # fmt: skip
@media_root_option
def command(path: Path, other: Path | None, output: Path, tokenizer: Path | None, seed: int, view: str | None) -> None:
    """Write an HTML report on a dataset or a Metadataset, as one self-contained file.

    With two datasets, the report has the differences of their counts, rejected records and settings.

    \b
    energon-packed report out -o report.html
    energon-packed report mix.yaml -o mix.html
    energon-packed report out-before out-after -o differences.html
    """
    if view is not None and (other is not None or path.is_file() or not view.startswith(("http://", "https://"))):
        raise click.UsageError(f"--view must be an http:// address, for a single dataset, got {view}.")
    # Protects a dataset or a YAML from being overwritten by a swapped argument.
    if output.suffix.lower() not in (".html", ".htm"):
        raise click.UsageError(f"--output must end in .html or .htm, got {output}.")
    if other is not None and tokenizer is not None:
        raise click.UsageError("--tokenizer must be omitted with two datasets, whose tokens are not read.")
    if other is not None:
        folders = [PackedFolder.open(each) for each in (path, other)]
        comparison = compare(*folders)
        for name, first, second in comparison["Settings that differ"]:
            echo(f"{name}: {first} -> {second}")
        for name, first, second, change in comparison["Counts"] + comparison["Rejected records"]:
            if change:
                echo(f"{name}: {first} -> {second}, {change}")
        page = render_report(f"{path} and {other}", comparison=comparison, names=[str(each.path) for each in folders])
    elif path.is_file():
        metadataset = read_metadataset(path)
        # A page with totals of only some datasets would look complete.
        if problems := metadataset.all_leaves()[1]:
            raise ConfigError("; ".join(problems))
        page = render_report(path.name, blend=read_blend(metadataset), steps=_steps(path))
    else:
        folder = PackedFolder.open(path)
        encoder, reason = folder.encoder_or_reason(tokenizer)
        data = ReportData(folder, encoder, not_encoded=as_options(reason), seed=seed)
        steps = _steps(path, encoder) if data.is_packed else ((), ())
        page = render_report(str(path), data, steps=steps, view=view and view.rstrip("/"))
    content = page.encode()
    atomic_write(output, content)
    echo(f"{output}: {format_bytes(len(content))}")


def _steps(path: Path, encoder: ChatEncoder | None = None) -> Any:
    """Compute the steps of some numbers of ranks; without Energon, only a note."""
    try:
        from energon_packed.inspection.steps import steps_of_ranks
    except ConfigError as error:
        return (), (str(error).rstrip("."),)
    return steps_of_ranks(path, encoder=encoder)
