"""README and the pages of docs/: run their commands and Python blocks, compare or rewrite what they print.

    python tests/docs/pages.py            list the pages whose output differs
    python tests/docs/pages.py --update   run all blocks and rewrite the output in the pages

A ```console block holds commands (lines that start with `$ `), each followed by its output. A ```python block is
followed by the word "prints" and a block with its output, or prints nothing. A block with title="NAME" is written to
that file. The blocks of a page run in order, in one folder and one Python process. All other blocks, ```py among them,
are shown and not run. docs/my-data.md has no such blocks: tests/records/test_formats.py runs its records and commands.
"""

import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.processes import CONTEXT, become_main, energon_packed  # noqa: E402

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RECORDS = ROOT / "docs" / "my-data.md"  # run by tests/records/test_formats.py
_FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"^\$ ((?:.*\\\n)*.*)\n?", re.MULTILINE)
_TITLE = re.compile(r'title="([^"]+)"')
_PRINTS = re.compile(r"\bprints[:.]?\s*\Z")
_OURS = re.compile(r"energon-packed ([^|<>&;*$`]*)((?<= )[|>][^&;$`]*)?")


@dataclass(frozen=True, slots=True)
class Step:
    """One command, Python block or file.

    Attributes:
        language: `console`, `python`, or the title of a file.
        code: what runs, or the content of the file.
        start, end: characters of the page that hold its output.
        shown: the output in the page.
        is_place: False where the page has no place for output.
    """

    language: str
    code: str
    start: int
    end: int
    shown: str
    is_place: bool = True


def steps(text: str) -> list[Step]:
    """The commands and Python blocks of a page, in order."""
    found: list[Step] = []
    fences = list(_FENCE.finditer(text))
    for number, fence in enumerate(fences):
        if title := _TITLE.search(fence[1]):
            found.append(Step(title[1], fence[2], fence.end(), fence.end(), "", is_place=False))
        elif fence[1] == "console":
            found += _commands(text, fence.start(2), fence.end(2))
        elif fence[1] == "python":
            following = fences[number + 1] if number + 1 < len(fences) else None
            if following is not None and _PRINTS.search(text[fence.end() : following.start()]):
                found.append(Step("python", fence[2], following.start(2), following.end(2), following[2]))
            else:
                found.append(Step("python", fence[2], fence.end(), fence.end(), "", is_place=False))
    return found


def run_page(page: Path, folder: Path) -> Iterator[tuple[Step, str]]:
    """Each step of a page with what it prints; an error of a step is raised."""
    todo = steps(page.read_text(encoding="utf-8"))
    session = _Session(folder) if any(step.language == "python" for step in todo) else None
    try:
        for step in todo:
            if step.language == "console":
                yield step, _run(step.code, folder)
            elif step.language != "python":
                (folder / step.language).write_text(step.code, encoding="utf-8")
                yield step, ""
            else:
                assert session is not None
                yield step, session.run(step.code)
    finally:
        if session is not None:
            session.close()


def needs_demo(page: Path) -> bool:
    """The page reads demo-out and does not make it itself."""
    code = "\n".join(step.code for step in steps(page.read_text(encoding="utf-8")))
    return "demo-out" in code and "energon-packed demo" not in code


def make_demo(folder: Path) -> None:
    """What `energon-packed demo --output-dir demo-out --records 160` leaves in `folder`; README runs that command."""
    from energon_packed import pack
    from tests.internals import write_dataset, write_tokenizer

    with contextlib.chdir(folder):
        data = write_dataset(Path("demo-out/source"), records=160)
        tokenizer = write_tokenizer(Path("demo-out/source/tokenizer"), data.texts)
        pack(data.jsonl, output_dir="demo-out", seq_len=2048, tokenizer=tokenizer, max_reject_rate=0.5)


def normalized(text: str) -> str:
    """Without times, rates, the size of compressed pictures and versions, which differ between machines."""
    text = re.sub(r"(\d+ \w+) +[\d.]+ s(?: +[\d,]+/s)?", r"\1", text)
    text = re.sub(r"│ (\w+ seconds|size) .*", r"│ \1", text)
    text = re.sub(r"[\d.]+ [KMG]iB", "SIZE", text)
    text = re.sub(r" in Transformers [\d.]+", "", text)
    text = re.sub(
        r"'(train_runtime|train_\w+_per_second|train_loss|entropy|mean_token_accuracy)': '?[^',}]+'?", r"\1", text
    )
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


def updated(text: str, results: list[tuple[Step, str]]) -> str:
    """A page with the output of its steps; output that differs in times alone stays."""
    for step, printed in reversed(results):
        if normalized(printed) == normalized(step.shown):
            continue
        if not step.is_place:
            raise SystemExit(f"a block without a place for output prints {printed!r}: {step.code[:80]}")
        text = text[: step.start] + printed.rstrip("\n") + "\n" * bool(printed.strip()) + text[step.end :]
    return text


class _Session:
    """One Python process for all blocks of a page, so that a block can use the names of those before it."""

    def __init__(self, folder: Path) -> None:
        self._blocks, theirs = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=_serve, args=(theirs, folder, _environment()))
        self._process.start()
        theirs.close()

    def run(self, code: str) -> str:
        self._blocks.send(code)
        printed, failed = self._blocks.recv()
        assert failed is None, f"{code}\n{failed}"
        return str(printed)

    def close(self) -> None:
        self._blocks.close()
        self._process.join(60)


def _serve(blocks: Any, folder: Path, environment: dict[str, str]) -> None:
    """Run each block that comes; answer with what it prints and the traceback of its error."""
    names = become_main(environment, folder)
    while True:
        try:
            code = blocks.recv()
        except EOFError:
            return
        out, failed = io.StringIO(), None
        with contextlib.redirect_stdout(out):
            try:
                exec(compile(code, "page", "exec"), names)
            except BaseException:
                failed = traceback.format_exc()
        blocks.send((out.getvalue(), failed))


def _commands(text: str, start: int, end: int) -> Iterator[Step]:
    found = list(_COMMAND.finditer(text, start, end))
    for number, command in enumerate(found):
        stop = found[number + 1].start() if number + 1 < len(found) else end
        yield Step("console", command[1], command.end(), stop, text[command.end() : stop])


def _bash(command: str, folder: Path, given: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, capture_output=True, text=True, env=_environment(), input=given
    )


def _run(command: str, folder: Path) -> str:
    ours = _OURS.fullmatch(command.replace("\\\n", ""))
    if ours is None:
        done = _bash(command, folder)
    else:  # without a new interpreter
        done = energon_packed(*shlex.split(ours[1]), cwd=folder, env=_environment())
        if ours[2] and done.returncode == 0:
            done = _bash(f"cat {ours[2]}", folder, given=done.stdout)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def _environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    fixed = {"COLUMNS": "120", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return {**os.environ, **fixed, "PATH": path}


def main(arguments: list[str]) -> int:
    """List or rewrite pages; the names of pages limit it to these."""
    update = "--update" in arguments
    names = {Path(one).name for one in arguments if one != "--update"}
    stale = 0
    with tempfile.TemporaryDirectory() as root:
        shared = Path(root) / "shared"
        for page in PAGES:
            if (names and page.name not in names) or page == RECORDS or not steps(page.read_text(encoding="utf-8")):
                continue
            folder = Path(root) / page.stem
            folder.mkdir()
            if needs_demo(page):
                if not shared.exists():
                    shared.mkdir()
                    make_demo(shared)
                shutil.copytree(shared, folder, dirs_exist_ok=True)
            text = page.read_text(encoding="utf-8")
            new = updated(text, list(run_page(page, folder)))
            if new != text:
                stale += 1
                print(f"{page.relative_to(ROOT)} {'updated' if update else 'is out of date'}")
                if update:
                    page.write_text(new, encoding="utf-8")
    return 1 if stale and not update else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
