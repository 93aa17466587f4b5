"""Runs of the command line, each in a process group of its own, with a fault at the n-th thing that they do to a disk.

What a process does is known from Python's audit events (https://docs.python.org/3/library/audit_events.html) in its
output folder: files opened for writing, folders made, renames, removals and locks; and from `os.fsync`, which has no
such event. At the n-th of them the process gets a signal, or the call fails as on a bad disk, or the kernel refuses
all later writes (RLIMIT_FSIZE) or more memory (RLIMIT_AS). A run without fault lists the events.

`CommandLine` is a process that has imported the package and forks for each run, so that a run costs no imports; the
child calls `main` with its arguments, as the console script does.
"""

import ctypes
import errno
import fcntl
import gc
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_EVENTS = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}
_PR_SET_CHILD_SUBREAPER = 36
_LIMIT = 120  # seconds of a run; a longer one hangs


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What happens in a run.

    Attributes:
        at: number of the event, from 0, in the process that it happens in; -1 for none, and the events are listed.
        role: `parent` or `worker`: the first worker that comes so far.
        event: only events of this name count; "" for all.
        path: only events of a path that has this regular expression count.
        kind: `kill` this process, `kill_parent`, `kill_all`, `interrupt` (SIGINT to the process group),
            `interrupt_twice`, `terminate` (SIGTERM to it), `fail` with `errno`, `no_space` (all later writes fail),
            `no_memory`, and `stop`: wait until the test says that it may go on.
        errno: of `fail`.
        forever: the call fails from that event on.
        limit: bytes of a file after `no_space`.
        delay: seconds from the event to a signal; more than 0 hits any moment, between events too.
    """

    at: int = -1
    role: str = "parent"
    event: str = ""
    path: str = ""
    kind: str = ""
    errno: int = errno.EIO
    forever: bool = False
    limit: int = 0
    delay: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Ran:
    """A run that has ended.

    Attributes:
        status: exit status; negative for a signal.
        out, err: what it printed.
        orphans: processes of its group that were there some seconds after it.
        fired: the fault happened.
        events: (role, event, path in the output folder) of every event, of runs without fault.
        seconds: of the run.
    """

    status: int
    out: str
    err: str
    orphans: bool
    fired: bool
    events: list[tuple[str, str, str]] = field(default_factory=list)
    seconds: float = 0.0


class Hook:
    """In the process of a run, and in its workers.

    Args:
        fault: that it shall have.
        folder: of the output.
        notes: file that says that the fault has happened, or that lists the events.
    """

    def __init__(self, fault: Fault, folder: Path, notes: Path) -> None:
        self.fault, self.folder, self.notes = fault, str(folder), notes
        self.parent = os.getpid()
        self.seen: dict[int, int] = {}
        self.inside = False
        sys.addaudithook(self._audited)
        self._fsync = os.fsync
        os.fsync = self._synced  # type: ignore[assignment]

    def _audited(self, event: str, given: tuple[Any, ...]) -> None:
        if self.inside:
            return
        if event == "open":
            path, _, flags = given
            if not isinstance(flags, int) or not flags & _WRITES:
                return
        elif event == "fcntl.flock":
            path = f"{self.folder}/.work/lock"
            if given[1] & fcntl.LOCK_UN:
                return
        elif event in _EVENTS:
            path = given[0]
        else:
            return
        self._happens(event, path)

    def _synced(self, descriptor: int) -> None:
        self._happens("os.fsync", os.readlink(f"/proc/self/fd/{descriptor}"))
        self._fsync(descriptor)

    def _happens(self, event: str, path: Any) -> None:
        try:
            name = os.fspath(path)
        except TypeError:  # a descriptor
            return
        name = name.decode() if isinstance(name, bytes) else name
        if not name.startswith(self.folder):
            return
        self.inside = True
        try:
            self._count(event, name)
        finally:
            self.inside = False

    def _count(self, event: str, name: str) -> None:
        fault, role = self.fault, "parent" if os.getpid() == self.parent else "worker"
        if fault.at < 0:
            with self.notes.open("a") as out:
                out.write(json.dumps((role, event, name[len(self.folder) :])) + "\n")
            return
        if role != fault.role or fault.event not in ("", event) or not re.search(fault.path, name[len(self.folder) :]):
            return
        number = self.seen[os.getpid()] = self.seen.get(os.getpid(), -1) + 1
        if number == fault.at or (fault.forever and number > fault.at):
            with suppress(FileExistsError):
                os.close(os.open(self.notes, os.O_CREAT | os.O_EXCL))
                self._strike(event, name)
                return
            if fault.forever:
                self._strike(event, name)

    def _strike(self, event: str, name: str) -> None:
        kind, fault, group = self.fault.kind, self.fault, os.getpgid(0)
        signals = {
            "kill": (os.getpid(), signal.SIGKILL), "kill_parent": (self.parent, signal.SIGKILL),
            "kill_all": (-group, signal.SIGKILL), "terminate": (-group, signal.SIGTERM),
            "interrupt": (-group, signal.SIGINT), "interrupt_twice": (-group, signal.SIGINT),
        }  # fmt: skip
        if kind in signals:
            target, number = signals[kind]
            if kind == "interrupt_twice":
                _later(fault.delay + 0.03, target, number, self.notes)
            if fault.delay:
                _later(fault.delay, target, number, self.notes)
            else:
                os.kill(target, number)
        elif kind == "no_space":
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.fault.limit, resource.RLIM_INFINITY))
        elif kind == "no_memory":
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used, resource.RLIM_INFINITY))
            self.filled = [bytearray(1 << size) for size in range(20, 4, -1) for _ in _until_none_is_left(1 << size)]
        elif kind == "stop":
            Path(f"{self.notes}.stopped").touch()
            while not Path(f"{self.notes}.go").exists():
                time.sleep(0.005)
        elif kind == "fail":
            named = () if event in ("fcntl.flock", "os.fsync") else (name,)  # those of a descriptor name no file
            raise OSError(self.fault.errno, os.strerror(self.fault.errno), *named)


def _later(seconds: float, target: int, number: int, notes: Path) -> None:
    """Send a signal from another process, unless its target has ended by then; the time of it is noted."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    is_sender = os.fork() == 0
    if is_sender:
        os.setsid()
        time.sleep(seconds)
        notes.write_text(repr(time.time()))
        with suppress(ProcessLookupError):
            os.kill(target, number)
        os._exit(0)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _until_none_is_left(size: int) -> Iterator[None]:
    """As often as so many bytes can be had."""
    with suppress(MemoryError):
        while True:
            bytearray(size)
            yield


class CommandLine:
    """Forks a process for each run.

    Its processes have mounts of their own where the machine allows that to this user, by a namespace.

    Args:
        folder: for what runs print.
        tokenizer: its folder; what reading it imports is imported once.
    """

    def __init__(self, folder: Path, tokenizer: Path) -> None:
        self.folder, self.tokenizer = folder, tokenizer
        self._runs = 0
        apart = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"]), "--"]
        self.may_mount = (
            subprocess.run([*apart, "mount", "-t", "tmpfs", "x", folder], capture_output=True).returncode == 0
        )
        self._server = subprocess.Popen(
            [*(apart if self.may_mount else ()), sys.executable, "-m", "tests.pipeline.faults", str(tokenizer)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert self._server.stdout is not None
        assert self._server.stdout.readline() == "ready\n"

    def start(
        self,
        *arguments: Any,
        out: Path,
        fault: Fault | None = None,
        limits: Mapping[str, int] | None = None,
        environment: Mapping[str, str] | None = None,
        in_files: bool = False,
    ) -> Path:
        """Begin a run, with arrays of any size in files if `in_files`; where its notes go."""
        self._runs += 1
        notes = self.folder / f"run{self._runs}"
        request = {
            "arguments": [str(one) for one in arguments], "out": str(out), "notes": str(notes),
            "fault": asdict(fault) if fault else None, "limits": limits or {}, "environment": environment or {},
            "in_files": in_files,
        }  # fmt: skip
        notes.unlink(missing_ok=True)
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return notes

    def end(self, notes: Path) -> Ran:
        """Wait for the run to end."""
        assert self._server.stdout is not None
        answer = json.loads(self._server.stdout.readline())
        is_list = answer.pop("is_list")
        events = [tuple(json.loads(line)) for line in notes.read_text().splitlines()] if is_list else []
        return Ran(**answer, fired=notes.exists() and not is_list, events=events)

    def run(self, *arguments: Any, **settings: Any) -> Ran:
        """A run from begin to end; settings as of `start`."""
        return self.end(self.start(*arguments, **settings))

    def shell(self, command: str) -> None:
        """Run a command where the runs are, such as a mount that only they see."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps({"shell": command}) + "\n")
        self._server.stdin.flush()
        assert self._server.stdout.readline() == "{}\n"

    def seen(self, path: Path) -> Path:
        """A path as the runs see it."""
        return Path(f"/proc/{self._server.pid}/root{path}")

    def close(self) -> None:
        """End the server, which does no work now; other forks of this process may hold its pipe open."""
        self._server.kill()
        self._server.communicate()


def _serve() -> None:
    import boto3  # noqa: F401
    import multistorageclient.providers.s3
    import pyarrow.parquet  # noqa: F401

    from energon_packed import ChatEncoder
    from tests.internals import cli, main
    from tests.storage import retry_at_once

    for name in ("pack", "lengths", "verify"):
        cli.get_command(None, name)
    retry_at_once(multistorageclient.retry)
    ChatEncoder.from_pretrained(sys.argv[1]).renderer.template.prepare()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    gc.collect()
    gc.freeze()  # else each run searches these objects for garbage, and so copies their pages
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        begin = time.monotonic()
        if "shell" in request:
            subprocess.run(request["shell"], shell=True, check=True)
            print("{}", flush=True)
            continue
        pipes = {name: os.pipe() for name in ("out", "err")}  # not files, which a limit on files would hit
        pid = os.fork()
        if pid == 0:
            _be_the_run(main, request, {name: pipes[name][1] for name in pipes})
        status, orphans = _wait(pid, begin + _LIMIT)
        fault = request["fault"]
        answer = {"status": status, "orphans": orphans, "seconds": time.monotonic() - begin}
        answer |= {name: _printed(*ends) for name, ends in pipes.items()}
        print(json.dumps(answer | {"is_list": bool(fault and fault["at"] < 0)}), flush=True)
    os._exit(0)


def _printed(end: int, start: int) -> str:
    """What is in a pipe: 64 KiB at most, as nobody reads while the run writes."""
    os.close(start)
    with open(end, "rb") as stream:
        return stream.read().decode(errors="replace")


def _be_the_run(main: Any, request: dict[str, Any], outputs: dict[str, int]) -> None:
    from tests.internals import arrays, files

    os.setsid()
    notes = request["notes"]
    for descriptor, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, outputs["out"]), (2, outputs["err"])):
        os.dup2(source, descriptor)
    os.environ.update(request["environment"])
    tempfile.tempdir = None
    for name, value in request["limits"].items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
    if request["in_files"]:
        arrays.BLOCK, files._IN_MEMORY = 5, 1
    if request["fault"]:
        Hook(Fault(**request["fault"]), Path(request["out"]), Path(notes))
    sys.argv = ["energon-packed", *request["arguments"]]
    status: Any = 1
    try:
        main()
        status = 0
    except SystemExit as ended:
        status = ended.code
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status or 0)


def _wait(pid: int, deadline: float) -> tuple[int, bool]:
    """Exit status of a process, and whether others of its group were left."""
    status: int | None = None
    while time.monotonic() < deadline:
        try:
            found, code = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return (1 if status is None else status), False
        if found == pid:
            status, deadline = os.waitstatus_to_exitcode(code), min(deadline, time.monotonic() + 60)
        elif found == 0:
            time.sleep(0.003)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    with suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)
    return (-999 if status is None else status), True


if __name__ == "__main__":
    _serve()
