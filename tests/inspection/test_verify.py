"""`verify` passes packed datasets, and names the damaged file of others."""

import io
import json
import os
import pickle
import re
import shutil
import sqlite3
import tarfile
import tracemalloc
from collections import Counter
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import Result

from energon_packed import ConfigError, PackOptions, pack
from tests.conftest import FLAVORS, Packer
from tests.inspection.datasets import copied_output, edit_manifest
from tests.internals import (
    DemoDataset,
    FolderLock,
    PackedFolder,
    arrays,
    files,
    make_nv_meta,
    verify_files,
    verify_names,
    verify_packs,
)
from tests.printed import invoke

Change = Callable[[Path], None]


@pytest.fixture(scope="module")
def few(demo: DemoDataset, pack_demo: Packer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three packs per shard, of 40 records: `verify` encodes all of them."""
    data = tmp_path_factory.mktemp("few") / "few.jsonl"
    data.write_bytes(b"".join(demo.jsonl.read_bytes().splitlines(keepends=True)[:40]))
    options: dict[str, Any] = {"image_root": demo.jsonl.parent, "max_packs_per_shard": 3, "seq_len": 512}
    return pack_demo(inputs=(str(data),), **options).shards


@pytest.fixture
def copy(few: Path, tmp_path: Path) -> Path:
    """A dataset that a test may damage."""
    return copied_output(few, tmp_path / "out")


def run(folder: Path, *arguments: str) -> Result:
    return invoke("verify", folder, *arguments)


@pytest.mark.parametrize("flavor", FLAVORS)
def test_a_packed_dataset_passes_all_checks(pack_demo: Packer, flavor: str) -> None:
    shards = pack_demo(sample_class=flavor, max_packs_per_shard=8, split={"train": 0.8, "val": 0.2}).shards
    result = run(shards.parent)
    assert result.exit_code == 0, result.output
    assert "✗" not in result.output
    assert "all checks passed" in result.output


def _flip_a_byte(folder: Path) -> None:
    tar = folder / "pack-000001.tar"
    content = bytearray(tar.read_bytes())
    content[700] ^= 1
    tar.write_bytes(content)


def _remove_a_shard(folder: Path) -> None:
    (folder / "pack-000001.tar").unlink()


def _add_a_shard(folder: Path) -> None:
    shutil.copy(folder / "pack-000001.tar", folder / "pack-900000.tar")


def _change_an_index_row(folder: Path) -> None:
    with sqlite3.connect(folder / ".nv-meta" / "index.sqlite") as database:
        database.execute(
            "UPDATE samples SET byte_offset = byte_offset + 512 WHERE tar_file_id = 1 AND sample_index = 1"
        )


def _cut_a_tar(folder: Path) -> None:
    tar = folder / "pack-000001.tar"
    tar.write_bytes(tar.read_bytes()[:5000])


def _change_the_counts(folder: Path) -> None:
    edit_manifest(folder, lambda value: value.update(packed=value["packed"] + 1, records=value["records"] + 1))


def _lower_seq_len(folder: Path) -> None:
    edit_manifest(folder, lambda value: value.update(seq_len=400))


def _edit_packs(folder: Path, change: Callable[[dict], object]) -> None:  # type: ignore[type-arg]
    """Rewrite the json of every pack of one tar, with indexes and hashes that fit: a careful forger."""
    import hashlib

    tar = folder / "pack-000001.tar"
    members = []
    with tarfile.open(tar) as source:
        for info in source:
            content = source.extractfile(info).read()  # type: ignore[union-attr]
            if info.name.endswith(".json"):
                value = json.loads(content)
                change(value)
                content = json.dumps(value).encode()
            members.append((info.name, content))
    with tarfile.open(tar, "w", format=tarfile.USTAR_FORMAT) as target:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            target.addfile(info, io.BytesIO(content))
    manifest = folder / ".nv-meta" / "packing.json"
    before = manifest.read_bytes()
    make_nv_meta(folder)
    manifest.write_bytes(before)

    def fit(value: dict) -> None:  # type: ignore[type-arg]
        entry = value["shards"][1]
        entry.update(bytes=tar.stat().st_size, sha256=hashlib.sha256(tar.read_bytes()).hexdigest())

    edit_manifest(folder, fit)


def _repeat_a_sample(folder: Path) -> None:
    _edit_packs(folder, lambda value: value.update(ids=[value["ids"][0]] * len(value["ids"])))


def _change_a_text(folder: Path) -> None:
    def change(value: dict) -> None:  # type: ignore[type-arg]
        value["captions"][0][0] += " and much more than that"

    _edit_packs(folder, change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_flip_a_byte, "pack-000001.tar has sha256"),
        (_remove_a_shard, "pack-000001.tar is missing"),
        (_add_a_shard, "pack-900000.tar is on disk, but not in packing.json"),
        (_change_an_index_row, "index.sqlite, samples of pack-000001.tar: the row"),
        (_lower_seq_len, "tokens, more than seq_len 400"),
        (_repeat_a_sample, "and in pack-000001.tar: pack_0000000"),
        (_cut_a_tar, "pack-000001.tar: truncated inside"),
        (_change_the_counts, "samples, packing.json has"),
        (_change_a_text, "pack-000001.tar: pack_00000003, sample"),
    ],
)
def test_damage_is_found_and_the_file_is_named(copy: Path, change: Change, message: str) -> None:
    change(copy)
    result = run(copy)
    assert result.exit_code == 1, result.output
    assert message in result.output
    assert "do not train on" in result.output


def test_fast_skips_encoding_and_nothing_else(copy: Path) -> None:
    _change_a_text(copy)
    assert run(copy, "--fast").exit_code == 0
    _flip_a_byte(copy)
    assert run(copy, "--fast").exit_code == 1


def test_a_dataset_without_its_tars_has_no_check_mark_for_them(copy: Path) -> None:
    for tar in copy.glob("*.tar"):
        tar.unlink()
    result = run(copy)
    assert result.exit_code == 1
    assert re.search(r"^- tars are intact.*: not checked, there is no tar$", result.output, re.MULTILINE)


@pytest.mark.parametrize(
    ("removed", "arguments", "name", "reason"),
    [
        ((), ("--fast",), "samples encode to their recorded length, with a supervised token", "--fast"),
        (
            ("rejects.jsonl",),
            (),
            "records = packed + rejected, and rejects.jsonl matches",
            "there is no rejects.jsonl",
        ),
        (("lengths.parquet",), (), "every sample is packed exactly once", "there is no lengths.parquet, so only"),
    ],
)
def test_a_check_that_did_not_run_has_no_check_mark(
    copy: Path, removed: tuple[str, ...], arguments: tuple[str, ...], name: str, reason: str
) -> None:
    for file in removed:
        (copy.parent / file).unlink()
    result = run(copy, *arguments)
    assert result.exit_code == 0, result.output
    assert f"✓ {name}" not in result.output
    assert re.search(rf"^- {re.escape(name)} .*: not checked, {re.escape(reason)}", result.output, re.MULTILINE)
    assert result.output.splitlines()[-1] == f"12 checks passed, 1 not checked: {copy}"
    found = json.loads(run(copy, *arguments, "--json").stdout)
    states = {check["name"]: (check["passed"], check["not_checked"]) for check in found["checks"]}
    assert found["passed"]
    assert states[name][0] is None
    assert states[name][1].startswith(reason)
    assert {state for check, state in states.items() if check != name} == {(True, None)}
    # A violation that the rest of a check finds is a failure.
    edit_manifest(copy, lambda value: value.update(records=value["records"] + 1))
    assert "✗ records = packed + rejected" in run(copy, *arguments).output


def test_contents_of_damaged_tars_are_not_checked(copy: Path) -> None:
    tars = sorted(copy.glob("*.tar"))
    for tar in tars:
        tar.write_bytes(tar.read_bytes()[:5000])
    output = run(copy).output
    assert f"- images decode (0 images): not checked, {len(tars)} tars are missing or damaged" in output
    assert f"- samples share rows (0.00 samples a pack): not checked, {len(tars)} tars are" in output
    assert output.count("✓") == 2  # the names of the shards, and the rejects


def test_a_damaged_lengths_parquet_fails(copy: Path) -> None:
    (copy.parent / "lengths.parquet").write_bytes(b"PAR1")
    result = run(copy, "--fast")
    assert result.exit_code == 1
    assert "lengths.parquet cannot be read: " in result.output


def test_planners_that_keep_the_order_are_not_checked_for_samples_that_fit_a_row(
    tokenizer_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "d.jsonl").write_text(json.dumps({"text": "red square"}))
    options: dict[str, object] = {"inputs": (str(tmp_path / "d.jsonl"),), "output_dir": tmp_path / "out", "workers": 1}
    pack(PackOptions(tokenizer=tokenizer_dir, seq_len=64, algorithm="sequential", **options))  # type: ignore[arg-type]
    assert "- samples share rows (1.00 samples a pack): not checked, the planner" in run(tmp_path / "out").output


def test_a_folder_that_a_run_writes_is_not_checked(copy: Path, tmp_path: Path) -> None:
    shutil.rmtree(copy / ".nv-meta")  # a run removes it before it writes shards
    with FolderLock(copy.parent, copy.parent / ".work"):
        for folder in (copy, copy.parent):
            result = run(folder)
            assert isinstance(result.exception, ConfigError)
            assert f"{folder} is being written by process {os.getpid()} on " in str(result.exception)
    assert "webdataset" in str(run(copy).exception)


def test_another_tokenizer_is_refused(copy: Path, text_tokenizer_dir: Path) -> None:
    result = run(copy, "--tokenizer", str(text_tokenizer_dir))
    assert f"was packed with, got `tokenizer` {text_tokenizer_dir} (" in str(result.exception)
    result = run(copy.parent / "nowhere")
    assert "does not exist" in str(result.exception)


def test_records_may_share_an_id(tokenizer_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text('{"text": "red square", "id": "twin"}\n{"text": "blue square", "id": "twin"}\n')
    options = {"inputs": (str(tmp_path / "d.jsonl"),), "output_dir": tmp_path / "out", "seq_len": 64, "workers": 1}
    pack(PackOptions(tokenizer=tokenizer_dir, **options))  # type: ignore[arg-type]
    result = run(tmp_path / "out")
    assert result.exit_code == 0, result.output
    (tmp_path / "out" / "lengths.parquet").unlink()
    result = run(tmp_path / "out")
    assert result.exit_code == 0, result.output
    line = "- every sample is packed exactly once (2 samples): not checked, there is no lengths.parquet"
    assert line in result.output


def test_without_lengths_parquet_a_repeated_sample_is_still_found(copy: Path) -> None:
    (copy.parent / "lengths.parquet").unlink()

    def repeat(value: dict) -> None:  # type: ignore[type-arg]
        for name in ("ids", "prompts", "captions", "systems"):
            value[name][1] = value[name][0]

    _edit_packs(copy, repeat)
    assert "and in pack-000001.tar: pack_0000000" in run(copy).output


@pytest.mark.parametrize(("words", "sound"), [(90, True), (5, False)])
def test_packs_with_a_single_sample_pass_if_no_two_samples_fit(
    tokenizer_dir: Path, tmp_path: Path, words: int, sound: bool
) -> None:
    lines = [json.dumps({"text": "red square " * words, "id": f"r{number}"}) for number in range(3)]
    (tmp_path / "d.jsonl").write_text("\n".join(lines))
    options = {"inputs": (str(tmp_path / "d.jsonl"),), "output_dir": tmp_path / "out", "seq_len": 256, "workers": 1}
    pack(PackOptions(tokenizer=tokenizer_dir, max_samples_per_pack=1, **options))  # type: ignore[arg-type]
    assert run(tmp_path / "out").exit_code == 0  # one sample a pack was asked for
    edit_manifest(tmp_path / "out" / "webdataset", lambda value: value.update(max_samples_per_pack=None))
    result = run(tmp_path / "out")
    assert (result.exit_code == 0) is sound, result.output
    assert (
        "1.00 samples a pack, as no two fit a row of 256" if sound else "nothing was packed, and two of"
    ) in result.output


def test_code_in_the_dataset_is_not_run(copy: Path) -> None:
    loader = copy / ".nv-meta" / "sample_loader.py"
    loader.write_text(loader.read_text() + f"\nopen({str(copy / 'ran')!r}, 'w').close()\n")
    result = run(copy)
    assert "sample_loader.py differs from the generated file, so it was not executed" in result.output
    assert not (copy / "ran").exists()
    assert result.exit_code == 1


def test_indexes_can_be_rebuilt(copy: Path) -> None:
    (copy / "pack-000001.tar.idx").unlink()
    (copy / ".nv-meta" / "index.sqlite").write_bytes(b"broken")
    result = run(copy)
    assert "energon-packed nv-meta" in result.output.splitlines()[-1]
    assert "pack it again" not in result.output
    make_nv_meta(copy)
    assert run(copy).exit_code == 0


def test_third_party_datasets_get_the_checks_without_packing_json(copy: Path, tokenizer_dir: Path) -> None:
    (copy / ".nv-meta" / "packing.json").unlink()
    make_nv_meta(copy)
    for arguments in ((), ("--tokenizer", str(tokenizer_dir))):
        result = run(copy, *arguments)
        assert result.exit_code == 0, result.output
        assert "recorded" not in result.output.replace("to their recorded length", "")
        assert "- packs fit seq_len: not checked, there is no packing.json" in result.output
        assert ("no packing.json, and no --tokenizer is set" in result.output) is not bool(arguments)
    _cut_a_tar(copy)
    assert "pack-000001.tar: truncated inside" in run(copy).output


def test_supervised_tokens_are_counted_in_the_packs(copy: Path) -> None:
    assert run(copy).exit_code == 0
    edit_manifest(copy, lambda value: value.update(supervised_tokens=value["supervised_tokens"] + 1))
    assert re.search(r"the tars have [\d,]+ supervised tokens, packing.json has", " ".join(run(copy).output.split()))
    assert run(copy, "--fast").exit_code == 0


def weighted(first: float, second: float, flavor: str, words: int) -> list[dict[str, Any]]:
    """Records whose two parts have these loss weights."""
    turns = [
        message
        for number, weight in enumerate((first, second))
        for message in (
            {"role": "user", "content": "Next?"},
            {"role": "assistant", "content": f"a red square {number}" + " word" * words, "weight": weight},
        )
    ]
    documents = [{"text": "blue square" + " word" * 30, "weight": weight} for weight in (first, second)]
    ids = list(range(65, 105))
    tokens = {"input_ids": ids, "loss_weights": [first] * 20 + [second] * 20}
    return [{"messages": turns}, *documents, *([] if flavor == "PackedCaptioningSample" else [tokens])]


@pytest.mark.parametrize(
    ("flavor", "overlong"),
    [
        *((flavor, "drop") for flavor in FLAVORS),
        ("PackedTokensSample", "split"),
        ("PackedCaptioningSample", "truncate"),
    ],
)
def test_loss_weights_are_compared_with_the_records(
    tokenizer_dir: Path, tmp_path: Path, flavor: str, overlong: str
) -> None:
    outputs = []
    for name, weights in (("a", (0.5, 2.0)), ("b", (2.0, 0.5))):
        data = tmp_path / f"{name}.jsonl"
        records = weighted(*weights, flavor, words=40 if overlong == "truncate" else 3)
        data.write_text("\n".join(json.dumps({"id": f"r{n}", **record}) for n, record in enumerate(records)))
        result = pack(
            data, output_dir=tmp_path / name, seq_len=128 if overlong == "drop" else 38, tokenizer=tokenizer_dir,
            sample_class=flavor, unpacked=flavor == "MultiMixQASample", overlong=overlong, record_weight="loss",
            workers=1, max_reject_rate=0.5,
        )  # fmt: skip
        outputs.append(result.shards)
        assert result.manifest.truncated + result.manifest.records_split > 0 or overlong == "drop"
    assert run(outputs[1]).exit_code == 0
    before, after = [json.loads((shards / ".nv-meta" / "packing.json").read_text()) for shards in outputs]
    edit_manifest(outputs[1], lambda value: value.update(weight_checksum=before["weight_checksum"]))
    output = " ".join(run(outputs[1]).output.split())
    assert f"the loss weights and columns in the tars have the checksum {after['weight_checksum']}, and" in output
    edit_manifest(outputs[1], lambda value: value.update(weight_checksum=0))
    assert run(outputs[1]).exit_code == 1, "the records had no weights"


def test_utilization_is_computed_from_the_counts(copy: Path) -> None:
    edit_manifest(copy, lambda value: value.update(utilization=0.5))
    assert "packing.json has utilization 0.5, but tokens /" in " ".join(run(copy, "--fast").output.split())


def test_samples_are_compared_with_lengths_parquet(copy: Path) -> None:
    file = copy.parent / "lengths.parquet"
    rows = pq.read_table(file).to_pylist()
    packed = next(row for row in rows if row["status"] == "packed")
    rejected = next(row for row in rows if row["status"] != "packed")
    packed["status"], rejected["status"] = rejected["status"], "packed"
    pq.write_table(pa.Table.from_pylist(rows), file)
    result = run(copy)
    assert result.exit_code == 1
    assert re.search(
        rf"sample {packed['id']} is in pack-0.*, but lengths.parquet does not list it as packed", result.output
    )
    assert f"sample {rejected['id']} is listed as packed in lengths.parquet, but is in no intact tar" in result.output


def test_hashes_that_differ_are_those_of_the_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "BLOCK", 3)
    rng = np.random.default_rng(0)
    pool = np.append(rng.integers(0, 2**64, 40, dtype=np.uint64), np.array([0, 2**64 - 1], dtype=np.uint64))
    for _ in range(60):
        first, second = (np.sort(rng.choice(pool, int(rng.integers(0, 50)))) for _ in range(2))
        if rng.integers(3) == 0:
            second = first.copy()
        counts = [Counter(hashes.tolist()) for hashes in (first, second)]
        expected = sorted(value for value in set().union(*counts) if counts[0][value] != counts[1][value])
        assert verify_names.differing(first, second).tolist() == expected


def test_memory_does_not_grow_with_the_samples(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hashes of keys and ids of all tars are in files, and lengths.parquet is read in batches."""
    for module, name, size in ((files, "_IN_MEMORY", 1), (arrays, "BLOCK", 4096)):
        monkeypatch.setattr(module, name, size)
    folder, file = PackedFolder.open(copy), copy.parent / "lengths.parquet"
    checker = verify_packs.PackChecker(folder.codec, None, folder.manifest)
    peaks = []
    for is_listed, count in product((True, False), (50_000, 50_000, 130_000)):
        ids = [f"s{number:09d}" for number in range(count)]
        file.unlink(missing_ok=True)
        if is_listed:
            pq.write_table(pa.table({"id": ids, "status": ["packed"] * count}), file, row_group_size=10_000)
        parts = np.array_split(verify_names.name_hashes(ids), count // 5_000)
        tars = [verify_files.CheckedTar(Path(f"{number}.tar"), keys=part) for number, part in enumerate(parts)]
        each = [verify_packs.TarContents(tar.path.name, ids=tar.keys, checksums=tar.keys) for tar in tars]
        del ids, parts
        tracemalloc.start()
        try:
            keys, contents = files.DiskList(np.uint64), verify_packs.JoinedContents()
            for tar, content in zip(tars, each, strict=True):
                tar.move(keys)
                contents.add(content)
            assert verify_files.keys_are_unique(tars, keys.values, "").summary == f"{count:,} keys"
            checks = verify_packs.contents_checks(folder, checker, contents, "", "")
            check = next(check for check in checks if check.name == "every sample is packed exactly once")
            assert (check.count, check.summary) == (0, f"{count:,} samples")
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert peaks[2] - peaks[1] < 40_000
    assert peaks[5] - peaks[4] < 40_000


def test_little_memory_is_kept_of_each_tar() -> None:
    counts = {name: 1_000_000 for name in ("packs", "samples", "images", "tokens", "supervised tokens", "weights")}
    tars, contents, checked = 1000, verify_packs.JoinedContents(), []

    def held() -> int:
        """Bytes that this test has allocated, without those of other threads."""
        traces = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, __file__, all_frames=True)])
        return sum(trace.size for trace in traces.traces)

    tracemalloc.start(8)
    try:
        for number in range(tars):
            checked.append(pickle.loads(pickle.dumps(verify_files.CheckedTar(Path(f"out-{number:06d}.tar")))))
        before = held()
        assert before < 800 * tars
        for number in range(tars):
            tar = verify_packs.TarContents(f"out-{number:06d}.tar", Counter(counts), shortest={"any": [700, 800]})
            contents.add(pickle.loads(pickle.dumps(tar)))  # of a process
            del tar
        more = held() - before
    finally:
        tracemalloc.stop()
    assert contents.counts["tokens"] == tars * counts["tokens"]
    assert contents.shortest == {"any": [700, 700]}
    assert more < 700 * tars
