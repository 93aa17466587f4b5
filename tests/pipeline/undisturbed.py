"""Build: what a run without a fault writes, and runs over the same input that must come to it."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from tests.pipeline.faults import CommandLine, Fault, Ran

STAGES = {
    "start": r"^/\.work$|lock|owner\.json|^$",
    "measure": r"/\.work/measure-",
    "plan": r"/\.?(lengths\.parquet|rejects\.jsonl)",
    "write": r"/\.work/(\.run\.json|write-)|/webdataset(/\..*\.tar.*)?$",
    "index": r"/\.nv-meta|/media(-index|\.yaml)",
}
"""Which paths of the output folder each stage touches, as regular expressions."""


@dataclass(frozen=True, kw_only=True)
class Build:
    """The runs over one input.

    Attributes:
        command_line: runs them.
        folder: of the input.
        tokenizer: its folder.
        files: content of every file of the undisturbed result.
        events: what that run did to its output folder.
        options: of the runs.
    """

    command_line: CommandLine
    folder: Path
    tokenizer: Path
    files: dict[str, bytes]
    events: list[tuple[str, str, str]]
    options: tuple[str, ...] = ()

    @classmethod
    def made(cls, command_line: CommandLine, folder: Path, tokenizer: Path, flavor: str, *more: str) -> "Build":
        """Run without a fault; `more` are options of all runs."""
        given = {"command_line": command_line, "folder": folder, "tokenizer": tokenizer}
        build = cls(**given, files={}, events=[], options=("--sample-class", flavor, *more))
        out = folder / f"out-{flavor}"
        ran = build.run(out, fault=Fault())
        assert (ran.status, ran.err, ran.orphans) == (0, "", False)
        build.files.update(contents(out))
        build.events.extend(ran.events)
        assert {stage_of(path) for _, _, path in ran.events} == set(STAGES)
        assert len(chunks(out)) == 4
        assert sum(name.endswith(".tar") for name in build.files) > 4
        return build

    def arguments(self, out: Path, *more: Any) -> list[Any]:
        """Of the command line."""
        settings = ("--seq-len", 512, "--workers", 2, "--max-packs-per-shard", 3, "--shard-prefix", "s")
        given = self.folder / "data" / "part*.jsonl"
        return ["pack", given, "-o", out, "--tokenizer", self.tokenizer, *settings, *self.options, *more]

    def run(self, out: Path, *more: Any, **settings: Any) -> Ran:
        """Pack into a folder; settings as of `CommandLine.start`."""
        return self.command_line.run(*self.arguments(out, *more), **{"out": out, **settings})

    def check_resumed(self, out: Path, *more: Any, **settings: Any) -> None:
        """One more run completes what another one left: the same bytes, and nothing is done again that was done."""
        there, done = chunks(out), shards_done(out)
        ran = self.run(out, *more, **settings)
        assert (ran.status, ran.err, ran.orphans) == (0, "", False)
        assert contents(out) == self.files
        counters = json.loads((out / "webdataset/.nv-meta/packing.json").read_bytes())["counters"]
        shards = sum(name.endswith(".tar") for name in self.files)
        assert counters["reused"] == sum(there.values())
        assert counters["measured"] == 48 - sum(there.values())
        assert counters["shards_reused"] == done
        assert counters["shards_written"] == shards - done

    def check_nothing_half_written(self, out: Path) -> None:
        """Every file that has its final name is what the undisturbed run has under that name."""
        for name, content in contents(out).items():
            assert name.endswith(".tmp") or content == self.files[name], name


def stage_of(path: str) -> str:
    """The stage that touches a path; the last one that may."""
    return [name for name, pattern in STAGES.items() if re.search(pattern, path)][-1]


def contents(out: Path) -> dict[str, bytes]:
    """Every file of a result; packing.json without the account of the run's own work."""
    files = [path for path in out.rglob("*") if path.is_file() and ".work" not in path.parts]
    found = {str(path.relative_to(out)): path.read_bytes() for path in files}
    name = "webdataset/.nv-meta/packing.json"
    if name in found:
        manifest = json.loads(found[name])
        del manifest["counters"], manifest["tokenizer_engine"]
        found[name] = json.dumps(manifest).encode()
    return found


def chunks(out: Path) -> dict[str, int]:
    """Records of every measured chunk in the restart state."""
    files = out.glob(".work/measure-*/[0-9]*.arrow")
    return {file.name: pa.ipc.open_file(pa.memory_map(str(file))).read_all().num_rows for file in files}


def shards_done(out: Path) -> int:
    """Shards that the restart state calls finished."""
    return len(list(out.glob(".work/write-*/[!.]*.json")))


def leftovers(out: Path) -> list[str]:
    """Temporary files, and what says that a run holds the folder."""
    return [str(path) for path in out.rglob("*") if path.name.endswith(".tmp") or path.name == "owner.json"]
