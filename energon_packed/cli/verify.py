"""`energon-packed verify`."""

import sys
from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape

from energon_packed.cli.display import TerminalProgress
from energon_packed.cli.options import as_options
from energon_packed.inspection.folder import PackedFolder
from energon_packed.inspection.verify import Check, verify
from energon_packed.pipeline.options import available_cores


@click.command(name="verify")
@click.argument("folder", type=click.Path(path_type=Path), metavar="DIR")
@click.option("--fast", is_flag=True, help="Do not encode the samples again.")
@click.option("--workers", type=click.IntRange(min=0), default=0, help="Processes. [default: all cores]")
@click.option("--tokenizer", type=click.Path(path_type=Path, exists=True, file_okay=False),
              help="Folder of the tokenizer. [default: the one that packing.json names]")  # fmt: skip
@click.option("--processor", type=click.Path(path_type=Path, exists=True, file_okay=False),
              help="Folder of the processor. [default: the one that packing.json names]")  # fmt: skip
def command(folder: Path, fast: bool, workers: int, tokenizer: Path | None, processor: Path | None) -> None:
    """Check that a dataset is intact and matches its manifest. Exit status 1 when it does not.

    \b
    energon-packed verify out
    energon-packed verify out --fast
    \b
    Without packing.json (data of other packers, after nv-meta) it runs the checks that do not need it.
    """
    opened = PackedFolder.open(folder)
    fast = fast or (opened.manifest is None and tokenizer is None)
    encoder = None if fast else opened.load_encoder(tokenizer, processor)
    console = Console(highlight=False, soft_wrap=True)
    progress = TerminalProgress(console)
    processes = workers or available_cores()
    failed: list[Check] = []
    for check in verify(opened, encoder, processes=processes, progress=progress):
        failed += [] if check.holds else [check]
        mark = "[green]✓[/]" if check.holds else "[red]✗[/]"
        console.print(f"{mark} {escape(check.name)}" + (f" ({escape(check.found)})" if check.found else ""))
        for problem in check.problems:
            console.print(f"    {escape(as_options(problem))}")
        if check.count > len(check.problems):
            console.print(f"    and {check.count - len(check.problems):,} more")
    if failed:
        remedy = "pack it again"
        if all(check.remedy == "nv-meta" for check in failed):
            remedy = f"energon-packed nv-meta {opened.path} rebuilds its indexes"
        console.print(f"{len(failed)} checks failed: do not train on {opened.path}; {remedy}", soft_wrap=True)
        sys.exit(1)
    console.print(f"all checks passed: {opened.path}")
