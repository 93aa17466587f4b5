"""A run that is killed or interrupted, at any moment, leaves nothing behind that one more run does not complete.

Moments are the things that a run does to its disk, drawn at random in every stage. `ENERGON_PACKED_KILLS=40` is the
long form.
"""

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.pipeline.faults import ROOT, Fault
from tests.pipeline.undisturbed import STAGES, Build, contents, leftovers, stage_of

MOMENTS = int(os.environ.get("ENERGON_PACKED_KILLS", "6"))
KILLED = re.compile(
    r"error: worker process \d+ was killed by signal 9 \(SIGKILL\) while (measuring input \d from \d+ to \d+|writing "
    r"s-\d+\.tar): perhaps the machine ran out of memory; use fewer --workers or more memory, and run "
    r"it again: completed work is reused\n"
)
INTERRUPTED = "\nerror: interrupted{}; run the same command again to resume\n"
"""The first line end follows the `^C` of a terminal."""


def moments(build: Build, kinds: dict[str, str], seed: int) -> list[Fault]:
    """Random moments, as many in every stage, for each kind in turn.

    Args:
        build: lists what a run does.
        kinds: kinds of faults, and the process that they happen in: `parent`, `worker` or `any`.
        seed: of the draw.
    """
    rng = random.Random(seed)
    found = []
    for number in range(MOMENTS):
        kind, role = list(kinds.items())[number % len(kinds)]
        of_role = [event for event in build.events if role in (event[0], "any")]
        stages = [stage for stage in STAGES if any(stage_of(path) == stage for _, _, path in of_role)]
        stage = stages[(number // len(kinds) + number) % len(stages)]
        role = rng.choice([event for event in of_role if stage_of(event[2]) == stage])[0]
        matching = [event for event in build.events if event[0] == role and re.search(STAGES[stage], event[2])]
        at = rng.randrange(len(matching) if role == "parent" else max(1, len(matching) // 3))
        found.append(Fault(at=at, role=role, path=STAGES[stage], kind=kind))
    return found


@pytest.mark.parametrize("number", range(MOMENTS))
def test_after_a_kill_one_run_gives_the_same_bytes(
    undisturbed: Build, undisturbed_tokens: Build, undisturbed_videos: Build, tmp_path: Path, number: int
) -> None:
    undisturbed = (undisturbed, undisturbed_tokens, undisturbed_videos)[number % 3]
    kinds = {"kill": "any", "kill_all": "any", "kill_parent": "worker"}
    fault = moments(undisturbed, kinds, 1)[number]
    ran = undisturbed.run(tmp_path / "out", fault=fault)
    assert ran.fired, fault
    assert not ran.orphans
    undisturbed.check_nothing_half_written(tmp_path / "out")
    if fault.kind == "kill" and fault.role == "worker":
        assert ran.status == 1
        assert KILLED.fullmatch(ran.err), ran.err
        assert not leftovers(tmp_path / "out")
    else:
        assert (ran.status, ran.err) == (-signal.SIGKILL, "")
    undisturbed.check_resumed(tmp_path / "out")


ARRAY = r"^/\.work/measure-[^/]*$"
"""The folder in which the driver makes files without names."""


@pytest.fixture(scope="module")
def arrays(undisturbed_tokens: Build, tmp_path_factory: pytest.TempPathFactory) -> int:
    """Number of the arrays of a run that has all of them in files, and the same result."""
    out = tmp_path_factory.mktemp("arrays") / "out"
    ran = undisturbed_tokens.run(out, fault=Fault(), in_files=True)
    assert (ran.status, contents(out)) == (0, undisturbed_tokens.files)
    return sum(event == "open" and re.search(ARRAY, path) is not None for _, event, path in ran.events)


@pytest.mark.parametrize("number", range(MOMENTS // 2))
def test_a_kill_leaves_nothing_of_arrays_in_files(
    undisturbed_tokens: Build, arrays: int, tmp_path: Path, number: int
) -> None:
    """At the first array, the last one, and others between them, from the end of `measure` to `index`."""
    assert arrays > 20
    out, temporary = tmp_path / "out", tmp_path / "temporary"
    temporary.mkdir()
    settings: dict[str, Any] = {"in_files": True, "environment": {"TMPDIR": str(temporary)}}
    fault = Fault(at=number * (arrays - 1) // (MOMENTS // 2 - 1), event="open", path=ARRAY, kind="kill")
    ran = undisturbed_tokens.run(out, fault=fault, **settings)
    assert (ran.fired, ran.status) == (True, -signal.SIGKILL)
    assert not [path for path in out.rglob("*.tmp") if "/measure-" in str(path)]
    undisturbed_tokens.check_nothing_half_written(out)
    undisturbed_tokens.check_resumed(out, **settings)
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("stage", ["plan", "write", "index"])
def test_a_kill_in_each_stage_with_arrays_in_files(undisturbed_tokens: Build, tmp_path: Path, stage: str) -> None:
    """At the first file of each stage after `measure`, which makes no array before its end."""
    fault = Fault(at=0, path=STAGES[stage], kind="kill")
    ran = undisturbed_tokens.run(tmp_path / "out", fault=fault, in_files=True)
    assert (ran.fired, ran.status) == (True, -signal.SIGKILL)
    undisturbed_tokens.check_nothing_half_written(tmp_path / "out")
    undisturbed_tokens.check_resumed(tmp_path / "out", in_files=True)


@pytest.mark.parametrize("number", range(MOMENTS))
def test_interrupts_end_in_order(undisturbed: Build, tmp_path: Path, number: int) -> None:
    kinds = {"interrupt": "any", "interrupt_twice": "any", "terminate": "any"}
    fault = moments(undisturbed, kinds, 2)[number]
    ran = undisturbed.run(tmp_path / "out", fault=fault)
    status, by = (143, " by SIGTERM") if fault.kind == "terminate" else (130, "")
    assert (ran.fired, ran.status, ran.err, ran.orphans) == (True, status, INTERRUPTED.format(by), False), fault
    assert not leftovers(tmp_path / "out")
    undisturbed.check_nothing_half_written(tmp_path / "out")
    undisturbed.check_resumed(tmp_path / "out")


def test_lengths_end_in_order(undisturbed: Build, tmp_path: Path) -> None:
    """Another command with workers; what it measured is used by `pack`."""
    given = ["lengths", *undisturbed.arguments(tmp_path / "out")[1:6], "--workers", 2, *undisturbed.options]
    fault = Fault(at=2, role="worker", event="os.fsync", kind="interrupt_twice")
    ran = undisturbed.command_line.run(*given, out=tmp_path / "out", fault=fault)
    assert (ran.status, ran.err, ran.orphans) == (130, INTERRUPTED.format(""), False)
    assert not leftovers(tmp_path / "out")
    assert undisturbed.command_line.run(*given, out=tmp_path / "out").status == 0
    undisturbed.check_resumed(tmp_path / "out")


def test_the_command_itself_ends_by_ctrl_c(undisturbed: Build, tmp_path: Path) -> None:
    """A new interpreter, the signal to the process group, as a terminal sends it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "energon_packed", *map(str, undisturbed.arguments(tmp_path / "out"))],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True, cwd=ROOT,
    )  # fmt: skip
    while not list(tmp_path.glob("out/.work/measure-*/*.arrow")) and process.poll() is None:
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGINT)
    assert process.communicate(timeout=120)[1] == INTERRUPTED.format("")
    assert process.returncode == 130
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    assert not leftovers(tmp_path / "out")
    undisturbed.check_resumed(tmp_path / "out")


def test_the_folder_of_a_killed_run_can_be_used_at_once(undisturbed: Build, tmp_path: Path) -> None:
    """Its workers have the lock for some milliseconds more."""
    undisturbed.run(tmp_path / "out", fault=Fault(at=3, role="worker", kind="kill_parent"))
    undisturbed.check_resumed(tmp_path / "out")
