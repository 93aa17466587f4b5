"""Per-token columns of records reach `batch.columns` by every reader, each value at its token, and nowhere else."""

import io
import json
import tarfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.energon import WorkerConfig, get_loader, get_val_dataset

from energon_packed import (
    BatchError,
    ChatEncoder,
    Conversation,
    DataflowConfig,
    DataflowLoader,
    EncodedSample,
    EnergonPackedError,
    MapDistributor,
    PackedBatch,
    PackedDataset,
    PackedIterableDataset,
    PaddingFreeCollator,
    Processor,
    RecordError,
    get_packed_loader,
    normalize,
    pack,
    plan_in_memory,
)
from tests.conftest import FLAVORS
from tests.internals import EncodedRow, StoredTokens, codec_for, encode_pack
from tests.printed import invoke

Columns = dict[str, np.ndarray]
USER = {"role": "user", "content": "What is 2 + 3?"}
collate = PaddingFreeCollator().collate


def values(count: int, seed: int) -> Columns:
    """A column of each dtype and shape; no value is 0, the value of tokens without one."""
    random = np.random.default_rng(seed)
    floats = -1 - random.random((count, 4))
    integers = random.integers(1, 2000, (count, 3))
    return {
        "logprobs": floats[:, 0].astype(np.float32),
        "ref": floats[:, 1].astype(np.float16),
        "state": integers[:, 0].astype(np.int32),
        "experts": integers[:, :2].astype(np.int16),
        "teacher_ids": integers.astype(np.int32),
        "teacher_logprobs": floats.astype(np.float16),
    }


def record(ident: str, count: int, seed: int, *, prompt: int = 1, **fields: Any) -> dict[str, Any]:
    """A record of tokens with all columns, as arrays."""
    ids = [20 + (seed + i) % 50 for i in range(count)]
    return {"id": ident, "input_ids": ids, "labels": [-100] * prompt + ids[prompt:], **values(count, seed), **fields}


RECORDS = [
    record("a", 9, 1),
    {"id": "plain", "input_ids": [30, 31, 32, 33]},
    record("b", 14, 2, prompt=3, loss_weights=[0.5] * 14),
    record("c", 5, 3),
]
EXPECTED = {str(r["id"]): {k: v for k, v in r.items() if isinstance(v, np.ndarray)} for r in RECORDS}


def write_table(path: Path, records: list[dict[str, Any]]) -> Path:
    """Write records with their dtypes to a file, which its suffix selects."""
    names = list({name: None for one in records for name in one})
    columns = []
    for name in names:
        found = next(one[name] for one in records if name in one)
        kind = None
        if isinstance(found, np.ndarray):
            kind = pa.list_(pa.from_numpy_dtype(found.dtype))
            kind = pa.list_(kind) if found.ndim == 2 else kind
        rows = [None if name not in one else list(one[name]) if isinstance(found, np.ndarray) else one[name]
                for one in records]  # fmt: skip
        columns.append(pa.array(rows, kind))
    table = pa.Table.from_arrays(columns, names=names)
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    else:
        with pa.OSFile(str(path), "wb") as out, pa.ipc.new_file(out, table.schema) as writer:
            writer.write_table(table)
    return path


def write_lines(path: Path, records: list[dict[str, Any]]) -> Path:
    plain = [{k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in one.items()} for one in records]
    path.write_text("".join(json.dumps(one) + "\n" for one in plain))
    return path


def columns_of(batches: Iterable[PackedBatch]) -> dict[str, Columns]:
    """Columns of each sample by id."""
    found: dict[str, Columns] = {}
    for batch in batches:
        bounds = batch.cu_seqlens.tolist()
        for ident, start, end in zip(batch.ids, bounds, bounds[1:], strict=False):
            found[str(ident)] = {name: column[0, start:end].numpy() for name, column in batch.columns.items()}
    return found


def check(found: dict[str, Columns], expected: dict[str, Columns], *, dtypes: bool = True) -> None:
    """Compare the columns of samples; a sample without a column has 0."""
    assert found.keys() == expected.keys()
    for ident, columns in found.items():
        assert expected[ident].keys() <= columns.keys()
        for name, column in columns.items():
            wanted = expected[ident].get(name, np.zeros(1, column.dtype))
            assert (column == wanted).all(), (ident, name)
            assert not dtypes or column.dtype == wanted.dtype, (ident, name)


@pytest.fixture(scope="module")
def options(tokenizer_dir: Path) -> dict[str, Any]:
    return {"tokenizer": tokenizer_dir, "seq_len": 32, "workers": 1, "sample_class": "PackedTokensSample"}


@pytest.fixture(scope="module", params=[".arrow", ".parquet"])
def stored(request: Any, options: dict[str, Any], tmp_path_factory: Any) -> Path:
    folder = tmp_path_factory.mktemp("columns")
    result = pack(write_table(folder / f"data{request.param}", RECORDS), output_dir=folder / "out", **options)
    assert (result.manifest.packed, result.manifest.packs) == (len(RECORDS), 1)
    return result.shards


def test_every_dtype_and_shape_by_every_reader(stored: Path, encoder: ChatEncoder) -> None:
    for processor in (encoder, StoredTokens()):
        dataset = PackedDataset(stored, processor)
        check(columns_of(collate(dataset[i]) for i in range(len(dataset))), EXPECTED)
        check(columns_of(collate(collate(dataset[i]).split()) for i in range(len(dataset))), EXPECTED)
    check(columns_of(DataflowLoader(MapDistributor(dataset), encoder, num_workers=1)), EXPECTED)
    check(columns_of(get_packed_loader(stored, encoder, epochs=1, num_workers=0)), EXPECTED)
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    packs = list(get_loader(get_val_dataset(stored, split_part="train", worker_config=config, batch_size=None)))
    check(columns_of(collate(encode_pack(one, encoder)) for one in packs), EXPECTED)


def test_verify_and_repack(stored: Path, options: dict[str, Any], encoder: ChatEncoder, tmp_path: Path) -> None:
    assert invoke("verify", stored).exit_code == 0
    again = pack(stored, output_dir=tmp_path / "out", **{**options, "seq_len": 24})
    check(columns_of(get_packed_loader(again.shards, encoder, epochs=1, num_workers=0)), EXPECTED)


def test_a_resumed_run_reads_the_kept_columns(options: dict[str, Any], encoder: ChatEncoder, tmp_path: Path) -> None:
    data = write_table(tmp_path / "data.arrow", RECORDS)
    for seq_len, reused in ((20, 0), (24, len(RECORDS))):
        result = pack(data, output_dir=tmp_path / "out", **{**options, "seq_len": seq_len}, overwrite=True)
        assert result.manifest.counters["reused"] == reused
        check(columns_of(get_packed_loader(result.shards, encoder, epochs=1, num_workers=0)), EXPECTED)
    kept = next((tmp_path / "out").rglob("*.columns"))
    kept.write_bytes(kept.read_bytes()[:-1])
    result = pack(data, output_dir=tmp_path / "out", **{**options, "seq_len": 25}, overwrite=True)
    assert result.manifest.counters["reused"] == 0


def test_members_are_npy_without_pickles(stored: Path) -> None:
    arrays = {}
    for part, content in _parts(stored).items():
        if part.startswith("columns."):
            is_compressed = part.endswith(".zst")
            # Other tools need a decompressor of Zstandard, such as that of Arrow.
            file: Any = pa.input_stream(pa.py_buffer(content), compression="zstd") if is_compressed else content
            content = file.read() if is_compressed else content
            arrays[part.removeprefix("columns.")] = np.load(io.BytesIO(content), allow_pickle=False)
    assert {name: (array.dtype, array.shape) for name, array in arrays.items()} == {
        f"{name}.npy{'.zst' * (column.ndim - 1)}": (column.dtype, (32, *column.shape[1:]))
        for name, column in values(9, 1).items()
    }


def test_the_top_tokens_of_a_teacher_are_compressed(options: dict[str, Any], tmp_path: Path) -> None:
    ids = [[7, 8, 9, 10, 11, 12, 13, 14]] * 300
    data = write_lines(tmp_path / "data.jsonl", [{"input_ids": [30] * 300, "teacher_ids": ids}])
    result = pack(data, output_dir=tmp_path / "out", **{**options, "seq_len": 300})
    assert len(_parts(result.shards)["columns.teacher_ids.npy.zst"]) < 300 * 8 * 4 / 10


@pytest.mark.parametrize(
    "content", [b"", b"(\xb5/\xfd no frame", pa.Codec("zstd").compress(b"no array", asbytes=True)]
)
def test_a_damaged_compressed_column_is_one_line(stored: Path, content: bytes) -> None:
    raw = {"__key__": "k", **_parts(stored), "columns.teacher_ids.npy.zst": content}
    with pytest.raises(EnergonPackedError, match=r"^k\.columns\.teacher_ids\.npy\.zst: .+$"):
        codec_for("PackedTokensSample").read(raw)


@pytest.mark.parametrize("fault", ["shape", "dtype", "object", "cut"])
def test_a_damaged_column_is_one_line(stored: Path, encoder: ChatEncoder, tmp_path: Path, fault: str) -> None:
    wrong = {
        "shape": np.zeros(31, np.float32), "dtype": np.zeros(32, np.float64), "cut": np.zeros(32, np.float32),
        "object": np.array([None] * 32),
    }[fault]  # fmt: skip
    out = io.BytesIO()
    np.save(out, wrong)
    content = out.getvalue()[: -1 if fault == "cut" else None]
    raw = {"__key__": "k", **_parts(stored), "columns.logprobs.npy": content}
    with pytest.raises(EnergonPackedError, match=r"k(\.columns\.logprobs\.npy)?: "):
        codec_for("PackedTokensSample").read(raw)


def _parts(stored: Path) -> dict[str, bytes]:
    with tarfile.open(next(stored.glob("*.tar"))) as tar:
        return {member.name.split(".", 1)[1]: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]


@pytest.mark.parametrize("streaming", [True, False])
def test_raw_records_have_the_same_columns(tmp_path: Path, tokenizer_dir: Path, streaming: bool) -> None:
    data = write_table(tmp_path / "data.arrow", RECORDS)
    config = DataflowConfig(dataset_path=str(data), packing_length=32, processor_config=str(tokenizer_dir))
    flow: Any = PackedIterableDataset(config) if streaming else DataflowLoader(MapDistributor(plan_in_memory(config)))
    check(columns_of(flow), EXPECTED)


def test_json_has_int32_and_float32(options: dict[str, Any], encoder: ChatEncoder, tmp_path: Path) -> None:
    result = pack(write_lines(tmp_path / "data.jsonl", RECORDS), output_dir=tmp_path / "out", **options)
    found = columns_of(get_packed_loader(result.shards, encoder, epochs=1, num_workers=0))
    wide = {
        ident: {k: v.astype(np.int32 if v.dtype.kind == "i" else np.float32) for k, v in columns.items()}
        for ident, columns in EXPECTED.items()
    }
    check(found, wide)


@pytest.mark.parametrize("streaming", [None, True, False])
def test_fragments_have_the_columns_of_their_tokens(
    options: dict[str, Any], encoder: ChatEncoder, tmp_path: Path, tokenizer_dir: Path, streaming: bool | None
) -> None:
    # Two records: with targets only, fragments follow from the length alone; with a prompt, the tokens are read.
    long = [record("k", 21, 4, prompt=3), record("all", 20, 5, prompt=0)]
    data = write_table(tmp_path / "data.arrow", long)
    if streaming is None:
        result = pack(data, output_dir=tmp_path / "out", **{**options, "seq_len": 8}, overlong="split")
        assert invoke("verify", result.shards).exit_code == 0
        flow: Any = get_packed_loader(result.shards, encoder, epochs=1, num_workers=0)
    else:
        config = DataflowConfig(
            dataset_path=str(data), packing_length=8, overlong="split", processor_config=str(tokenizer_dir)
        )
        flow = PackedIterableDataset(config) if streaming else DataflowLoader(MapDistributor(plan_in_memory(config)))
    expected = {}
    for one in long:
        starts = range(0, len(one["input_ids"]) - 1, 7)  # a fragment repeats a token as context
        for number, start in enumerate(starts):
            own = {k: v[start : start + 8] for k, v in one.items() if isinstance(v, np.ndarray)}
            expected[f"{one['id']}#{number}"] = own
    check(columns_of(flow), expected)


@pytest.mark.parametrize("sample_class", ["PackedTokensSample"])
def test_truncation_cuts_the_columns(
    options: dict[str, Any], encoder: ChatEncoder, tmp_path: Path, sample_class: str
) -> None:
    data = write_table(tmp_path / "data.arrow", [record("k", 21, 4)])
    result = pack(data, output_dir=tmp_path / "out", **{**options, "seq_len": 8}, overlong="truncate")
    expected = {"k": {name: column[:8] for name, column in values(21, 4).items()}}
    check(columns_of(get_packed_loader(result.shards, encoder, epochs=1, num_workers=0)), expected)
    assert invoke("verify", result.shards).exit_code == 0


def test_padding_is_removed_from_columns() -> None:
    found = normalize(
        {"input_ids": [0, 5, 6], "attention_mask": [0, 1, 1], "logprobs": [9.0, -1, -2], "x": [[9], [1], [2]]}
    )
    assert found.columns is not None
    assert {name: column.tolist() for name, column in found.columns.items()} == {"logprobs": [-1, -2], "x": [[1], [2]]}


def test_verify_notices_a_changed_value(options: dict[str, Any], tmp_path: Path) -> None:
    one = record("a", 9, 1)
    result = pack(write_table(tmp_path / "data.arrow", [one]), output_dir=tmp_path / "out", **options)
    for name, column in values(9, 1).items():
        changed = column.copy()
        changed[4] = 3
        other = pack(
            write_table(tmp_path / f"{name}.arrow", [{**one, name: changed}]),
            output_dir=tmp_path / name / "out",
            **options,
        )
        assert other.manifest.weight_checksum != result.manifest.weight_checksum != 0
        packing = json.loads((other.shards / ".nv-meta/packing.json").read_text())
        packing["weight_checksum"] = result.manifest.weight_checksum
        (other.shards / ".nv-meta/packing.json").write_text(json.dumps(packing))
        failed = invoke("verify", other.shards)
        assert failed.exit_code == 1
        assert "the loss weights and columns in the tars have the checksum" in failed.output


def test_records_without_columns_store_nothing(options: dict[str, Any], tmp_path: Path) -> None:
    data = write_lines(tmp_path / "data.jsonl", [{"id": "plain", "input_ids": [30, 31, 32, 33]}])
    result = pack(data, output_dir=tmp_path / "out", **options)
    assert not any(".columns." in part for part in _parts(result.shards))
    assert not list((tmp_path / "out").rglob("*.columns"))
    assert result.manifest.weight_checksum == 0


@pytest.mark.parametrize("flavor", [name for name in FLAVORS if name != "PackedTokensSample"])
def test_other_flavors_reject_columns(options: dict[str, Any], tmp_path: Path, flavor: str) -> None:
    turn = {"role": "assistant", "content": "Five.", "advantage": 0.5}
    tokens = {"id": "tokens", "input_ids": [1, 2, 3], "logprobs": [0, -1, -2.5]}
    turns = {"id": "turns", "messages": [USER, turn]}
    plain = {"id": "plain", "messages": [USER, {"role": "assistant", "content": "Five."}]}
    data = write_lines(tmp_path / "data.jsonl", [tokens, turns, plain])
    single = {"unpacked": True} if flavor == "MultiMixQASample" else {}
    pack(data, output_dir=tmp_path / "out", **{**options, "sample_class": flavor}, **single, max_reject_rate=1)
    rejects = [json.loads(line) for line in (tmp_path / "out/rejects.jsonl").read_text().splitlines()]
    details = {one["id"]: one["detail"] for one in rejects}
    assert details.keys() == {"tokens", "turns"}
    remedy = f"which {flavor} does not store; set `sample_class` to PackedTokensSample"
    assert details["tokens"] == f"the record has the per-token values logprobs, {remedy}"
    assert details["turns"] == f"the record has the per-token values advantage, {remedy}"


@pytest.mark.parametrize(
    "record",
    [
        {"input_ids": [1, 2, 3], "logprobs": [0, -1, -2.5]},
        {"messages": [USER, {"role": "assistant", "content": "Five.", "advantage": 0.5}]},
    ],
)
def test_auto_stores_columns(options: dict[str, Any], tmp_path: Path, record: dict[str, Any]) -> None:
    plain = {"id": "plain", "messages": [USER, {"role": "assistant", "content": "Five."}]}
    data = write_lines(tmp_path / "data.jsonl", [plain, {"id": "valued", **record}])
    result = pack(data, output_dir=tmp_path / "out", **{**options, "sample_class": "auto"})
    assert (result.manifest.sample_class, result.manifest.packed) == ("PackedTokensSample", 2)
    name = next(iter({"logprobs", "advantage"} & {*record, *record.get("messages", [{}])[-1]}))
    assert f"columns.{name}.npy" in _parts(result.shards)


def sample(count: int, seed: int, **columns: Any) -> EncodedSample:
    ids = np.arange(count) + 10 + seed
    return EncodedSample(id=str(seed), input_ids=ids, labels=ids, columns=columns or values(count, seed))


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=5),
    multiple=st.sampled_from([1, 4]),
    tail=st.sampled_from([None, 3]),
)
def test_packed_columns_equal_those_of_the_samples(
    sizes: list[tuple[int, bool]], multiple: int, tail: int | None
) -> None:
    samples = [sample(n + 1, seed) for seed, (n, _) in enumerate(sizes)]
    samples = [one if has else replace(one, columns=None) for one, (_, has) in zip(samples, sizes, strict=True)]
    total = sum(-(-len(one) // multiple) * multiple for one in samples)
    collator = PaddingFreeCollator(pad_multiple=multiple, pad_to=None if tail is None else total + tail)
    batch = collator.collate(samples)
    assert bool(batch.columns) == any(has for _, has in sizes)
    bounds = (batch.cu_seqlens if batch.cu_seqlens_padded is None else batch.cu_seqlens_padded).tolist()
    for name, column in batch.columns.items():
        shifted = batch.megatron_inputs(columns=[name])[name]
        assert (column.shape, column.dtype) == (shifted.shape, shifted.dtype)
        assert column.shape[:2] == batch.input_ids.shape
        expected, moved = torch.zeros_like(column), torch.zeros_like(column)
        for start, one in zip(bounds, samples, strict=False):
            if one.columns:
                own = torch.from_numpy(one.columns[name])
                expected[0, start : start + len(one)] = own
                moved[0, start : start + len(one) - 1] = own[1:]  # entry t has the value of token t + 1
        assert torch.equal(column, expected)
        assert torch.equal(shifted, moved)
        if not any(one.columns is None for one in samples):
            for one, again in zip(samples, batch.split(), strict=True):
                assert np.array_equal(again.columns[name], one.columns[name])  # type: ignore[index]


def test_megatron_shift_is_that_of_labels() -> None:
    ids = np.arange(5) + 100
    one = EncodedSample(input_ids=ids, labels=ids, columns={"ids": ids.astype(np.int32)})
    inputs = PaddingFreeCollator(pad_multiple=4, pad_to=20).collate([one, one]).megatron_inputs(columns=["ids"])
    assert torch.equal(inputs["ids"], inputs["labels"].clamp(min=0))
    assert "ids" not in PaddingFreeCollator().collate([one]).megatron_inputs()


def test_arguments_of_transformers() -> None:
    batch = collate([sample(4, 1)])
    inputs = batch.transformers_inputs(columns=("logprobs", "teacher_ids"))
    assert torch.equal(inputs["logprobs"], batch.columns["logprobs"])
    assert inputs["teacher_ids"].shape == (1, 4, 3)
    assert not batch.columns.keys() & batch.transformers_inputs().keys()
    for call in (batch.transformers_inputs, batch.megatron_inputs):
        with pytest.raises(
            BatchError, match="`columns` must be names of columns of the row .*logprobs.*, got advantages"
        ):
            call(columns=("advantages",))


def test_batches_move_and_keep_dtypes() -> None:
    batch = collate([sample(4, 1)])
    moved = batch.to("meta", dtype=torch.bfloat16)
    assert all(column.device.type == "meta" for column in moved.columns.values())
    assert all(column.device.type == "cpu" for column in batch.columns.values())
    assert {n: c.dtype for n, c in moved.columns.items()} == {n: c.dtype for n, c in batch.columns.items()}
    empty = batch.without_targets()
    assert all(not column.any() for column in empty.columns.values())
    assert batch.columns["logprobs"].any()


def test_rows_of_different_dtypes_have_the_wider_one() -> None:
    half, single = np.array([1, 2.5], np.float16), np.array([1, 2.25], np.float32)
    integers = np.array([1, 2], np.int32)
    for pair, dtype in (((half, single), torch.float32), ((half, integers), torch.float32),
                        ((integers.astype(np.int16), integers), torch.int32)):  # fmt: skip
        batch = collate([sample(2, seed, x=column) for seed, column in enumerate(pair)])
        assert batch.columns["x"].dtype == dtype
        assert batch.columns["x"].tolist() == [[*pair[0].tolist(), *pair[1].tolist()]]
    with pytest.raises(BatchError, match="`x` must be floats or integers in all samples of a row"):
        collate([sample(2, 0, x=half), sample(2, 1, x=np.array([1, 2**24 + 1], np.int32))])


def test_rows_need_equal_numbers_of_values() -> None:
    with pytest.raises(BatchError, match="`x` must have the same number of values per token .* got 1 and 3"):
        collate([sample(2, 0, x=np.ones(2, np.float32)), sample(2, 1, x=np.ones((2, 3), np.float32))])


def test_packs_need_equal_numbers_of_values(options: dict[str, Any], tmp_path: Path) -> None:
    records = [{"input_ids": [1, 2, 3], "teacher_ids": [[1] * k] * 3} for k in (2, 3)]
    data = write_lines(tmp_path / "data.jsonl", records)
    with pytest.raises(BatchError, match="`teacher_ids` must have the same number of values per token"):
        pack(data, output_dir=tmp_path / "out", **options)


def test_joined_rows_keep_their_columns(stored: Path) -> None:
    dataset = PackedDataset(stored, StoredTokens())
    row = EncodedRow.joined([dataset[0], dataset[0]])
    for name, column in collate(row).columns.items():
        assert torch.equal(column, torch.cat([collate(dataset[0]).columns[name]] * 2, dim=1))


def test_tokens_encoded_without_a_tokenizer_have_their_columns() -> None:
    for one in (StoredTokens().encode(normalize(RECORDS[0])), StoredTokens().encode_many([normalize(RECORDS[0])])[0]):
        assert isinstance(one, EncodedSample)
        check({"a": dict(one.columns or {})}, {"a": EXPECTED["a"]})


def test_features_have_columns() -> None:
    feature = {
        "input_ids": torch.tensor([0, 5, 6]), "attention_mask": [0, 1, 1], "token_type_ids": [0, 0, 0],
        "logprobs": torch.tensor([9, -1.5, -2], dtype=torch.bfloat16), "teacher_ids": [[9, 9], [1, 2], [3, 4]],
        "experts": np.array([9, 1, 2], np.int16), "text": "abc", "tags": ["a", "b", "c"],
    }  # fmt: skip
    for workers in (0, 1):
        columns = next(iter(DataflowLoader(MapDistributor([feature]), StoredTokens(), num_workers=workers))).columns
        assert {name: (column.dtype, column.tolist()) for name, column in columns.items()} == {
            "logprobs": (torch.float32, [[-1.5, -2]]),
            "teacher_ids": (torch.int32, [[[1, 2], [3, 4]]]),
            "experts": (torch.int16, [[1, 2]]),
        }
    with pytest.raises(BatchError, match="Feature None: logprobs has 2 entries for 3 tokens"):
        PaddingFreeCollator()([{**feature, "logprobs": [1.0, 2]}])


@pytest.mark.parametrize(
    ("fields", "detail"),
    [
        ({"logprobs": [1.0]}, "logprobs has 1 entries for 3 tokens; one entry per token is needed"),
        ({"teacher_ids": [[1, 2]] * 4}, "teacher_ids has 4 entries for 3 tokens"),
        ({"advantages": ["a"] * 3}, "advantages must have a number, or equally many numbers, for each token"),
        ({"values": [[1], [1, 2], [1]]}, "values must have a number, or equally many numbers"),
        ({"values": [[[1]]] * 3}, "values must have a number, or equally many numbers"),
        ({"x": [2**31, 1, 1]}, "x has the integer 2147483648, and columns have at most 32 bits"),
        ({"x": [1, 1, -(2**40)]}, "x has the integer -1099511627776"),
        ({"x": [1e300] * 3}, r"x has the number 1e\+300, over the range of float32"),
        ({"a.b": [1, 2, 3]}, r"the field 'a\.b' has a value for each token, but names of columns"),
    ],
)
def test_invalid_columns_reject_the_record(fields: dict[str, Any], detail: str) -> None:
    with pytest.raises(RecordError, match=detail):
        normalize({"input_ids": [1, 2, 3], **fields})


def test_other_fields_of_tokens_stay_unused() -> None:
    fields = {
        "tags": ["a", "b", "c"], "flags": [True, False, True], "spans": [1, 2], "ragged": [[1], [1, 2], [3]],
        "token_type_ids": [0, 0, 0], "length": 3,
    }  # fmt: skip
    found = normalize({"input_ids": [1, 2, 3], **fields, "score": [1, 2, 3]})
    assert found.unused_fields == tuple(sorted(fields))
    assert found.columns is not None
    assert list(found.columns) == ["score"]


def test_integers_of_a_float_column_are_floats() -> None:
    found = normalize({"input_ids": [1, 2], "advantages": [0, 1], "other": [0, 1]})
    assert found.columns is not None
    assert [column.dtype for column in found.columns.values()] == [np.float32, np.int32]


def talk(*pairs: tuple[Any, Any], **fields: Any) -> dict[str, Any]:
    """A conversation whose assistant turns have these weights and advantages."""
    answers = []
    for n, pair in enumerate(pairs):
        own = {k: v for k, v in zip(("weight", "advantage"), pair, strict=True) if v is not None}
        answers.append({"role": "assistant", "content": f"It is {n}, five.", **own})
    return {"messages": [turn for answer in answers for turn in (USER, answer)], **fields}


@pytest.mark.parametrize("loss_on", ["assistant", "last", "all"])
@pytest.mark.parametrize("weights", [(None, None, None), (0.5, 0, 2)])
def test_values_of_turns_are_spread_as_their_weights(tokenizer_dir: Path, loss_on: Any, weights: Any) -> None:
    encoder = ChatEncoder.from_pretrained(tokenizer_dir, loss_on=loss_on)
    advantages = (-0.5, 2.5, None)
    with_values = talk(*zip(weights, advantages, strict=True))
    found = encoder.encode(normalize(with_values))
    plain = encoder.encode(normalize(talk(*((w, None) for w in weights))))
    assert np.array_equal(found.labels, plain.labels)
    assert (found.loss_weights is None) == (plain.loss_weights is None)
    assert found.loss_weights is None or np.array_equal(found.loss_weights, plain.loss_weights)
    # The same spans with the advantages as weights, shifted to be above 0, and 1 elsewhere.
    alone = [talk(*((1 if i == turn else 0, None) for i in range(3))) for turn in range(3)]
    spans = [ChatEncoder.from_pretrained(tokenizer_dir).encode(normalize(one)).labels != -100 for one in alone]
    expected = sum(np.where(span, value or 0, 0) for span, value in zip(spans, advantages, strict=True))
    expected = np.where(found.labels != -100, expected, 0).astype(np.float32)
    if loss_on == "last":
        assert found.columns is None or not found.columns["advantage"].any()
    else:
        assert found.columns is not None
        assert found.columns["advantage"].tolist() == expected.tolist()
        trained = {a for a, w in zip(advantages, weights, strict=True) if a is not None and w != 0}
        assert trained <= set(found.columns["advantage"].tolist())


def test_values_of_turns_alone_and_beside_others(encoder: ChatEncoder) -> None:
    records = [talk((None, None)), talk((0.5, 3), (None, -1)), {"text": "A document."}, talk((None, 2)),
               {"input_ids": [20, 21, 22], "logprobs": [0, -1, -2]}]  # fmt: skip
    conversations = [normalize(one) for one in records]
    together = encoder.encode_many(conversations)
    for conversation, found in zip(conversations, together, strict=True):
        assert isinstance(found, EncodedSample)
        alone = encoder.encode(conversation)
        measured = encoder.measure(conversations, keep_tokens=True)[conversations.index(conversation)]
        assert measured.weight_checksum == found.weight_checksum == alone.weight_checksum
        for other in (alone, measured.sample):
            assert other is not None
            assert (other.columns or {}).keys() == (found.columns or {}).keys()
            assert all(np.array_equal(column, found.columns[name]) for name, column in (other.columns or {}).items())  # type: ignore[index]
            assert np.array_equal(*(collate([one]).loss_mask for one in (other, found)))
    assert [bool(one.columns) for one in together] == [False, True, False, True, True]  # type: ignore[union-attr]


def image_of(demo: Any) -> str:
    lines = map(json.loads, demo.jsonl.read_text().splitlines())
    return str(next(one["images"][0] for one in lines if one.get("images") and "broken" not in one["id"]))


def test_values_of_a_conversation_with_images_stay_at_their_tokens(encoder: ChatEncoder, demo: Any) -> None:
    image = image_of(demo)
    one = talk((None, 3), (0.5, -1), images=[image])
    one["messages"][0] = {"role": "user", "content": "<image>Is <|im_end|> an Ünïcode token?"}
    conversation = normalize(one, image_root=str(demo.jsonl.parent))
    found, measured = encoder.encode(conversation), encoder.measure([conversation], keep_tokens=True)[0].sample
    assert (found.input_ids == encoder.image_token_id).sum() > 1
    assert found.loss_weights is not None
    for sample_of in (found, measured):
        assert sample_of is not None
        assert sample_of.columns is not None
        # The turns have the weights 1 and 0.5.
        by_weight = np.select([found.loss_weights == 1, found.loss_weights == 0.5], [3, -1], 0)
        assert np.array_equal(sample_of.columns["advantage"], np.where(found.labels != -100, by_weight, 0))


def test_an_image_in_a_turn_with_a_value_has_none(encoder: ChatEncoder, demo: Any) -> None:
    one = talk((None, 3), images=[image_of(demo)])
    one["messages"][1]["content"] = "It is <image>, five."
    found = encoder.encode(normalize(one, image_root=str(demo.jsonl.parent)))
    assert found.columns is not None
    is_image = found.input_ids == encoder.image_token_id
    assert is_image.sum() > 1
    assert not found.columns["advantage"][is_image].any()
    assert (found.columns["advantage"] == np.where(found.labels != -100, 3, 0)).all()


def test_columns_of_tokens_with_images_are_packed(
    options: dict[str, Any], encoder: ChatEncoder, demo: Any, tmp_path: Path
) -> None:
    image = image_of(demo)
    turns = talk((None, None), images=[image])
    turns["messages"][0] = {"role": "user", "content": "<image>What?"}
    ids = encoder.encode(normalize(turns, image_root=str(demo.jsonl.parent))).input_ids
    column = np.arange(1, len(ids) + 1).astype(np.int32)
    one = {"id": "a", "input_ids": ids.tolist(), "state": column.tolist(), "images": [image]}
    data = write_lines(tmp_path / "data.jsonl", [one])
    result = pack(data, output_dir=tmp_path / "out", image_root=demo.jsonl.parent, **{**options, "seq_len": 1024})
    (batch,) = get_packed_loader(result.shards, encoder, epochs=1, num_workers=0)
    assert batch.num_images == [1]
    check(columns_of([batch]), {"a": {"state": column}})


def test_values_of_turns_are_packed(options: dict[str, Any], encoder: ChatEncoder, tmp_path: Path) -> None:
    records = [talk((None, 3), (None, -1), id="a"), talk((0.5, 2), id="b"), talk((None, None), id="c")]
    result = pack(
        write_lines(tmp_path / "d.jsonl", records), output_dir=tmp_path / "out", **{**options, "seq_len": 256}
    )
    expected = {str(one["id"]): dict(encoder.encode(normalize(one)).columns or {}) for one in records}
    check(columns_of(get_packed_loader(result.shards, encoder, epochs=1, num_workers=0)), expected)
    assert invoke("verify", result.shards).exit_code == 0
    assert result.manifest.notes["loss weights other than 0 and 1"] == 1


def test_values_other_than_numbers_are_unused() -> None:
    turn = {"role": "assistant", "content": "Five.", "reward": {"score": 1}}
    found = normalize({"messages": [{**USER, "advantage": 1}, turn]})
    assert found.unused_fields == ("advantage", "reward")
    with pytest.raises(RecordError, match="advantage of a turn is nan; use a finite number"):
        normalize({"messages": [USER, {**turn, "advantage": float("nan")}]})


class Doubles(Processor):
    """Returns a column of a dtype that is not stored."""

    def encode(self, conversation: Conversation) -> EncodedSample:
        ids = np.arange(9)
        return EncodedSample(id=conversation.id, input_ids=ids, labels=ids, columns={"x": np.zeros(9)})


def test_columns_of_a_custom_processor_are_checked() -> None:
    reject = Doubles().measure([normalize({"text": "A."})])[0].reject
    assert "the column x has dtype float64 and shape (9,) for 9 tokens; use float32" in str(reject)


class Words(Processor):
    """Applies no columns."""

    def encode(self, conversation: Conversation) -> EncodedSample:
        ids = np.arange(9)
        return EncodedSample(id=conversation.id, input_ids=ids, labels=ids)


def test_a_custom_processor_does_not_drop_columns_without_a_sign() -> None:
    for one in (talk((None, 2)), {"input_ids": [1, 2], "logprobs": [0, -1]}):
        assert "Words applies no per-token values" in str(Words().encode_many([normalize(one)])[0])
        assert "Words applies no per-token values" in str(Words().measure([normalize(one)])[0].reject)


def test_inspect_shows_the_columns(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    arguments = ("inspect", stored, "--pack", "out_00000000", "--tokens")
    rows = [json.loads(line) for line in invoke(*arguments, "--json").output.splitlines()]
    first = [row for row in rows if row["segment"] == 0]
    own = next(
        c
        for c in EXPECTED.values()
        if c and len(c["logprobs"]) == len(first) and c["state"][0] == first[0]["columns"]["state"]
    )
    assert [row["columns"]["teacher_ids"] for row in first] == own["teacher_ids"].tolist()
    assert [row["columns"]["logprobs"] for row in first] == pytest.approx(own["logprobs"].tolist())
    assert "teacher_ids" in invoke(*arguments).output
