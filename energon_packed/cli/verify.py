"""`energon-packed verify`."""

import math
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from energon_packed.cli.options import GroupedCommand, as_options
from energon_packed.cli.output import Output, output_options
from energon_packed.cli.terminal import SafeConsole, echo
from energon_packed.encoding import ChatEncoder
from energon_packed.encoding.pretrained import find_pretrained
from energon_packed.encoding.vision import ambiguous
from energon_packed.errors import EnergonPackedError
from energon_packed.inspection.folder import PackedFolder
from energon_packed.inspection.verify import Check, verify
from energon_packed.metadatasets import read_metadataset
from energon_packed.pipeline.processes import available_cores


@click.command(name="verify", cls=GroupedCommand)
@click.argument("folder", type=click.Path(path_type=Path), metavar="DIR|METADATASET.yaml")
@click.option("--fast", is_flag=True, help="Do not encode the samples again.")
@click.option("--workers", type=click.IntRange(min=0), default=0, help="Processes. [default: all cores]")
@click.option("--tokenizer", metavar="DIR|NAME",
              help="Tokenizer folder or cached model. [default: that of packing.json]")  # fmt: skip
@click.option("--processor", metavar="DIR|NAME",
              help="Processor folder or cached model. [default: that of packing.json]")  # fmt: skip
@click.option("--min-utilization", type=click.FloatRange(0, 1), metavar="SHARE",
              help="Fail when tokens fill a smaller share of the rows, such as 0.95.")  # fmt: skip
@output_options
def command(
    folder: Path,
    fast: bool,
    workers: int,
    tokenizer: str | None,
    processor: str | None,
    min_utilization: float | None,
    output: Output,
) -> None:
    """Check that a dataset is intact and matches its manifest. Exit status 1 when it does not.

    \b
    energon-packed verify out
    energon-packed verify out --fast
    energon-packed verify blend.yaml
    \b
    Without packing.json (data of other packers, after nv-meta) it runs the checks that do not need it.
    """
    if min_utilization is not None and math.isnan(min_utilization):
        raise click.BadParameter("nan is not in the range 0<=x<=1.", param_hint="'--min-utilization'")
    paths, problems = _leaves(folder) if folder.is_file() else ([folder], [])
    results = []
    for path in paths:
        opened = PackedFolder.open(path)
        is_fast = fast or (opened.manifest is None and tokenizer is None)
        encoder = None if is_fast else _encoder(opened, tokenizer, processor, output)
        limits = {"min_utilization": min_utilization, "processes": workers or available_cores()}
        results.append(_verified(opened, encoder, limits, output))
    for problem in problems:
        _show(Check(f"{folder} can be read", problems=[problem], count=1), output)
    passed = not problems and all(result["passed"] for result in results)
    if paths == [folder]:
        output.result(results[0])
    else:
        output.result({"metadataset": str(folder), "passed": passed, "problems": problems, "of": results})
    if not passed:
        sys.exit(1)


def _leaves(path: Path) -> tuple[list[Path], list[str]]:
    """The dataset folders of all splits of a Metadataset, and why other splits cannot be read."""
    metadataset = read_metadataset(path)
    problems = metadataset.problems()
    found = set()
    for split in metadataset.splits:
        with suppress(EnergonPackedError):
            found |= {leaf.path for leaf in metadataset.leaves(split)}
    return sorted(found), problems


def _verified(
    opened: PackedFolder, encoder: ChatEncoder | None, limits: dict[str, Any], output: Output
) -> dict[str, Any]:
    """Run and show the checks of one dataset; the object of `--json`."""
    progress = output.progress()
    checks: list[Check] = []
    try:
        for check in verify(opened, encoder, progress=progress, **limits):
            checks.append(check)
            _show(check, output)
    finally:
        progress.stop()
    failed = [check for check in checks if not check.holds]
    remedy = ""
    if failed:
        remedy = "pack it again"
        if any(check.remedy == "check-images" for check in failed):
            remedy += " with --check-images full, which rejects records whose images do not decode"
        if all(check.remedy == "nv-meta" for check in failed):
            remedy = f"energon-packed nv-meta {opened.path} rebuilds its indexes"
        line = f"{len(failed)} checks failed: do not train on {opened.path}; {remedy}"
        echo(line, err=output.as_json)
    else:
        output.console.print(f"all checks passed: {opened.path}", soft_wrap=True)
    return {
        "dataset": str(opened.path),
        "passed": not failed,
        "checks": [
            {"name": check.name, "passed": check.holds, "found": check.found, "problems": check.problems}
            | {"problem_count": check.count}
            for check in checks
        ],
        "remedy": remedy or None,
    }


def _encoder(opened: PackedFolder, tokenizer: str | None, processor: str | None, output: Output) -> ChatEncoder | None:
    """What encodes the samples again; None, with a note, where the image settings have two meanings."""
    folders = [find_pretrained(name) if name is not None else None for name in (tokenizer, processor)]
    encoder = opened.load_encoder(*folders)
    if encoder.vision is None or not encoder.vision.undecided:
        return encoder
    line = f"images are not encoded again: --factor {ambiguous(encoder.vision.undecided)}; --processor DIR says which"
    echo(f"note: {line}", err=output.as_json or output.quiet)
    return None


def _show(check: Check, output: Output) -> None:
    """A line for a check, and its first problems, which are shown with --quiet as well."""
    if check.holds:
        line = Text.assemble(("✓", "green"), f" {check.name}" + (f" ({check.found})" if check.found else ""))
        output.console.print(line, soft_wrap=True)
        return
    console = SafeConsole(stderr=output.as_json, highlight=False, markup=False, soft_wrap=True)
    console.print(Text.assemble(("✗", "red"), f" {check.name}" + (f" ({check.found})" if check.found else "")))
    for problem in check.problems:
        console.print(f"    {as_options(problem)}")
    if check.count > len(check.problems):
        console.print(f"    and {check.count - len(check.problems):,} more")
