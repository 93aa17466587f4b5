"""Run the commands and Python blocks of README and docs/, and compare their output with the page, or rewrite the page.

    python tests/docs/pages.py            list the pages whose output differs
    python tests/docs/pages.py --update   run all blocks and rewrite the output in the pages

A ```console block holds commands (lines that start with `$ `), each followed by its output. A ```python block is
followed by the word "prints" and a block with its output, or has no output. A block with title="NAME" is written to
that file. The blocks of a page run in order, in one folder and one Python process. A page that runs `tiny_models.py`
gets this file of docs/train-torch.md. All other blocks, ```py among them, are not run. docs/my-data.md has no such
blocks: tests/records/test_formats.py runs its records and commands.
"""

import contextlib
import io
import os
import re
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

from tests.processes import CONTEXT, become_main, forked_commands  # noqa: E402
from tests.storage import start_store  # noqa: E402

# These commands of this page start interpreters, as those of a user; all other commands are forked.
_NEW_INTERPRETERS = ("train-transformers.md", ("energon-packed ", "python train.py "))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_MODELS = "tiny_models.py"
RECORDS = ROOT / "docs" / "my-data.md"  # run by tests/records/test_formats.py
_FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"^\$ ((?:.*\\\n)*.*)\n?", re.MULTILINE)
_TITLE = re.compile(r'title="([^"]+)"')
_PRINTS = re.compile(r"\bprints[:.]?\s*\Z")
# The folder of a page, in errors that name absolute paths; some files come from the folder of a fixture.
_TEMPORARY = re.compile(rf"{re.escape(tempfile.gettempdir())}/\S*?/(?=demo-out/|lights/)")


@dataclass(frozen=True, slots=True)
class Step:
    """One command, Python block or file.

    Attributes:
        language: `console`, `python`, or the title of a file.
        code: the command or Python code, or the content of the file.
        start, end: offsets of its output in the page, in characters.
        shown: the output in the page.
        is_place: False if the page has no output block for it.
    """

    language: str
    code: str
    start: int
    end: int
    shown: str
    is_place: bool = True


def steps(text: str) -> list[Step]:
    """Return the files, commands and Python blocks of a page, in order."""
    result: list[Step] = []
    fences = list(_FENCE.finditer(text))
    for index, fence in enumerate(fences):
        if title := _TITLE.search(fence[1]):
            result.append(Step(title[1], fence[2], fence.end(), fence.end(), "", is_place=False))
        elif fence[1] == "console":
            result += _commands(text, fence.start(2), fence.end(2))
        elif fence[1] == "python":
            following = fences[index + 1] if index + 1 < len(fences) else None
            if following is not None and _PRINTS.search(text[fence.end() : following.start()]):
                result.append(Step("python", fence[2], following.start(2), following.end(2), following[2]))
            else:
                result.append(Step("python", fence[2], fence.end(), fence.end(), "", is_place=False))
    return result


def code_block(page: str, name: str) -> str:
    """Return the block of a page in docs/ that has this title, or else imports this package."""
    fences = _FENCE.findall((ROOT / "docs" / page).read_text(encoding="utf-8"))
    titled = [code for head, code in fences if f'title="{name}"' in head]
    (code,) = titled or [code for _, code in fences if f"\nfrom {name} import" in code]
    return str(code)


def run_page(page: Path, folder: Path) -> Iterator[tuple[Step, str]]:
    """Run a page and yield each step with its output; an error of a step is raised."""
    page_steps = steps(page.read_text(encoding="utf-8"))
    session = _Session(folder) if any(step.language == "python" for step in page_steps) else None
    if any(step.code == f"python {_MODELS}" for step in page_steps):
        (folder / _MODELS).write_text(code_block("train-torch.md", _MODELS), encoding="utf-8")
    try:
        for step in page_steps:
            if step.language == "console":
                name, commands = _NEW_INTERPRETERS
                environment = _environment(is_forked=page.name != name or not step.code.startswith(commands))
                yield step, _TEMPORARY.sub("/home/user/", _run(step.code, folder, environment))
            elif step.language != "python":
                (folder / step.language).write_text(step.code, encoding="utf-8")
                yield step, ""
            else:
                assert session is not None
                yield step, _TEMPORARY.sub("/home/user/", session.run(step.code))
    finally:
        if session is not None:
            session.close()


def needs_demo(page: Path) -> bool:
    """Return whether the page reads demo-out without creating it."""
    code = "\n".join(step.code for step in steps(page.read_text(encoding="utf-8")))
    return ("demo-out" in code or _MODELS in code) and "energon-packed demo" not in code


def needs_store(page: Path) -> bool:
    """Return whether the page reads or writes the bucket of an object store."""
    return any("s3://bucket" in step.code for step in steps(page.read_text(encoding="utf-8")))


def make_demo(folder: Path) -> None:
    """Write the files of `energon-packed demo --output-dir demo-out --records 160` (in README) to `folder`."""
    from energon_packed import pack
    from tests.internals import write_dataset, write_tokenizer

    with contextlib.chdir(folder):
        data = write_dataset(Path("demo-out/source"), records=160)
        tokenizer = write_tokenizer(Path("demo-out/source/tokenizer"), data.texts)
        pack(data.jsonl, output_dir="demo-out", seq_len=2048, tokenizer=tokenizer, max_reject_rate=0.5)


def normalized(text: str) -> str:
    """Return the text without times, rates, losses, compressed sizes and versions, which differ between machines."""
    text = re.sub(r"(\d+ \w+) +[\d.]+ s(?: +[\d,]+/s)?", r"\1", text)
    text = re.sub(r"│ (\w+ seconds|size) .*", r"│ \1", text)
    text = re.sub(r"[\d.]+ [KMG]iB", "SIZE", text)
    text = re.sub(r" in Transformers [\d.]+", "", text)
    text = re.sub(r"[1-9]\d* batches replaced after a resume", "BATCHES replaced after a resume", text)  # until a kill
    text = re.sub(r"loss \d+\.\d+", "loss", text)
    text = re.sub(
        r"'(train_runtime|train_\w+_per_second|(?:\w+_)?loss|grad_norm|entropy|mean_token_accuracy)': '?[^',}]+'?",
        r"\1",
        text,
    )
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


def updated(text: str, results: list[tuple[Step, str]]) -> str:
    """Return the page with the output of its steps; output that differs only in times stays."""
    # Backwards, so that the offsets of earlier steps stay valid.
    for step, printed in reversed(results):
        if normalized(printed) == normalized(step.shown):
            continue
        if not step.is_place:
            raise SystemExit(f"a block prints {printed!r}, but no output block follows it: {step.code[:80]}")
        text = text[: step.start] + printed.rstrip("\n") + "\n" * bool(printed.strip()) + text[step.end :]
    return text


class _Session:
    """One Python process for all blocks of a page, so that a block can use the names of earlier blocks."""

    def __init__(self, folder: Path) -> None:
        self._blocks, process_end = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=_serve, args=(process_end, folder, _environment()))
        self._process.start()
        process_end.close()

    def run(self, code: str) -> str:
        self._blocks.send(code)
        printed, failed = self._blocks.recv()
        assert failed is None, f"{code}\n{failed}"
        return str(printed)

    def close(self) -> None:
        self._blocks.close()
        self._process.join(60)


def _serve(blocks: Any, folder: Path, environment: dict[str, str]) -> None:
    """Run each block that arrives, and answer with its output and the traceback of its error."""
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
    commands = list(_COMMAND.finditer(text, start, end))
    for index, command in enumerate(commands):
        stop = commands[index + 1].start() if index + 1 < len(commands) else end
        yield Step("console", command[1], command.end(), stop, text[command.end() : stop])


def _run(command: str, folder: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        capture_output=True,
        text=True,
        env=environment,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def _environment(*, is_forked: bool = True) -> dict[str, str]:
    path = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    fixed = {"COLUMNS": "120", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    fixed["PET_STANDALONE"] = "1"  # torchrun takes a free port; its default port may be that of another test
    return {**os.environ, **(forked_commands() if is_forked else path), **fixed}


def main(arguments: list[str]) -> int:
    """List or rewrite the named pages, by default all."""
    update = "--update" in arguments
    names = {Path(name).name for name in arguments if name != "--update"}
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
            if needs_store(page):
                start_store(folder)
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
