"""Command `energon-packed verify`: a dataset or a Metadataset in, one line for each check and the exit status out."""

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from energon_packed.cli.display import shown_path
from energon_packed.cli.options import (
    GroupedCommand,
    InputPath,
    as_options,
    media_root_option,
    options_of,
    wrong_usage,
)
from energon_packed.cli.output import Output, output_options
from energon_packed.cli.terminal import SafeConsole, echo
from energon_packed.encoding import EncoderSettings
from energon_packed.errors import ConfigError
from energon_packed.inspection.folder import PackedFolder
from energon_packed.inspection.verify import NO_MANIFEST, Check, verify
from energon_packed.libraries import NO_ENERGON, has_energon
from energon_packed.metadatasets import read_metadataset
from energon_packed.options import make
from energon_packed.pipeline.engine import Progress
from energon_packed.pipeline.output.locks import lock_holder
from energon_packed.system import available_cores

_FAST = "--fast"  # why samples are not encoded


_COMMON = ("fast", "workers", "min_utilization", "media_root", "tokenizer", "processor")


@click.command(name="verify", cls=GroupedCommand, common=_COMMON)
@output_options
@click.argument("folder", type=InputPath(), metavar="DIR|METADATASET.yaml")
@click.option("--fast", is_flag=True, help="Do not encode the samples again.")
@click.option("--workers", type=click.IntRange(min=0), default=0, help="Number of processes. [default: all cores]")
@click.option("--min-utilization", type=click.FloatRange(0, 1), metavar="SHARE",
              help="Fail if the utilization is lower than SHARE, such as 0.95.")  # fmt: skip
@media_root_option
@options_of(EncoderSettings, config=False, defaults=False)
def command(
    folder: Path, fast: bool, workers: int, min_utilization: float | None, values: dict[str, Any], output: Output
) -> None:
    """Check that a dataset is intact and matches its manifest; exit with status 1 if it does not.

    \b
    energon-packed verify out
    energon-packed verify out --fast
    energon-packed verify out --patch-size 16
    energon-packed verify blend.yaml

    Samples are encoded again with the settings in packing.json. The options under Tokens and Images override these
    settings, and add missing settings, such as the patch size after pack --factor 48.

    A check that cannot run is "not checked", with the reason: without packing.json (third-party datasets, after
    nv-meta), or without the tokenizer or patch size. This does not change the exit status.
    """
    # FloatRange accepts nan, as both of its comparisons with nan are false.
    if min_utilization is not None and math.isnan(min_utilization):
        raise click.BadParameter("nan is not in the range 0<=x<=1.", param_hint="'--min-utilization'")
    with wrong_usage():
        make(EncoderSettings, values, what="option")
    paths, problems = [folder], list[str]()
    if folder.is_file():
        # A dataset may be in several splits; it is verified once.
        leaves, problems = read_metadataset(folder).all_leaves()
        paths = sorted({leaf.path for leaf in leaves})
    results = []
    for path in paths:
        if holder := lock_holder(path.parent if path.name == "webdataset" else path):
            raise ConfigError(f"{path} is being written by {holder}. Wait for it to end, and run verify again.")
        dataset = PackedFolder.open(path)
        # Without packing.json, no tokenizer is known, so samples are encoded only with explicit settings.
        no_tokenizer = "" if values or dataset.manifest is not None else f"{NO_MANIFEST}, and no `tokenizer` is set"
        not_encoded = _FAST if fast else no_tokenizer if has_energon() else NO_ENERGON
        encoder = None if not_encoded else dataset.load_encoder(values)
        if encoder is not None and (changes := dataset.overridden(values)):
            changed = f"{dataset.path} is checked with settings that differ from packing.json: {', '.join(changes)}"
            echo(f"note: {as_options(changed)}", err=output.as_json or output.quiet)
        checks = verify(
            dataset,
            encoder,
            not_encoded=not_encoded,
            min_utilization=min_utilization,
            processes=workers or available_cores(),
            progress=(progress := output.progress()),
        )
        results.append(_shown(dataset, checks, progress, output))
    for problem in problems:
        _show(Check(f"{folder} can be read", problems=[problem], count=1), output)
    passed = not problems and all(result["passed"] for result in results)
    if paths == [folder]:
        output.result(results[0])
    else:
        output.result({"metadataset": str(folder), "passed": passed, "problems": problems, "of": results})
    if not passed:
        sys.exit(1)


def _shown(dataset: PackedFolder, checks: Iterator[Check], progress: Progress, output: Output) -> dict[str, Any]:
    """Run and show the checks of a dataset, and return its object for `--json`."""
    done: list[Check] = []
    try:
        for check in checks:
            done.append(check)
            _show(check, output)
    finally:
        progress.stop()
    failed = [check for check in done if check.passed is False]
    not_checked = sum(check.passed is None for check in done)
    remedy = ""
    if failed:
        remedy = "pack it again"
        if any(check.remedy == "check-media" for check in failed):
            remedy += "; if the media of the input are damaged, with --check-media full, which rejects their records"
        # Packing again repairs everything; nv-meta is enough only if it repairs every problem.
        if all(check.remedy == "nv-meta" for check in failed):
            remedy = f"energon-packed nv-meta {dataset.path} rebuilds its indexes"
        line = f"{len(failed)} checks failed: do not train on {shown_path(dataset.path)}; {remedy}"
        echo(line, err=output.as_json)
    else:
        passed = f"{len(done) - not_checked} checks passed, {not_checked} not checked"
        output.console.print(
            f"{passed if not_checked else 'all checks passed'}: {shown_path(dataset.path)}", soft_wrap=True
        )
    return {
        "dataset": str(dataset.path),
        "passed": not failed,
        "checks": [
            {"name": check.name, "passed": check.passed, "found": check.summary, "problems": check.problems}
            | {"problem_count": check.count, "not_checked": check.not_checked or None}
            for check in done
        ],
        "remedy": remedy or None,
    }


def _show(check: Check, output: Output) -> None:
    """Print a check, and its first problems. A failed check is printed with --quiet too."""
    line = f" {check.name}" + (f" ({check.summary})" if check.summary else "")
    if check.passed is None:
        # A warning, except if the user asked for it.
        if not output.quiet or check.not_checked != _FAST:
            console = SafeConsole(stderr=output.as_json or output.quiet, highlight=False, markup=False, soft_wrap=True)
            console.print(Text.assemble(("-", "yellow"), f"{line}: not checked, {as_options(check.not_checked)}"))
        return
    if check.passed:
        output.console.print(Text.assemble(("✓", "green"), line), soft_wrap=True)
        return
    console = SafeConsole(stderr=output.as_json, highlight=False, markup=False, soft_wrap=True)
    console.print(Text.assemble(("✗", "red"), line))
    for problem in check.problems:
        console.print(f"    {as_options(problem)}")
    if check.count > len(check.problems):
        console.print(f"    and {check.count - len(check.problems):,} more")
