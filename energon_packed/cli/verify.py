"""`energon-packed verify`."""

import math
import sys
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from energon_packed.cli.options import GroupedCommand, as_options, collect, options_of
from energon_packed.cli.output import Output, output_options
from energon_packed.cli.terminal import SafeConsole, echo
from energon_packed.encoding import ChatEncoder, EncoderSettings
from energon_packed.encoding.vision.families import ambiguous
from energon_packed.inspection.folder import PackedFolder
from energon_packed.inspection.verify import Check, verify
from energon_packed.metadatasets import read_metadataset
from energon_packed.system import available_cores


@click.command(name="verify", cls=GroupedCommand)
@click.argument("folder", type=click.Path(path_type=Path), metavar="DIR|METADATASET.yaml")
@click.option("--fast", is_flag=True, help="Do not encode the samples again.")
@click.option("--workers", type=click.IntRange(min=0), default=0, help="Processes. [default: all cores]")
@click.option("--min-utilization", type=click.FloatRange(0, 1), metavar="SHARE",
              help="Fail when tokens fill a smaller share of the rows, such as 0.95.")  # fmt: skip
@options_of(EncoderSettings, config=False, defaults=False)
@output_options
def command(
    folder: Path, fast: bool, workers: int, min_utilization: float | None, output: Output, **given: Any
) -> None:
    """Check that a dataset is intact and matches its manifest. Exit status 1 when it does not.

    \b
    energon-packed verify out
    energon-packed verify out --fast
    energon-packed verify out --patch-size 16
    energon-packed verify blend.yaml

    Samples are encoded again with the settings in packing.json. The options under Tokens and Images override these,
    and add what they leave open, such as the patch size after pack --factor 48.

    Without packing.json (data of other packers, after nv-meta) it runs the checks that do not need it.
    """
    settings = collect(given, EncoderSettings)
    if min_utilization is not None and math.isnan(min_utilization):
        raise click.BadParameter("nan is not in the range 0<=x<=1.", param_hint="'--min-utilization'")
    paths, problems = [folder], list[str]()
    if folder.is_file():
        leaves, problems = read_metadataset(folder).all_leaves()
        paths = sorted({leaf.path for leaf in leaves})
    results = []
    for path in paths:
        opened = PackedFolder.open(path)
        is_fast = fast or (opened.manifest is None and not settings)
        encoder = None if is_fast else _encoder(opened, settings, output)
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


def _encoder(opened: PackedFolder, settings: dict[str, Any], output: Output) -> ChatEncoder | None:
    """The encoder for encoding the samples again; None, with a note, if its `factor` has two meanings."""
    encoder = opened.load_encoder(settings)
    if changes := opened.overridden(settings):
        _note(f"{opened.path} is checked with settings that differ from packing.json: {', '.join(changes)}", output)
    if encoder.vision is None or not encoder.vision.ambiguous_layouts:
        return encoder
    remedy = "pass `patch_size`, `vision_family` or `processor`"
    _note(f"samples are not encoded again: `factor` {ambiguous(encoder.vision.ambiguous_layouts)}; {remedy}", output)
    return None


def _note(text: str, output: Output) -> None:
    echo(f"note: {as_options(text)}", err=output.as_json or output.quiet)


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
