"""Settings of records reach training: planned lengths, packs of every flavor, and packs that are packed again."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner
from transformers import AutoTokenizer

from energon_packed import ChatEncoder, EncodedSample, PackedDataset, normalize, pack
from tests.encoding.test_record_settings import png
from tests.internals import cli

CLASSES = ("PackedCaptioningSample", "PackedMultiMixQASample", "PackedTokensSample", "MultiMixQASample")
# A variable changes the prompt, as `enable_thinking` does in the template of Qwen3.
TEMPLATE = """{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and loop.last and tone is defined %}({{ tone }})
{% endif %}{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if tone is defined %}({{ tone }})
{% endif %}{% endif %}"""


def turns(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


BOXES = {"ref": ["the dog"], "bbox": [[10, 20, 300, 400.5]], "image_id": [1]}
RECORDS: dict[str, dict[str, Any]] = {
    "plain": {"messages": turns("<image>What?", "A dog."), "images": ["large.png"]},
    "limits": {"messages": turns("<image>What?", "A dog."), "images": [{"path": "large.png", "max_pixels": 50_176}]},
    "size": {
        "messages": turns("<image><image>What?", "Two dogs."),
        "images": ["small.png", {"path": "large.png", "resized_height": 280, "resized_width": 112}],
    },
    "part": {
        "messages": [
            {"role": "user", "content": [{"type": "image", "image": "small.png", "min_pixels": 100_352}]},
            *turns("", "A dog.")[1:],
        ]
    },
    "variables": {"messages": turns("What?", "A dog."), "chat_template_kwargs": {"tone": "loud"}},
    "limits of all": {
        "messages": turns("<image><image>What?", "Dogs."),
        "images": ["small.png", "large.png"],
        "chat_template_kwargs": {"tone": "low", "max_pixels": 20_000},
    },
    "boxes": {
        "messages": turns("<image><image>Find <ref-object>.", "It is <bbox>"),
        "images": ["small.png", {"path": "large.png", "max_pixels": 50_176}],
        "objects": BOXES,
    },
}


class Data:
    """The records as a file, and their encoder."""

    def __init__(self, folder: Path, text_tokenizer: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(text_tokenizer)
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(folder / "tokenizer")
        (folder / "large.png").write_bytes(png(640, 480))
        (folder / "small.png").write_bytes(png(100, 70))
        self.file = folder / "data.jsonl"
        self.file.write_text("".join(json.dumps({"id": name, **record}) + "\n" for name, record in RECORDS.items()))
        self.settings: dict[str, Any] = {"tokenizer": folder / "tokenizer", "vision_family": "qwen2_5_vl"}
        self.encoder = ChatEncoder.from_pretrained(**self.settings)
        conversations = [normalize({"id": k, **r}, image_root=str(folder)) for k, r in RECORDS.items()]
        self.samples = {str(c.id): self.encoder.encode(c) for c in conversations}

    def packed(self, out: Path, inputs: Any = None, **changes: Any) -> Any:
        options = {"seq_len": 2048, "workers": 1, "output_dir": out, **self.settings, **changes}
        return pack(self.file if inputs is None else inputs, **options)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, text_tokenizer_dir: Path) -> Data:
    return Data(tmp_path_factory.mktemp("data"), text_tokenizer_dir)


def check(dataset: PackedDataset, expected: dict[str, EncodedSample]) -> None:
    found = {str(sample.id): sample for samples in dataset for sample in samples}
    assert found.keys() == expected.keys()
    for name, sample in found.items():
        other = expected[name]
        assert sample.input_ids.tolist() == other.input_ids.tolist(), name
        assert sample.labels.tolist() == other.labels.tolist(), name
        assert (sample.pixel_values is None) == (other.pixel_values is None)
        if sample.pixel_values is not None and other.pixel_values is not None:
            assert torch.equal(sample.pixel_values, other.pixel_values), name


def test_settings_change_lengths_and_targets(data: Data) -> None:
    lengths = {name: len(sample) for name, sample in data.samples.items()}
    assert lengths["limits"] < lengths["plain"]
    assert data.samples["variables"].num_supervised == data.samples["plain"].num_supervised
    text = data.encoder.tokenizer.decode(data.samples["boxes"].input_ids)
    # 640 x 480 pixels resized to 252 x 168.
    assert "<|box_start|>(4,7),(118,140)<|box_end|>" in text


@pytest.mark.parametrize("media", ["copy", "reference"])
@pytest.mark.parametrize("flavor", CLASSES)
def test_loaders_encode_what_the_records_have(flavor: str, media: str, data: Data, tmp_path: Path) -> None:
    result = data.packed(tmp_path / "out", sample_class=flavor, media=media)
    planned = {row["id"]: row["length"] for row in pq.read_table(result.lengths).to_pylist()}
    assert planned == {name: len(sample) for name, sample in data.samples.items()}
    check(PackedDataset(result.shards, data.encoder), data.samples)
    if media == "copy" and flavor != "PackedTokensSample":  # tokens have no template and no boxes
        again = data.packed(tmp_path / "again", result.shards, sample_class=CLASSES[1])
        check(PackedDataset(again.shards, data.encoder), data.samples)


def test_lengths_counts_settings(data: Data, tmp_path: Path) -> None:
    arguments = ["lengths", data.file, "--output", tmp_path / "lengths.txt", "--seq-len", "2048"]
    for name, value in data.settings.items():
        arguments += [f"--{name.replace('_', '-')}", value]
    outcome = CliRunner().invoke(cli, [str(argument) for argument in arguments])
    assert outcome.exit_code == 0, outcome.output
    rows = [line.rpartition(":") for line in (tmp_path / "lengths.txt").read_text().splitlines()]
    assert {name: int(length) for name, _, length in rows} == {name: len(s) for name, s in data.samples.items()}
