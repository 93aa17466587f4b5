"""Write the installed size of each extra, for the table of docs/index.md: `python tools/install_sizes.py [FILE]`.

The sizes are the sums of the files of all packages that `pip install 'energon-packed[EXTRA]'` installs, as the
environment of this interpreter has them: run it in the development environment, on Linux. Afterwards, run
`python tools/make_tables.py`.

`packages` computes the packages from their metadata; tests/test_install.py makes environments of them.
"""

import argparse
import json
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).with_name("install_sizes.json")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
_NOT_LISTED = "dev"


def packages(requirements: Iterable[str]) -> dict[str, Distribution]:
    """Find the installed packages that pip would install for requirements, with the requirements of each package.

    Args:
        requirements: as in pyproject.toml, perhaps with markers.

    Returns:
        Distributions by normalized name. Packages that are not installed are left out, such as CUDA packages of torch.
    """
    found: dict[str, Distribution] = {}
    seen: set[tuple[str, str]] = set()
    waiting = [(Requirement(text), "") for text in requirements]
    while waiting:
        requirement, extra = waiting.pop()
        name = canonicalize_name(requirement.name)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        wanted = {(name, wanted) for wanted in ("", *requirement.extras)} - seen
        seen |= wanted
        if not wanted:
            continue
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:
            continue
        inner = [Requirement(text) for text in found[name].requires or ()]
        waiting += [(required, extra) for required in inner for _, extra in wanted]
    return found


def requirements(extra: str = "") -> list[str]:
    """List the requirements of this project, with an extra and the extras that it includes."""
    found, waiting = list(PROJECT["dependencies"]), [extra] if extra else []
    while waiting:
        for text in PROJECT["optional-dependencies"][waiting.pop()]:
            requirement = Requirement(text)
            if requirement.name == PROJECT["name"]:
                waiting += requirement.extras
            else:
                found.append(text)
    return found


def size(found: Iterable[Distribution]) -> int:
    """Sum the installed files of packages, in bytes."""
    files = {Path(str(file.locate())) for package in found for file in package.files or ()}
    return sum(file.stat().st_size for file in files if file.is_file())


def measure() -> dict[str, Any]:
    """Measure the base installation and each extra."""
    results = {}
    for extra in ("", *PROJECT["optional-dependencies"]):
        if extra != _NOT_LISTED:
            found = packages(requirements(extra))
            results[extra] = {"bytes": size(found.values()), "packages": len(found)}
    return {"python": f"{sys.version_info.major}.{sys.version_info.minor}", "extras": results}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, default=RESULTS, help="file for the sizes")
    parser.parse_args().file.write_text(json.dumps(measure(), indent=1) + "\n", encoding="utf-8")
