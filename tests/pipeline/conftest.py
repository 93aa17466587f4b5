"""Builds of a few records, and runs of the command line with faults."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from energon_packed import PackOptions, PackResult, pack
from tests.internals import write_dataset, write_tokenizer
from tests.pipeline.faults import CommandLine
from tests.pipeline.undisturbed import Build


@pytest.fixture
def build(tmp_path: Path, tokenizer_dir: Path) -> Any:
    """Packs a list of records (objects, or lines as they are); without one, the records of the last call again.

    The file is not touched when its content stays the same, as a user would run the same command again.
    """

    def run(records: list[Any] | None = None, **options: Any) -> PackResult:
        data = tmp_path / "data.jsonl"
        if records is not None:
            lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
            text = "".join(line + "\n" for line in lines)
            if not data.exists() or data.read_text() != text:
                data.write_text(text)
        settings = {
            "inputs": (str(data),),
            "output_dir": tmp_path / "out",
            "tokenizer": tokenizer_dir,
            "seq_len": 256,
            "workers": 1,
            "unpacked": options.get("sample_class") == "MultiMixQASample",
            "max_reject_rate": 1,
        }
        return pack(PackOptions(**{**settings, **options}))

    return run


@pytest.fixture(scope="session")
def command_line(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandLine]:
    """Runs with faults; in its folder are 48 conversations with images in 4 files, and a tokenizer."""
    yield from _command_line(tmp_path_factory.mktemp("faults"))


def _command_line(folder: Path, *, videos: bool = False) -> Iterator[CommandLine]:
    demo = write_dataset(folder / "data", records=48, broken=0, videos=videos)
    tokenizer = write_tokenizer(folder / "tokenizer", demo.texts, videos=videos)
    lines = demo.jsonl.read_text().splitlines(keepends=True)
    for number in range(4):
        (folder / "data" / f"part{number}.jsonl").write_text("".join(lines[12 * number : 12 * number + 12]))
    line = CommandLine(folder, tokenizer)
    yield line
    line.close()


@pytest.fixture(scope="session")
def undisturbed_videos(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Build]:
    """Of 48 conversations, 14 of which have videos, packed without a fault."""
    folder = tmp_path_factory.mktemp("videos")
    for line in _command_line(folder, videos=True):
        options = ("--seq-len", "1024", "--max-packs-per-shard", "1")
        yield Build.made(line, folder, line.tokenizer, "PackedMultiMixQASample", *options)


@pytest.fixture(scope="session")
def undisturbed(command_line: CommandLine) -> Build:
    """Packed without a fault: what any other run must come to."""
    return Build.made(command_line, command_line.folder, command_line.tokenizer, "PackedCaptioningSample")


@pytest.fixture(scope="session")
def undisturbed_tokens(command_line: CommandLine) -> Build:
    """The same, tokenized offline."""
    return Build.made(command_line, command_line.folder, command_line.tokenizer, "PackedTokensSample")
