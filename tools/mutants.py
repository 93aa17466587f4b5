"""Mutants of modules in, the mutants that no test notices out.

    make mutants MUTANTS=energon_packed/packing/planner.py

`mutmut` makes the mutants: one changed expression each. This file runs them, since mutmut leaves out decorated
functions (kernels, properties), and starts too many processes. pytest collects the test files of `[tool.mutants]` in
`pyproject.toml` once. One run of the tests records which tests run which lines; each mutant is then a forked process
that replaces the code of one function and runs the tests of the changed lines, the fastest first, until one fails. No
file changes. Kernels run as Python. Strings, `dtype=`, messages of `raise`, and code outside of functions are not
mutated.

A surviving mutant that changes nothing that a user can notice is listed with the reason in `tests/mutants.toml`, and
does not count.
"""

import argparse
import importlib
import inspect
import os
import pickle
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import ndiff
from functools import cached_property
from itertools import accumulate, takewhile
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import coverage
import libcst as cst
import pytest
from libcst.metadata import CodeRange, MetadataWrapper, PositionProvider
from mutmut.mutation.file_mutation import MutationVisitor
from mutmut.mutation.mutators import mutation_operators, operator_string
from mutmut.mutation.pragma_handling import IgnoredCode

ROOT = Path(__file__).parents[1]
LISTED = ROOT / "tests" / "mutants.toml"
_MEMORY = 12 << 30  # bytes of address space; a mutant may append to a list forever


@dataclass
class Mutant:
    """A function with one changed expression.

    Attributes:
        name: "old line => new line", stripped; the name in `tests/mutants.toml`.
        line: first changed line of the file, from 1.
        lines: lines of the changed expression.
        function: the function.
        code: its changed code.
    """

    name: str
    line: int
    lines: range
    function: FunctionType
    code: CodeType


class _Visitor(MutationVisitor):
    """Mutate decorated functions too, and leave out messages."""

    def __init__(self) -> None:
        operators = [(kind, each) for kind, each in mutation_operators if each is not operator_string]
        super().__init__(operators, IgnoredCode(set(), set(), set()))
        self.places: list[CodeRange | None] = []

    def _skip_node_and_children(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.Raise | cst.Assert):
            return True
        return not isinstance(node, cst.FunctionDef) and super()._skip_node_and_children(node)

    def _create_mutations(self, node: cst.CSTNode) -> None:
        super()._create_mutations(node)
        place = self.get_metadata(PositionProvider, node, None)
        self.places += [place] * (len(self.mutations) - len(self.places))


def mutants_of(file: Path, functions: dict[tuple[str, int], FunctionType]) -> Iterator[Mutant]:
    """Yield the mutants of the functions of a file, given by (qualified name, first line)."""
    source = file.read_text(encoding="utf-8")
    lines = source.splitlines()
    visitor = _Visitor()
    module = MetadataWrapper(cst.parse_module(source)).visit(visitor)
    starts = list(accumulate((len(line) for line in source.splitlines(keepends=True)), initial=0))
    for mutation, place in zip(visitor.mutations, visitor.places, strict=True):
        if place is None or not isinstance(mutation.contained_by_top_level_function, cst.FunctionDef):
            continue
        start, end = (starts[point.line - 1] + point.column for point in (place.start, place.end))
        start += len(source[start:end]) - len(source[start:end].lstrip())  # the place of ">" begins at its space
        changed = source[:start] + module.code_for_node(mutation.mutated_node).strip() + source[end:]
        if _dtypes(changed) != _dtypes(source):
            continue
        try:
            codes = _codes(compile(changed, str(file), "exec", dont_inherit=True))
        except SyntaxError:
            continue
        span = range(place.start.line, place.end.line + 1)
        for key, function in functions.items():
            code = codes.get(key)
            if code is None or code == function.__code__ or code.co_freevars != function.__code__.co_freevars:
                continue
            name, line = _name(lines, changed.splitlines())
            yield Mutant(name, line, span, function, code)


def _name(lines: list[str], changed: list[str]) -> tuple[str, int]:
    """Give the changed lines as "old => new", and the number of the first one, from 1."""
    first = _equal(lines, changed)
    old_rest, new_rest = lines[first:], changed[first:]
    equal_end = _equal(old_rest[::-1], new_rest[::-1])
    changes = list(ndiff(old_rest[: len(old_rest) - equal_end], new_rest[: len(new_rest) - equal_end]))
    old = " ".join(line[2:].strip() for line in changes if line.startswith("- "))
    new = " ".join(line[2:].strip() for line in changes if line.startswith("+ "))
    return f"{old} => {new}", first + 1


def _equal(one: list[str], other: list[str]) -> int:
    """Count the equal lines at the beginning."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _dtypes(source: str) -> list[str]:
    return re.findall(r"dtype=[\w.]+|astype\([\w.]+", source)


def _codes(code: CodeType) -> dict[tuple[str, int], CodeType]:
    """Codes of all functions in the code of a module, by (qualified name, first line)."""
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    return {(each.co_qualname, each.co_firstlineno): each for each in inner} | {
        place: found for each in inner for place, found in _codes(each).items()
    }


def _functions(space: dict[str, Any], file: Path) -> Iterator[FunctionType]:
    """Yield the functions of a module and the methods of its classes, below their decorators."""
    for value in list(space.values()):
        for part in (value, *(getattr(value, name, None) for name in ("fget", "fset", "func", "__func__"))):
            found = inspect.unwrap(part) if callable(part) else part
            if isinstance(found, FunctionType) and found.__code__.co_filename == str(file):
                yield found
        if isinstance(value, type) and value.__module__ == space.get("__name__", value.__module__):
            yield from _functions(dict(vars(value)), file)


class Runner:
    """Plugin of pytest that runs the mutants instead of the tests."""

    def __init__(self, name: str, listed: dict[str, str], jobs: int, chosen: str) -> None:
        self.name, self.file, self.listed, self.jobs, self.chosen = name, ROOT / name, listed, jobs, chosen
        self.survivors: list[Mutant] = []
        self.count = 0
        self.unused: set[str] = set()
        self.folder = Path(tempfile.mkdtemp(prefix="mutants-"))

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run the mutants."""
        if session.testsfailed:
            raise session.Failed("the tests cannot be collected")
        module = importlib.import_module(self.name.removesuffix(".py").replace("/", "."))
        found = _functions(vars(module), self.file)
        functions = {(each.__qualname__, each.__code__.co_firstlineno): each for each in found}
        tests = self._tests_of_lines(session)
        mutants = [each for each in mutants_of(self.file, functions) if self.chosen in each.name]
        names = {each.name for each in mutants}
        self.unused = set() if self.chosen else set(self.listed) - names
        mutants = [each for each in mutants if each.name not in self.listed]
        self.count = len(mutants)
        running: dict[int, tuple[Mutant, float]] = {}
        started = time.monotonic()
        for number, mutant in enumerate(mutants):
            while len(running) >= self.jobs:
                self._wait(running)
            items = self._items(session, mutant, tests)
            running[self._fork(session, mutant, items)] = mutant, time.monotonic() + self._limit(items)
            if number % 50 == 0:
                left = f"{number}/{len(mutants)}, {len(self.survivors)} survive, {time.monotonic() - started:.0f} s"
                print(f"{self.name}: {left}", file=sys.stderr)
        while running:
            self._wait(running)
        shutil.rmtree(self.folder, ignore_errors=True)
        return True

    def _items(self, session: pytest.Session, mutant: Mutant, tests: dict[int, set[int]]) -> list[int]:
        """Tests that run the changed lines, else the function; all tests if a process that they start runs it."""
        function = mutant.function.__code__
        whole = {line for _, _, line in function.co_lines() if line is not None}
        for lines in (set(mutant.lines), whole - {function.co_firstlineno}):
            if found := set().union(*(tests.get(line, ()) for line in lines)):
                return sorted(found, key=self.seconds.__getitem__)
        return sorted(range(len(session.items)), key=self.seconds.__getitem__)

    def _limit(self, items: list[int]) -> float:
        return 20 + 6 * sum(self.seconds[item] for item in items)

    def _tests_of_lines(self, session: pytest.Session) -> dict[int, set[int]]:
        """Run all tests once: indices of the tests that run each line, and the seconds of each test."""
        result = self.folder / "lines"
        if (child := os.fork()) == 0:
            tracer = coverage.Coverage(data_file=None, include=[str(self.file)], config_file=False)
            seconds = []
            _use_folder(session, self.folder / "first")
            tracer.start()
            for index, item in enumerate(session.items):
                tracer.switch_context(str(index))
                start = time.monotonic()
                following = session.items[index + 1] if index + 1 < len(session.items) else None
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                seconds.append(time.monotonic() - start)
            tracer.stop()
            found = tracer.get_data().contexts_by_lineno(str(self.file))
            lines = {line: {int(each) for each in names if each} for line, names in found.items()}
            result.write_bytes(pickle.dumps((lines, seconds, session.testsfailed)))
            sys.stdout.flush()
            os._exit(0)
        os.waitpid(child, 0)
        shutil.rmtree(self.folder / "first", ignore_errors=True)
        lines, self.seconds, failed = pickle.loads(result.read_bytes())
        if failed:
            raise session.Failed(f"{failed} tests fail without a mutant")
        return defaultdict(set, lines)

    def _fork(self, session: pytest.Session, mutant: Mutant, items: list[int]) -> int:
        sys.stdout.flush()
        if child := os.fork():
            return child
        os.setpgid(0, 0)
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        _use_folder(session, self.folder / str(os.getpid()))
        mutant.function.__code__ = mutant.code
        for place, index in enumerate(items):
            following = session.items[items[place + 1]] if place + 1 < len(items) else None
            session.items[index].config.hook.pytest_runtest_protocol(item=session.items[index], nextitem=following)
            if session.testsfailed:
                os._exit(1)
        os._exit(0)

    def _wait(self, running: dict[int, tuple[Mutant, float]]) -> None:
        """Wait until a mutant ends or exceeds its time."""
        while True:
            for child, (mutant, limit) in list(running.items()):
                ended, status = os.waitpid(child, os.WNOHANG)
                if not ended and time.monotonic() < limit:
                    continue
                _kill_group(child)
                if not ended:
                    _, status = os.waitpid(child, 0)
                del running[child]
                shutil.rmtree(self.folder / str(child), ignore_errors=True)
                if status == 0:
                    self.survivors.append(mutant)
                    print(f"survived  {self.name}:{mutant.line}  {mutant.name}", flush=True)
                return
            time.sleep(0.01)


def _kill_group(child: int) -> None:
    """End a mutant and the processes that its tests have started."""
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        return


def _use_folder(session: pytest.Session, folder: Path) -> None:
    """Let the tests of this process write into a folder of their own."""
    paths = session.config._tmp_path_factory
    paths._basetemp = None
    paths._given_basetemp = folder
    session.config.pluginmanager.unregister(name="terminalreporter")


@dataclass
class Settings:
    """`[tool.mutants]` of pyproject.toml and `tests/mutants.toml`."""

    @cached_property
    def modules(self) -> dict[str, list[str]]:
        """Test files of each module."""
        return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["mutants"]["modules"]

    @cached_property
    def least(self) -> float:
        """Share of the mutants that tests must notice."""
        return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["mutants"]["least"]

    @cached_property
    def listed(self) -> dict[str, dict[str, str]]:
        """Reason of each listed mutant, by module and name."""
        return tomllib.loads(LISTED.read_text("utf-8")) if LISTED.exists() else {}


def run(name: str, settings: Settings, jobs: int, chosen: str) -> bool:
    """Run the mutants of a module; whether enough of them are noticed."""
    if name not in settings.modules:
        sys.exit(f"{name} has no tests in [tool.mutants.modules] of pyproject.toml. Add them.")
    listed = settings.listed.get(name, {})
    runner = Runner(name, listed, jobs, chosen)
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(runner.folder / "hypothesis")
    arguments = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "addopts=", "-x"]
    status = pytest.main([*arguments, *(str(ROOT / test) for test in settings.modules[name])], plugins=[runner])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        return False
    share = 1 - len(runner.survivors) / max(1, runner.count)
    print(
        f"{name}: {runner.count} mutants, {len(runner.survivors)} survive, {share:.1%} noticed; "
        f"{len(listed)} listed as equivalent",
        flush=True,
    )
    for unused in sorted(runner.unused):
        print(f"{name}: {LISTED.name} lists a mutant that does not exist: {unused}")
    return share >= settings.least and not runner.unused


def main() -> None:
    """Run the modules of the command line, each in a process of its own; all modules without one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modules", nargs="*", help="files, as in pyproject.toml")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at the same time")
    parser.add_argument("--name", default="", help="run only mutants whose name contains this text")
    options = parser.parse_args()
    settings = Settings()
    if len(options.modules) == 1:
        sys.exit(not run(options.modules[0], settings, options.jobs, options.name))
    command = [sys.executable, __file__, "--jobs", str(options.jobs), "--name", options.name]
    names = options.modules or list(settings.modules)
    sys.exit(any([subprocess.run([*command, name], check=False).returncode for name in names]))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
