"""Python processes without the 3 s of CPU that importing torch, Transformers and Energon takes in each.

They are forked from the forkserver of multiprocessing, which has only imported these packages (`tests/preloaded.py`).
Each process has its own arguments, environment, folder, streams and exit status. Tests of the start of the interpreter
(`PYTHONHASHSEED`, warnings of imports) need `subprocess` instead.

With the environment of `forked_commands`, also the commands of a shell and the ranks of torchrun are such processes.
"""

import atexit
import contextlib
import functools
import io
import json
import os
import runpy
import shutil
import socket
import subprocess
import sys
import tempfile
from multiprocessing import connection, get_context, set_start_method
from pathlib import Path
from types import ModuleType
from typing import Any

CONTEXT = get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.preloaded"])
_ROOT = Path(__file__).resolve().parents[1]
_CLIENT = Path(__file__).with_name("forked_command.py")
_COMMANDS = {"accelerate": "accelerate.commands.accelerate_cli", "torchrun": "torch.distributed.run"}


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


def run_tool(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a script of `tools/` in the folder of the repository."""
    code = "import runpy, sys; sys.path.insert(0, 'tools'); sys.argv.pop(0); "
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    return run_python(code, f"tools/{name}", *arguments, cwd=_ROOT)


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


@functools.cache
def forked_commands() -> dict[str, str]:
    """Environment in which `python`, `torchrun`, `accelerate` and `energon-packed` are forked.

    A shell finds commands of these names, and torchrun starts its ranks with this `python`. A command starts a client,
    which passes its arguments, environment, folder and streams to a server of this test process, passes signals to
    the process that the server forks, and ends with its status. The server kills the process if the client is killed.
    """
    folder = tempfile.mkdtemp()
    for name in ("python", *_COMMANDS, "energon-packed"):
        Path(folder, name).write_text(f"#!{sys.executable} -SI\n{_CLIENT.read_text(encoding='utf-8')}")
        Path(folder, name).chmod(0o755)
    ours, theirs = CONTEXT.Pipe()
    CONTEXT.Process(target=_serve_commands, args=(f"{folder}/socket", theirs)).start()
    theirs.close()
    atexit.register(ours.close)  # ends the server
    ours.recv()
    return {
        "PATH": f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHON_EXEC": f"{folder}/python",
        "FORKED_COMMANDS": f"{folder}/socket",
    }


def run_ranks(script: str, count: int, store: Path, *arguments: object, status: int = 0) -> list[str]:
    """Output of each process of a gloo group, which ends with `status`.

    `script` can use `rank`, `count`, `store` and the process group.
    """
    head = "import sys, torch\nrank, count, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]\n"
    head += "torch.distributed.init_process_group('gloo', f'file://{store}', rank=rank, world_size=count)\n"
    head += "torch.distributed.barrier()\n"  # a rank that ends before the others have connected to it breaks them
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


def _serve_commands(address: str, parent: connection.Connection) -> None:
    clients: dict[Any, socket.socket] = {}  # by process
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(100)
        parent.send(None)
        while True:
            processes = {process.sentinel: process for process in clients}
            for ready in connection.wait([parent, listener, *processes, *clients.values()]):
                if ready is parent:  # the test process has ended
                    for process in clients:
                        process.kill()
                    shutil.rmtree(Path(address).parent)
                    return
                if ready is listener:
                    client = listener.accept()[0]
                    size, streams, _, _ = socket.recv_fds(client, 8, 3)
                    with client.makefile("rb") as request:
                        call = json.loads(request.read(int.from_bytes(size, "big")))
                    process = get_context("fork").Process(target=_run_command, args=(call, streams))
                    process.start()
                    for stream in streams:
                        os.close(stream)
                    clients[process] = client
                    client.sendall((process.pid or 0).to_bytes(8, "big"))
                elif ready in processes:
                    process = processes[ready]  # type: ignore[index]
                    process.join()
                    client = clients.pop(process)
                    with client, contextlib.suppress(BrokenPipeError):
                        client.sendall(process.exitcode.to_bytes(8, "big", signed=True))
                else:  # a client was killed
                    for process in [process for process, client in clients.items() if client is ready]:
                        process.kill()


def _run_command(call: dict[str, Any], streams: list[int]) -> None:
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin = os.fdopen(0, closefd=False)
    program, *arguments = call["arguments"]
    is_unbuffered = arguments[:1] == ["-u"]
    output = os.fdopen(1, "wb", buffering=0 if is_unbuffered else -1, closefd=False)
    sys.stdout = io.TextIOWrapper(output, write_through=is_unbuffered)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    names = become_main(call["environment"], call["folder"])
    name = Path(program).name
    if name == "energon-packed":
        arguments = ["-c", "from tests.internals import main; main()", *arguments]
    elif name in _COMMANDS:
        arguments = ["-m", _COMMANDS[name], *arguments]
    kind, *given = arguments[is_unbuffered:]
    if kind == "-c":
        sys.argv = [program, *given[1:]]
        sys.path.insert(0, "")
        exec(compile(given[0], "<string>", "exec"), names)
    elif kind == "-m":
        sys.argv = given
        sys.path.insert(0, call["folder"])
        runpy.run_module(given[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [kind, *given]
        sys.path.insert(0, str(Path(kind).resolve().parent))
        runpy.run_path(kind, run_name="__main__")


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
