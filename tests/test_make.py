"""What make, pyproject.toml and the files of versions say of each other."""

import re
import shutil
import subprocess
import tomllib
from functools import partial
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NOT_LOWEST = {"torch"}
"""Kept at the tested version: PyPI has no older build of it without CUDA packages."""


def pins(name: str) -> dict[str, Version]:
    lines = [line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith("#")]
    return {canonicalize_name(package): Version(version) for package, version in (line.split("==") for line in lines)}


def requirements(*extras: str) -> list[Requirement]:
    lists = [PROJECT["dependencies"], *(PROJECT["optional-dependencies"][extra] for extra in extras)]
    found = [Requirement(one) for group in lists for one in group]
    return [one for one in found if one.name != PROJECT["name"]]


def test_the_tested_versions_are_allowed_and_complete() -> None:
    tested = pins("constraints.txt")
    for one in requirements(*PROJECT["optional-dependencies"]):
        name = canonicalize_name(one.name)
        assert name in tested, f"constraints.txt has no {name}"
        assert one.specifier.contains(tested[name]), one


def test_the_lowest_versions_are_those_of_pyproject() -> None:
    lowest, tested = pins("constraints-lowest.txt"), pins("constraints.txt")
    floors: dict[str, Version] = {}
    for one in requirements("train", "ray", "megatron", "transformers-train", "report", "video", "s3", "dev"):
        (floor,) = [Version(s.version) for s in one.specifier if s.operator == ">="] or [None]
        name = canonicalize_name(one.name)
        assert floor is None or floors.setdefault(name, floor) == floor, f"{name} has two floors"
    for name, version in lowest.items():
        if name in NOT_LOWEST:
            assert version == tested[name]
        else:  # the first release of 3.2 may be 3.2.0.post0
            assert version.release[: len(floors[name].release)] == floors[name].release, name
    needed = {
        canonicalize_name(one.name)
        for one in requirements("train", "ray", "megatron", "transformers-train", "report", "s3")
    }
    assert needed <= set(lowest)


def test_make_hard_sets_what_the_tests_read() -> None:
    settings = re.search(r"^HARD := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert settings is not None
    known = {one.partition("=")[0]: int(one.partition("=")[2]) for one in settings[1].split()}
    reading = {}
    for file in sorted((ROOT / "tests").rglob("*.py")):
        for name, short in re.findall(r'environ\.get\("(ENERGON_PACKED_\w+)", "(\d+)"\)', file.read_text()):
            if not name.endswith("_SEED"):
                reading[file.relative_to(ROOT)] = name
                assert int(short) < known[name], f"{file} reads {name}: make hard sets no larger value"
    assert len(reading) >= 4
    shown = subprocess.run(["make", "-pnq", "hard"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    run = re.search(r"^HARD_TESTS \??:?= (.*)$", shown, re.MULTILINE)
    assert run is not None
    command = run[1].removeprefix("$(shell ").removesuffix(")")
    files = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert set(files.split()) == {str(file) for file in reading}


def test_root_gets_the_browser_of_the_tests(tmp_path: Path) -> None:
    for name, does in (("id", "echo 0"), ("apt-get", 'echo "apt-get $*" >> "$LOG"; test "$1" = update')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    for name in ("make", "sh", "timeout", "grep"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    log = tmp_path / "log"
    run = partial(
        subprocess.run, cwd=ROOT, env={"PATH": str(tmp_path), "LOG": str(log)}, capture_output=True, text=True
    )
    assert "cannot install Chromium" in run(["make", "chromium"], check=True).stdout
    assert log.read_text() == "apt-get update\napt-get install --yes --no-install-recommends chromium\n"
    log.unlink()
    (tmp_path / "google-chrome").symlink_to("sh")
    run(["make", "chromium"], check=True)
    assert not log.exists()


@pytest.mark.parametrize("target", ["hard", "coverage", "test-lowest", "test-newest", "test-trainers"])
def test_make_knows_its_targets(target: str) -> None:
    shown = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stderr
    assert "-m pytest" in shown.stdout


def test_the_newest_versions_have_no_constraints() -> None:
    shown = subprocess.run(["make", "-nB", "test-newest"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    installs = [line for line in shown.splitlines() if "pip install" in line]
    assert len(installs) == 1
    assert "--upgrade" in installs[0]
    assert "constraints" not in installs[0]
    assert not re.search(r" -c ", installs[0])


def test_the_workflow_runs_targets_of_make_with_the_versions_of_pyproject() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    versions = workflow["jobs"]["test"]["strategy"]["matrix"]["python-version"]
    prefix = "Programming Language :: Python :: "
    assert [f"{prefix}{version}" for version in versions] == [
        name for name in PROJECT["classifiers"] if name.startswith(prefix)
    ]
    commands = [step["run"].split() for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    targets = {target for command in commands if command[0] == "make" for target in command[1:]}
    assert targets == {"lint", "docs", "unit", "test-newest"}  # the parts of `make test`, and the newest versions
    newest = workflow["jobs"]["newest"]["steps"][1]["with"]["python-version"]
    assert newest == versions[-1]
    subprocess.run(["make", "-n", *targets], cwd=ROOT, capture_output=True, check=True)


def test_the_modules_of_make_mutants_and_the_lines_that_it_lists_exist() -> None:
    modules = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mutants"]["modules"]
    assert all((ROOT / name).exists() for module, tests in modules.items() for name in (module, *tests))
    listed = tomllib.loads((ROOT / "tests" / "mutants.toml").read_text())
    assert listed.keys() <= modules.keys()
    for module, mutants in listed.items():
        source = " ".join((ROOT / module).read_text().split())
        stale = [name for name in mutants if " ".join(name.partition(" => ")[0].split()) not in source]
        assert not stale, f"remove {stale} from tests/mutants.toml"
