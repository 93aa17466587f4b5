"""Mutated records of every shape: each is packed or rejected, what is packed is read back, and nothing raises."""

import json
import os
import re
import shutil
from collections import Counter
from itertools import accumulate
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from PIL import Image

from energon_packed import ChatEncoder, PackedDataset, PackResult, get_packed_loader, pack
from tests.internals import PackedFolder, verify
from tests.pipeline.mutations import RECORDS, dumped, mutated_lines

FUZZ = int(os.environ.get("ENERGON_PACKED_FUZZ", "400"))  # mutated records; `make hard` sets more
SEED = int(os.environ.get("ENERGON_PACKED_FUZZ_SEED", "17"))
AT_ONCE = 2000


@pytest.fixture(scope="module")
def tokenizer(tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a template that renders all that a record may have."""
    folder = shutil.copytree(tokenizer_dir, tmp_path_factory.mktemp("fuzz") / "tokenizer")
    template = folder / "chat_template.jinja"
    template.write_text(
        "{{ tools | tojson if tools }}"
        + template.read_text().replace(
            "{% if message['content'] is",
            "{% for name in ('reasoning_content', 'name', 'tool_call_id') %}{{ message[name] }}{% endfor %}"
            "{% if message['content'] is",
            1,
        )
    )
    return folder


@pytest.fixture(scope="module")
def fuzz_encoder(tokenizer: Path) -> ChatEncoder:
    return ChatEncoder.from_pretrained(tokenizer)


def packed_from(folder: Path, tokenizer: Path, content: bytes, name: str = "d.jsonl", **more: str) -> PackResult:
    """Packs of these lines."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(content)
    Image.new("RGB", (40, 40), "red").save(folder / "a.png")
    options = {"seq_len": 512, "workers": 1, "max_reject_rate": 1.0, "strict": False}
    return pack(folder / name, output_dir=folder / "out", tokenizer=tokenizer, **options, **more)


def check_account(result: PackResult, records: int, encoder: ChatEncoder) -> None:
    """Records in = packed + rejected; every check passes; both loaders yield each packed sample."""
    manifest = result.manifest
    ledger = pq.read_table(result.lengths).to_pylist()
    assert [row["row"] for row in ledger] == list(range(records))
    assert manifest.records == records == manifest.packed + sum(manifest.rejects.values())
    rejects = [json.loads(line) for line in result.rejects.read_bytes().splitlines()]
    assert [one["row"] for one in rejects] == [row["row"] for row in ledger if row["status"] != "packed"]
    assert all(one["detail"] and len(one["detail"]) <= 500 for one in rejects)
    failed = [check for check in verify(PackedFolder.open(result.shards), encoder) if not check.passed]
    assert not failed, failed
    packed = Counter((row["id"], row["length"]) for row in ledger if row["status"] == "packed")
    dataset = PackedDataset(result.shards, encoder)
    assert Counter((one.id, len(one)) for number in range(len(dataset)) for one in dataset[number]) == packed
    found: Counter[tuple[str, int]] = Counter()
    for batch in get_packed_loader(result.shards, encoder, epochs=1, num_workers=0, max_failures=0):
        found.update((one.id or "", len(one)) for one in batch.split())
    assert found == packed


def records_in(content: bytes) -> int:
    return sum(bool(line.strip()) for line in content.split(b"\n"))


@pytest.mark.parametrize("seed", range(SEED, SEED + max(1, -(-FUZZ // AT_ONCE))))
def test_mutated_records_are_packed_or_rejected(
    tokenizer: Path, fuzz_encoder: ChatEncoder, tmp_path: Path, seed: int
) -> None:
    whole = [dumped(record).encode() for record in RECORDS]
    lines = [*whole, *mutated_lines(min(FUZZ, AT_ONCE), seed)]
    content = b"\n".join(lines)
    result = packed_from(tmp_path, tokenizer, content)
    check_account(result, records_in(content), fuzz_encoder)
    statuses = pq.read_table(result.lengths)["status"].to_pylist()
    assert set(statuses[: len(whole)]) == {"packed"}
    assert 0.1 < statuses.count("packed") / len(statuses) < 0.9


@pytest.mark.parametrize("sample_class", ["PackedCaptioningSample", "PackedTokensSample"])
def test_every_flavor_keeps_the_account(
    tokenizer: Path, fuzz_encoder: ChatEncoder, tmp_path: Path, sample_class: str
) -> None:
    content = b"\r\n".join(mutated_lines(FUZZ // 4, SEED - 1))
    result = packed_from(tmp_path, tokenizer, content, sample_class=sample_class)
    check_account(result, records_in(content), fuzz_encoder)


@pytest.mark.parametrize("wide", [False, True])
def test_a_line_of_50_mb_is_one_record(tokenizer: Path, fuzz_encoder: ChatEncoder, tmp_path: Path, wide: bool) -> None:
    size = 50_000_000 if FUZZ > AT_ONCE else 5_000_000
    long = b'{"note":"%s","text":"Once."}' % (b"x" * size) if wide else b'{"text":"' + b"x" * size
    content = b"\n".join([dumped(RECORDS[0]).encode(), long, dumped(RECORDS[0]).encode()])
    result = packed_from(tmp_path, tokenizer, content)
    check_account(result, 3, fuzz_encoder)
    assert result.manifest.rejects == ({} if wide else {"bad_json": 1})


@pytest.mark.parametrize("name", ["d.jsonl", "d.json"])
def test_numbers_over_64_bits_lose_no_digit(tokenizer: Path, tmp_path: Path, name: str) -> None:
    ids = [2**64 + 1, 2**64 + 2, -(2**63) - 1, 10**300 + 7, 2**64 - 1, 7]
    texts = [*map(str, ids), "0.12345678901234567890", "12345678.123456789012", "1.5"]
    records = [f'{{"id":{text},"text":"Once upon."}}' for text in texts]
    call = '{"messages":[{"role":"user","content":"x"},{"role":"assistant","tool_calls":[{"function":%s}]}]}'
    records += [
        call % '{"name":"f","arguments":{"n":18446744073709551615}}',
        call % '{"name":"f","arguments":{"n":[18446744073709551617]}}',
        call % '{"name":"f","arguments":"{\\"n\\":18446744073709551617}"}',
        '{"text":"Once.","tools":18446744073709551617}',
        '{"input_ids":[50,18446744073709551617]}',
        '{"input_ids":[50,18446744073709551615]}',
    ]
    text = "\n".join(records) if name == "d.jsonl" else f"[{','.join(records)}]"
    result = packed_from(tmp_path, tokenizer, text.encode(), name=name)
    ledger = pq.read_table(result.lengths).to_pylist()
    assert [row["id"] for row in ledger[: len(texts)]] == texts
    assert [row["status"] for row in ledger] == [
        *["packed"] * (len(texts) + 1), "bad_json", "bad_json", *["missing_field"] * 3
    ]  # fmt: skip
    rejects = [json.loads(line)["detail"] for line in result.rejects.read_bytes().splitlines()]
    assert all("18446744073709551617, over 64 bits; write it as text" in detail for detail in rejects[:2])


def test_elements_of_an_array_cost_themselves(tokenizer: Path, fuzz_encoder: ChatEncoder, tmp_path: Path) -> None:
    lines = [line for line in mutated_lines(FUZZ // 2, SEED - 2) if is_closed(line)]
    content = b"[" + b",\n".join([b'{"text":"Half \\ud83d of it."}', b'{"text":"\\ud83d\\ude00"}', *lines]) + b"]"
    result = packed_from(tmp_path, tokenizer, content, name="d.json")
    check_account(result, 2 + len(lines), fuzz_encoder)
    assert pq.read_table(result.lengths)["status"].to_pylist()[:2] == ["bad_json", "packed"]


def is_closed(line: bytes) -> bool:
    """Whether brackets and quotes are those of one value: others shift what follows them in an array."""
    text = re.sub(rb'"[^"\\]*(?:\\.[^"\\]*)*"', b"0", line, flags=re.DOTALL)
    levels = list(accumulate((one in b"[{") - (one in b"]}") for one in text))
    return b'"' not in text and levels[-1:] == [0] and min(levels) >= 0 and not re.search(rb"\A\s*\Z|,\s*\Z", line)
