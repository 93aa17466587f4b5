"""Damaged datasets: what is read is what was packed, or an error names the file. Never fewer samples silently."""

import hashlib
import json
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from energon_packed import ChatEncoder, EnergonPackedError, PackedDataset, get_packed_loader, pack

SAMPLES, SEQ_LEN = 60, 96
DAMAGES = int(os.environ.get("ENERGON_PACKED_DAMAGES", "2"))  # of each kind and file; 200 is the long form
Damage = Callable[[bytes, random.Random], bytes | None]


def flip(content: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(content))
    return content[:at] + bytes([content[at] ^ (1 << rng.randrange(8))]) + content[at + 1 :]


def cut(content: bytes, rng: random.Random) -> bytes:
    return content[: rng.choice([rng.randrange(len(content)), len(content) - 8, len(content) // 2])]


def delete(content: bytes, rng: random.Random) -> None:
    return None


@pytest.fixture(scope="module")
def packed(text_tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    talks = [
        {"messages": [{"role": "user", "content": f"q {n}"}, {"role": "assistant", "content": "word " * (n % 17 + 1)}]}
        for n in range(SAMPLES)
    ]
    (folder / "d.jsonl").write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    options = {"seq_len": SEQ_LEN, "max_packs_per_shard": 6, "workers": 1, "tokenizer": text_tokenizer_dir}
    pack(folder / "d.jsonl", output_dir=folder / "out", **options)
    return folder / "out" / "webdataset"


@pytest.fixture(scope="module")
def text_encoder(text_tokenizer_dir: Path) -> ChatEncoder:
    return ChatEncoder.from_pretrained(text_tokenizer_dir)


def by_dataset(folder: Path, encoder: ChatEncoder) -> Iterator[str]:
    dataset = PackedDataset(folder, encoder)
    for number in range(len(dataset)):
        for sample in dataset[number]:
            yield f"{sample.id} {sample.input_ids.tolist()} {sample.labels.tolist()}"


def by_loader(folder: Path, encoder: ChatEncoder) -> Iterator[str]:
    for batch in get_packed_loader(folder, encoder, epochs=1, num_workers=0, max_failures=0):
        for one in batch.split():
            yield f"{one.id} {one.input_ids.tolist()} {one.labels.tolist()}"


@pytest.mark.parametrize("read", [by_dataset, by_loader])
@pytest.mark.parametrize("damage", [flip, cut, delete])
def test_a_damaged_file_is_named_or_harmless(
    packed: Path, text_encoder: ChatEncoder, tmp_path: Path, damage: Damage, read: Callable[..., Iterator[str]]
) -> None:
    whole = sorted(read(packed, text_encoder))
    assert len(whole) == SAMPLES
    files = sorted(path.relative_to(packed) for path in packed.rglob("*") if path.is_file())
    chosen = [name for name in files if name.suffix == "" or not name.name.endswith(("01.tar", "02.tar"))]
    silent: list[str] = []
    named = equal = differ = 0
    for name in chosen:
        for number in range(1 if damage is delete else DAMAGES):
            rng = random.Random(f"{name} {damage.__name__} {number}")
            copy = tmp_path / hashlib.md5(f"{name}{number}".encode()).hexdigest()
            shutil.copytree(packed, copy)
            content = damage((copy / name).read_bytes(), rng)
            (copy / name).unlink() if content is None else (copy / name).write_bytes(content)
            try:
                found = sorted(read(copy, text_encoder))
            except EnergonPackedError as error:
                named += 1
                if str(copy) not in str(error):
                    silent.append(f"{damage.__name__} {number} of {name} is not named: {error}")
            except Exception as error:
                silent.append(f"{damage.__name__} {number} of {name}: {type(error).__name__} {error}")
            else:
                equal += found == whole
                differ += found != whole
                content_may_differ = name.suffix == ".tar" and damage is flip  # what only `verify` notices
                if len(found) < SAMPLES or (found != whole and not content_may_differ):
                    silent.append(f"{damage.__name__} {number} of {name}: {len(found)} samples of {SAMPLES}")
            shutil.rmtree(copy)
    print(
        f"\n{damage.__name__} {read.__name__}: {len(chosen)} files, {named + equal + differ} damages: {named} named, "
        f"{equal} harmless, {differ} of content that only verify tells"
    )
    assert not silent, "\n".join(silent)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        (".nv-meta/.info.json", "energon_version", "energol_version"),
        (".nv-meta/split.yaml", "exclude", "excludg"),
        (".nv-meta/split.yaml", "val: []", "val:"),
        ("out-000000.tar", '"captions"', '"caption3"'),
        ("out-000000.tar", '"lengths":[', '"lengths":{'),
    ],
)
@pytest.mark.parametrize("read", [by_dataset, by_loader])
def test_what_only_the_reader_finds_wrong_is_named(
    packed: Path, text_encoder: ChatEncoder, tmp_path: Path, name: str, old: str, new: str, read: Callable[..., Any]
) -> None:
    """JSON, YAML and tar are whole; Energon or a codec misses something in them."""
    copy = tmp_path / "copy"
    shutil.copytree(packed, copy)
    content = (copy / name).read_bytes()
    assert old.encode() in content
    (copy / name).write_bytes(content.replace(old.encode(), new.encode(), 1))
    try:
        found = sorted(read(copy, text_encoder))
    except EnergonPackedError as error:
        assert str(copy) in str(error)
        assert "\n" not in str(error)
        assert re.search("; (run|copy|pack|energon-packed) ", str(error))
    else:
        assert found == sorted(read(packed, text_encoder))
        assert read is by_dataset  # Energon's own files
        assert ".nv-meta" in name
