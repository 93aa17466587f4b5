"""Disks that are full, fail, are read-only or vanish, inputs that change, and processes that may have little.

Each costs one line that names the file, what failed and the remedy; nothing half-written has a final name, and one
more run comes to the bytes of an undisturbed one. Faults are drawn at random from everything that a run does to its
disk; `ENERGON_PACKED_FAULTS=500` is the long form.
"""

import errno
import json
import os
import random
import re
import shutil
import time
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

from tests.internals import Folder
from tests.pipeline.faults import Fault, Ran
from tests.pipeline.undisturbed import Build, contents, leftovers
from tests.processes import run_python

FAULTS = int(os.environ.get("ENERGON_PACKED_FAULTS", "12"))
ERRORS = {
    "open": ("ENOSPC", "EACCES", "EROFS", "EDQUOT", "ESTALE", "EMFILE", "ENFILE"),
    "os.mkdir": ("ENOSPC", "EROFS", "EACCES"),
    "os.rename": ("ESTALE", "EXDEV", "EIO", "ENOSPC", "EACCES", "EINTR"),
    "os.fsync": ("EIO", "ENOSPC", "EDQUOT", "EINTR"),
    "os.remove": ("EIO", "EACCES", "ESTALE"),
    "os.rmdir": ("EIO",),
    "shutil.rmtree": ("EIO",),
    "fcntl.flock": ("ENOLCK", "ENOTSUP", "EAGAIN", "EIO", "ENOSYS"),
}
REMEDY = re.compile(r"[;.] (.*\b(run|use|raise|check|free|wait|let|remove|stop|delete|close)\b.*)", re.IGNORECASE)


def check_line(ran: Ran) -> None:
    """One line with a remedy, and no other process."""
    assert not ran.orphans
    assert ran.status == 1, ran
    assert re.fullmatch(r"error: [^\n]+\n", ran.err), ran.err
    assert REMEDY.search(ran.err), ran.err
    assert ".tmp" not in ran.err, ran.err


def drawn(build: Build, seed: int) -> list[tuple[str, str, int, str]]:
    """(role, event, number of it in its process, error) of random events; where `FAULTS` allows, of all of them."""
    found = []
    seen: dict[tuple[str, str], int] = {}
    for role, event, _ in build.events:
        number = seen[role, event] = seen.get((role, event), -1) + 1
        if role == "parent" or number < sum(one[:2] == (role, event) for one in build.events) // 3:
            found += [(role, event, number, name) for name in ERRORS[event]]
    random.Random(seed).shuffle(found)
    by_event = [[one for one in found if one[1] == event] for event in ERRORS]
    turns = [one for group in zip_longest(*by_event) for one in group if one is not None]
    return turns[:FAULTS]


@pytest.mark.parametrize("number", range(FAULTS))
def test_calls_that_fail(undisturbed: Build, tmp_path: Path, number: int) -> None:
    faults = drawn(undisturbed, 3)
    if number >= len(faults):
        return
    role, event, at, name = faults[number]
    fault = Fault(at=at, role=role, event=event, kind="fail", errno=getattr(errno, name), forever=number % 2 == 0)
    ran = undisturbed.run(tmp_path / "out", fault=fault)
    assert ran.fired, faults[number]
    print(faults[number], fault.forever, ran.status, ran.err)
    if ran.status == 0:  # what could not be removed is left, and a folder is there already
        assert event in ("os.remove", "os.rmdir", "shutil.rmtree", "os.mkdir"), faults[number]
        assert (ran.err, ran.orphans) == ("", False)
    else:
        check_line(ran)
        undisturbed.check_nothing_half_written(tmp_path / "out")
    undisturbed.check_resumed(tmp_path / "out")


@pytest.mark.parametrize("number", range(max(4, FAULTS // 3)))
def test_writes_that_fail(undisturbed: Build, tmp_path: Path, number: int) -> None:
    """From some moment on the kernel refuses to let files grow beyond a size, whatever library writes them."""
    rng = random.Random(number)
    role = ("parent", "worker")[number % 2]
    count = sum(one[0] == role for one in undisturbed.events) // (1 if role == "parent" else 3)
    fault = Fault(at=rng.randrange(count), role=role, kind="no_space", limit=rng.choice([0, 1, 1000, 10_000]))
    ran = undisturbed.run(tmp_path / "out", fault=fault)
    assert ran.fired, fault
    if ran.status:
        check_line(ran)
        assert "File too large; the limit of a file is " in ran.err or "SQLite: disk I/O error; check" in ran.err
        undisturbed.check_nothing_half_written(tmp_path / "out")
    assert not leftovers(tmp_path / "out")
    undisturbed.check_resumed(tmp_path / "out")
    assert number or ran.status or fault.at


def test_a_disk_of_any_size(undisturbed: Build, tmp_path: Path) -> None:
    """A real file system that is full, and then larger and larger; and one that is read-only."""
    if not undisturbed.command_line.may_mount:
        pytest.skip("this user may mount no tmpfs, not even in a namespace; the other tests have the same faults")
    shell, out = undisturbed.command_line.shell, tmp_path / "disk" / "out"
    seen = undisturbed.command_line.seen(out)
    out.parent.mkdir()
    needed = sum(map(len, undisturbed.files.values())) >> 10
    shell(f"mount -t tmpfs -o size=4k,mode=777 disk {out.parent}")
    for size in (4, 12, 28, 60, needed // 4, needed // 2, needed - 40, needed + 20):
        shell(f"mount -o remount,size={size}k {out.parent}")
        ran = undisturbed.run(out)
        print(size, ran.err)
        check_line(ran)
        assert "No space left on device; free some space" in ran.err or "the tars need about" in ran.err
        assert not leftovers(seen)
        undisturbed.check_nothing_half_written(seen)
    shell(f"mount -o remount,ro {out.parent}")
    ran = undisturbed.run(out)
    check_line(ran)
    assert "Read-only file system; use a folder that can be written" in ran.err
    shell(f"mount -o remount,rw,size=64m {out.parent}")
    assert (undisturbed.run(out).status, contents(seen)) == (0, undisturbed.files)
    shell(f"umount {out.parent}")


def stopped(build: Build, out: Path, path: str, then: Callable[[], None], *more: str, role: str = "worker") -> Ran:
    """A run in which something happens while it is at a path."""
    notes = build.command_line.start(
        *build.arguments(out, *more), out=out, fault=Fault(at=0, role=role, path=path, kind="stop")
    )
    deadline = time.monotonic() + 60
    try:
        while not Path(f"{notes}.stopped").exists() and time.monotonic() < deadline:
            time.sleep(0.003)
        then()
    finally:
        Path(f"{notes}.go").touch()
        ran = build.command_line.end(notes)
    return ran


def removed(folder: Path) -> None:
    """Remove a folder that another worker may write in."""
    while folder.exists():
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize(
    ("role", "path", "folder"),
    [
        ("worker", r"measure-", "."),
        ("worker", r"/\.s-000003\.tar\.", "."),
        ("worker", r"/\.s-000003\.tar\.", "webdataset"),
        ("parent", r"/\.sample_loader", "."),
        ("parent", r"/\.sample_loader", ".work"),
    ],
)
def test_the_folder_is_removed_meanwhile(
    undisturbed: Build, tmp_path: Path, role: str, path: str, folder: str
) -> None:
    out = tmp_path / "out"
    ran = stopped(undisturbed, out, path, lambda: removed(out / folder), role=role)
    print(ran.err)
    check_line(ran)
    assert re.search("was removed or replaced during|is gone since it was written|was removed during", ran.err)
    removed(out)
    undisturbed.check_resumed(out)


def test_a_folder_that_is_removed_while_it_is_listed_has_no_leftovers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = Folder(tmp_path)
    output.work.mkdir()
    list_folder = os.scandir

    def remove_first(path: Any = ".") -> Any:
        monkeypatch.undo()
        output.work.rmdir()
        return list_folder(path)

    monkeypatch.setattr(os, "scandir", remove_first)
    output.remove_leftovers()


@pytest.mark.parametrize(
    ("path", "name", "change", "expected"),
    [
        (
            r"measure-",
            "part3.jsonl",
            lambda old: old + old[: old.index(b"\n") + 1],
            r"changed while it was in use \(\d+ bytes",
        ),
        (r"measure-", "part3.jsonl", lambda old: old[:700], r"before, 700 now\); let its writer finish"),
        (r"\.s-000000\.tar", "part1.jsonl", lambda old: old + b"{}\n", r"changed while it was in use \(\d+ bytes"),
        (r"\.s-000000\.tar", "part1.jsonl", lambda old: old[:-200], r"changed while it was in use \(\d+ bytes"),
        (r"\.s-000000\.tar", "part1.jsonl", lambda old: old.replace(b"e", b"a"), r"in use \(by its time\)"),
        (r"\.s-000000\.tar", "part1.jsonl", None, r"part1.jsonl cannot be read any more .*; let its writer finish"),
        (r"\.s-000000\.tar", "images", lambda old: old + b"\0", r"changed since it was measured \(its media has"),
        (r"\.s-000000\.tar", "images", lambda old: old[:-1] + b"\0", r"media was replaced"),
        (r"\.s-000000\.tar", "images", None, r"changed since it was measured"),
    ],
)
def test_the_input_changes_meanwhile(
    undisturbed: Build, tmp_path: Path, path: str, name: str, change: Callable[[bytes], bytes] | None, expected: str
) -> None:
    given = undisturbed.folder / "data" / name
    files = sorted(one for one in given.iterdir()) if given.is_dir() else [given]
    before = {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in files}

    def disturb() -> None:
        for file, (content, _) in before.items():
            if change is None:
                file.unlink()
            elif given.is_dir():  # another worker may read it meanwhile: it finds one of two contents
                new = tmp_path / file.name
                new.write_bytes(change(content))
                new.replace(file)
            else:
                file.write_bytes(change(content))

    try:
        ran = stopped(undisturbed, tmp_path / "out", path, disturb)
    finally:
        for file, (content, changed) in before.items():
            file.write_bytes(content)
            os.utime(file, ns=(changed, changed))
    check_line(ran)
    assert re.search(expected, ran.err), ran.err
    undisturbed.check_nothing_half_written(tmp_path / "out")
    assert not (tmp_path / "out" / "webdataset" / ".nv-meta").exists()
    undisturbed.check_resumed(tmp_path / "out")


@pytest.mark.parametrize("stage", [r"measure-", r"\.s-000001\.tar"])
def test_a_worker_without_memory(undisturbed: Build, tmp_path: Path, stage: str) -> None:
    ran = undisturbed.run(tmp_path / "out", fault=Fault(at=1, role="worker", path=stage, kind="no_memory"))
    print(ran.err)
    check_line(ran)
    assert re.match(r"error: (memory ran out in )?worker process \d+", ran.err)
    undisturbed.check_resumed(tmp_path / "out")


def test_folders_for_temporary_and_cached_files_may_be_missing(undisturbed: Build, tmp_path: Path) -> None:
    nowhere = {"TMPDIR": "/nowhere", "XDG_CACHE_HOME": "/proc/nowhere", "HOME": "/nowhere"}
    ran = undisturbed.run(tmp_path / "out", environment=nowhere)
    assert (ran.status, ran.err, contents(tmp_path / "out")) == (0, "", undisturbed.files)
    given = ("lengths", undisturbed.folder / "data" / "part0.jsonl", "--tokenizer", undisturbed.tokenizer)
    ran = undisturbed.command_line.run(*given, "--workers", 1, out=tmp_path, environment=nowhere)
    assert (ran.status, ran.err) == (0, "")


FEW_FILES = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from tests.internals import main
folder, tokenizer = sys.argv[1:]
sys.argv = ["energon-packed", "pack", f"{folder}/in", "-o", f"{folder}/out", "--tokenizer", tokenizer, "--quiet",
            "--workers", "3", "--seq-len", "64", "--max-packs-per-shard", "1", "--sample-class", "PackedTokensSample"]
main()
sys.argv = ["energon-packed", "verify", f"{folder}/out", "--tokenizer", tokenizer, "--workers", "3", "--quiet"]
main()
from energon_packed import PackedDataset, get_packed_loader
dataset = PackedDataset(f"{folder}/out")
samples = [sample for pack in range(len(dataset)) for sample in dataset[pack]]
loader = get_packed_loader(f"{folder}/out", epochs=1, num_workers=0)
ids = [one for batch in loader for one in batch.ids]
print(len(dataset), len(samples), sorted(set(ids)) == sorted(f"r{n}" for n in range(80)))
"""


def test_few_open_files_suffice(undisturbed: Build, tmp_path: Path) -> None:
    """80 inputs, 80 shards and `ulimit -n 64`: pack, verify and both loaders; with 10, one line."""
    (tmp_path / "in").mkdir()
    for number in range(80):
        record = {"id": f"r{number}", "prompts": ["Repeat."], "captions": ["kettle " * 30]}
        (tmp_path / "in" / f"{number:03}.jsonl").write_text(json.dumps(record) + "\n")
    ran = run_python(FEW_FILES, tmp_path, undisturbed.tokenizer)
    assert ran.stdout.split("\n")[-2:] == ["80 80 True", ""], ran.stderr
    few = undisturbed.run(tmp_path / "few", limits={"NOFILE": 10})
    check_line(few)
    assert "this process may open 10 files; raise the limit, such as by ulimit -n" in few.err
