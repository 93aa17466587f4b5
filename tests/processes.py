"""Python processes without the 3 s of CPU that importing torch, Transformers and Energon takes in each.

They are forked from a process that has imported these and done nothing else (`tests/preloaded.py`): the forkserver of
multiprocessing. Each has its own arguments, environment, folder, streams and exit status. What is about the start of
the interpreter (`PYTHONHASHSEED`, warnings of imports) needs `subprocess` instead.
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
    """A process that runs `code` as `python -c CODE *arguments` does."""

    def __init__(
        self, code: str, *arguments: object, env: dict[str, str] | None = None, cwd: Path | None = None
    ) -> None:
        self._streams = tempfile.TemporaryDirectory()
        given = (code, [str(one) for one in arguments], {**(os.environ if env is None else env)})
        self._process = CONTEXT.Process(target=_run, args=(*given, str(cwd or Path.cwd()), self._streams.name))
        self._process.start()

    def wait(self, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """Exit status and streams; a process that takes longer is killed, and TimeoutError raised."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
            raise TimeoutError(f"{timeout} s: {self._read('stderr')[-2000:]}")
        done = (self._process.exitcode, self._read("stdout"), self._read("stderr"))
        self._streams.cleanup()
        return subprocess.CompletedProcess("python", *done)

    def _read(self, name: str) -> str:
        file = Path(self._streams.name, name)
        return file.read_text(encoding="utf-8") if file.exists() else ""


def run_python(code: str, *arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """One process, to its end."""
    return Python(code, *arguments, **options).wait()


def energon(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Energon's command line."""
    code = "import sys; from megatron.energon.cli.main import main; sys.argv[0] = 'energon'; sys.exit(main())"
    return run_python(code, *arguments)


def energon_packed(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Our command line."""
    return start_energon_packed(*arguments, **options).wait()


def start_energon_packed(*arguments: object, **options: Any) -> Python:
    """Our command line, which runs on."""
    code = "import sys; from tests.internals import main; sys.argv[0] = 'energon-packed'; main()"
    return Python(code, *arguments, **options)


def run_ranks(script: str, count: int, store: Path, *arguments: object) -> list[str]:
    """Output of each process of a gloo group; `script` begins with `rank`, `count`, `store` and the group."""
    head = "import sys, torch\nrank, count, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]\n"
    head += "torch.distributed.init_process_group('gloo', f'file://{store}', rank=rank, world_size=count)\n"
    outputs = []
    for process in [Python(head + script, rank, count, store, *arguments) for rank in range(count)]:
        done = process.wait()
        assert done.returncode == 0, done.stderr[-2000:]
        outputs.append(done.stdout.strip())
    return outputs


def _run(code: str, arguments: list[str], environment: dict[str, str], folder: str, streams: str) -> None:
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(Path(streams, name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
        os.close(file)
    sys.argv = ["-c", *arguments]
    exec(compile(code, "<string>", "exec"), become_main(environment, folder))


def become_main(environment: dict[str, str], folder: str | Path) -> dict[str, Any]:
    """Names of an empty `__main__`, in this process, with that environment and folder."""
    set_start_method("fork", force=True)  # the default here as well; its own would be the forkserver
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.modules["__main__"] = ModuleType("__main__")
    return vars(sys.modules["__main__"])
