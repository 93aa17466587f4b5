"""A record shape, a container and a flavor of one's own, one class each, all the way: pack, load, inspect, verify,
report, blend."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from click.testing import CliRunner

from energon_packed import (
    ChatEncoder,
    Codec,
    Conversation,
    FormatError,
    Message,
    PackedDataset,
    PartialConversation,
    RecordFormat,
    Source,
    SourceRecord,
    StoredSample,
    get_packed_loader,
    pack,
    register_codec,
    register_record_format,
    register_source,
    steps_per_epoch,
)
from tests.internals import CODECS, RECORD_FORMATS, SOURCES, cli, make_blend, write_metadataset


class Quiz(RecordFormat):
    """{"quiz": question, "solution": answer}."""

    key = "quiz"

    def read(self, record: Any, media: Any) -> PartialConversation:
        """One question and its answer."""
        return PartialConversation(
            messages=[Message("user", record["quiz"]), Message("assistant", record["solution"])]
        )


class TextFile(Source):
    """Lines `question = answer`."""

    suffixes: ClassVar[tuple[str, ...]] = (".quiz",)

    def extent(self) -> int:
        """Lines."""
        return len(self.data.read_text().splitlines())

    def read(self, address: int, size: int) -> SourceRecord:
        """One line."""
        question, answer = self.data.read_text().splitlines()[address].split(" = ")
        return SourceRecord(address, 0, {"id": f"q{address}", "quiz": question, "solution": answer})


class QuizCodec(Codec):
    """Pairs of texts in one json list."""

    sample_class = "QuizSample"

    def matches(self, raw: Any) -> bool:
        """By the name of the part."""
        return "quiz.json" in raw

    def write(self, samples: Sequence[StoredSample]) -> list[tuple[str, bytes]]:
        """One part."""
        rows = [[s.conversation.id, s.length, *(m.content for m in s.conversation.messages)] for s in samples]
        return [("quiz.json", json.dumps(rows).encode())]

    def read(self, raw: Any) -> list[StoredSample]:
        """The pairs."""
        return [
            StoredSample(
                conversation=Conversation(id=ident, messages=(Message("user", ask), Message("assistant", answer))),
                length=length,
            )
            for ident, length, ask, answer in json.loads(raw["quiz.json"])
        ]

    lengths_part = "quiz.json"

    def lengths(self, raw: Any) -> list[int | None]:
        """Recorded lengths."""
        return [row[1] for row in json.loads(raw["quiz.json"])]

    def part_filter(self, part: str) -> bool:
        """The one part."""
        return part == "quiz.json"


@pytest.fixture
def registered() -> Iterator[None]:
    register_record_format(Quiz)
    register_source(TextFile)
    register_codec(QuizCodec)
    yield
    RECORD_FORMATS.pop(0)
    SOURCES.pop(0)
    CODECS.pop("QuizSample")


def test_one_class_each_is_enough(registered: None, tokenizer_dir: Path, encoder: ChatEncoder, tmp_path: Path) -> None:
    for name in ("a", "b"):
        lines = [f"What is {n} plus {n}? = {2 * n}, I think, {name}." for n in range(200)]
        (tmp_path / f"{name}.quiz").write_text("\n".join(lines))
        result = pack(
            tmp_path / f"{name}.quiz",
            output_dir=tmp_path / name,
            tokenizer=tokenizer_dir,
            seq_len=512,
            sample_class="QuizSample",
            shard_prefix=name,
            workers=2,
        )
        assert (result.manifest.packed, result.manifest.rejects) == (200, {})
    out = tmp_path / "a"

    batches = list(get_packed_loader(out, encoder, epochs=1, num_workers=2))
    assert sorted(name for batch in batches for name in batch.ids) == sorted(f"q{n}" for n in range(200))
    assert len(batches) == steps_per_epoch(out, num_workers=2)
    dataset = PackedDataset(out, encoder)
    assert sum(len(dataset[pack]) for pack in range(len(dataset))) == 200
    assert dataset.lengths.sum() == result.manifest.tokens

    run = CliRunner().invoke
    shown = run(cli, ["inspect", str(out)])
    assert "QuizSample" in shown.output
    assert "I think, a." in shown.output
    assert "<|im_start|>" in run(cli, ["inspect", str(out), "--tokens"]).output
    checked = run(cli, ["verify", str(out)])
    assert "all checks passed" in checked.output, checked.output
    assert run(cli, ["report", str(out), "-o", str(tmp_path / "r.html")]).exit_code == 0
    assert "I think, a." in (tmp_path / "r.html").read_text()

    write_metadataset(make_blend([(out, 1), (tmp_path / "b", 3)]), tmp_path / "mix.yaml")
    blended = iter(get_packed_loader(tmp_path / "mix.yaml", encoder, num_workers=0))
    assert {next(blended).__key__[0][0] for _ in range(40)} == {"a", "b"}


def test_damage_of_a_pack_is_named_for_a_flavor_of_ones_own() -> None:
    for read in (QuizCodec().read, QuizCodec().lengths):
        with pytest.raises(FormatError, match=r"a_1 is damaged, or no QuizSample \(KeyError: 'quiz.json'\)"):
            read({"__key__": "a_1"})
        with pytest.raises(FormatError, match="is damaged, or no QuizSample"):
            read({"__key__": "a_1", "quiz.json": b"[1]"})
