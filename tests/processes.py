"""Python processes without the 3 s of CPU that importing torch, Transformers and Energon takes in each.

They are forked from the forkserver of multiprocessing, which has only imported these packages (`tests/preloaded.py`).
Each process has its own arguments, environment, folder, streams and exit status. Tests of the start of the interpreter
(`PYTHONHASHSEED`, warnings of imports) need `subprocess` instead.
"""

import os
import subprocess
import sys
import tempfile
from multiprocessing import get_context, set_start_method
from pathlib import Path
from types import ModuleType
from typing import Any

CONTEXT = get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.preloaded"])


class Python:
    """Process that runs `code` like `python -c CODE *arguments`."""

    def __init__(
        self, code: str, *arguments: object, env: dict[str, str] | None = None, cwd: Path | None = None
    ) -> None:
        self._streams = tempfile.TemporaryDirectory()
        call = (code, [str(argument) for argument in arguments], {**(os.environ if env is None else env)})
        self._process = CONTEXT.Process(target=_run, args=(*call, str(cwd or Path.cwd()), self._streams.name))
        self._process.start()

    def wait(self, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """Wait for the exit status and streams; after `timeout` seconds, kill the process and raise TimeoutError."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            self.kill()
            raise TimeoutError(f"{timeout} s: {self.read('stderr')[-2000:]}")
        done = (self._process.exitcode, self.read("stdout"), self.read("stderr"))
        self._streams.cleanup()
        return subprocess.CompletedProcess("python", *done)

    def status(self) -> int | None:
        """Return the exit status, -9 after SIGKILL; None while the process runs."""
        return self._process.exitcode

    def kill(self) -> None:
        """End the process, if it runs."""
        self._process.kill()
        self._process.join()

    def read(self, name: str) -> str:
        """Return the text of `stdout` or `stderr` until now."""
        file = Path(self._streams.name, name)
        return file.read_text(encoding="utf-8") if file.exists() else ""


def run_python(code: str, *arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a process, and wait for its end."""
    return Python(code, *arguments, **options).wait()


def energon(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the command line of Energon."""
    code = "import sys; from megatron.energon.cli.main import main; sys.argv[0] = 'energon'; sys.exit(main())"
    return run_python(code, *arguments)


def energon_packed(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the command line of energon-packed, and wait for its end."""
    return start_energon_packed(*arguments, **options).wait()


def start_energon_packed(*arguments: object, **options: Any) -> Python:
    """Start the command line of energon-packed."""
    code = "import sys; from tests.internals import main; sys.argv[0] = 'energon-packed'; main()"
    return Python(code, *arguments, **options)


def run_ranks(script: str, count: int, store: Path, *arguments: object, status: int = 0) -> list[str]:
    """Output of each process of a gloo group, which ends with `status`.

    `script` can use `rank`, `count`, `store` and the process group.
    """
    head = "import sys, torch\nrank, count, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]\n"
    head += "torch.distributed.init_process_group('gloo', f'file://{store}', rank=rank, world_size=count)\n"
    ranks = [Python(head + script, rank, count, store, *arguments) for rank in range(count)]
    ended = [rank.wait() for rank in ranks]
    failed = [done.stderr[-4000:] for done in ended if done.returncode != status]
    assert not failed, "\n...\n".join(failed)  # the others fail when the first one does
    return [done.stdout.strip() for done in ended]


def _run(code: str, arguments: list[str], environment: dict[str, str], folder: str, streams: str) -> None:
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(Path(streams, name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
        os.close(file)
    sys.argv = ["-c", *arguments]
    exec(compile(code, "<string>", "exec"), become_main(environment, folder))


def become_main(environment: dict[str, str], folder: str | Path) -> dict[str, Any]:
    """Replace environment, folder and `__main__` of this process, and return the namespace of the empty `__main__`."""
    set_start_method("fork", force=True)  # as in a new process; a child of the forkserver would use the forkserver
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.modules["__main__"] = ModuleType("__main__")
    return vars(sys.modules["__main__"])
