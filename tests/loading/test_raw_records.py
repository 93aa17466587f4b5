"""Raw records into training: one config, streaming or planned, with nothing lost and exact resume."""

import collections
import inspect
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from energon_packed import (
    BatchError,
    ConfigError,
    DataChangedError,
    DataflowConfig,
    DataflowLoader,
    LoaderOptions,
    MapDistributor,
    PackedIterableDataset,
    SourceError,
    get_raw_loader,
    plan_in_memory,
)
from tests.internals import DemoDataset
from tests.loading.flows import check_every_step, signature
from tests.processes import energon_packed
from tests.sources.test_sources import RECORDS, write

STRATEGIES = ["first_fit", "best_fit", "window_8", "sequential", "pool_8"]


@pytest.fixture(scope="session")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 tokenized records of 3 to 12 tokens, in two files, and one that is too long and one that is broken."""
    folder = tmp_path_factory.mktemp("records")
    rows = [{"id": f"r{n}", "input_ids": [n] * (3 + n % 10), "labels": [n] * (3 + n % 10)} for n in range(60)]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:35]))
    long = {"id": "long", "input_ids": [7] * 40, "labels": [7] * 40}
    (folder / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows[35:], long]) + "{broken\n")
    return folder


def config_of(folder: Path, **settings: Any) -> DataflowConfig:
    options: dict[str, Any] = {
        "dataset_path": [str(folder / "a.jsonl"), str(folder / "b.jsonl")],
        "packing_length": 24,
        "max_reject_rate": 0.1,
    }
    return DataflowConfig(**options | settings)


ALL = {f"r{n}": 1 for n in range(60)}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("streaming", [True, False])
def test_every_record_once_in_rows_that_fit(tokens: Path, strategy: str, streaming: bool) -> None:
    config = config_of(tokens, packing_strategy=strategy, workers=1)
    flow: Any = PackedIterableDataset(config) if streaming else DataflowLoader(MapDistributor(plan_in_memory(config)))
    batches = list(flow)
    assert collections.Counter(ident for batch in batches for ident in batch.ids) == ALL
    assert max(batch.num_tokens for batch in batches) <= 24
    assert {source.dataset for batch in batches for source in batch.sources} == {
        str(tokens / name) for name in ("a.jsonl", "b.jsonl")
    }
    if streaming:
        assert flow.failures.counts == {"overlong": 1, "bad_json": 1}
    else:
        assert plan_in_memory(config).rejects.counts == {"overlong": 1, "bad_json": 1}
        assert len(flow) == len(batches)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_every_record_once_over_ranks_and_workers(tokens: Path, world_size: int, num_workers: int) -> None:
    seen: collections.Counter[str] = collections.Counter()
    for rank in range(world_size):
        stream = PackedIterableDataset(
            config_of(tokens, packing_strategy="pool_6"), rank=rank, world_size=world_size, num_workers=num_workers
        )
        seen.update(ident for batch in stream for ident in batch.ids)
    assert seen == ALL


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("strategy", ["best_fit", "sequential", "pool_6"])
def test_a_stream_resumes_exactly(tokens: Path, strategy: str, num_workers: int) -> None:
    def new_stream() -> Any:
        return PackedIterableDataset(config_of(tokens, packing_strategy=strategy, seed=2), num_workers=num_workers)

    check_every_step(new_stream, lambda step: num_workers == 0 or step % 4 == 0)


def test_streams_of_the_demo_have_the_samples_of_pack(demo: DemoDataset, tokenizer_dir: Path, tmp_path: Path) -> None:
    """The same YAML packs to disk, streams, and plans: the same samples, dropped for the same reasons."""
    file = tmp_path / "pack.yaml"
    options = {
        "dataset_path": [{"path": str(demo.jsonl), "weight": 2}],
        "packing_length": "1k",
        "packing_strategy": "best_fit",
        "filter_overlong": True,
        "processor_config": str(tokenizer_dir),
        "max-reject-rate": 0.2,
        "streaming": True,
        "shuffle": False,
    }
    file.write_text(yaml.safe_dump(options | {"output-dir": str(tmp_path / "out")}))
    done = energon_packed("pack", "--config", file, "--workers", "1", "--quiet")
    assert done.returncode == 0, done.stderr
    config = DataflowConfig.from_yaml(file)
    assert config.seq_len == config.packing_length == 1024
    stream = PackedIterableDataset(config)
    streamed = {
        ident: int(len_) for batch in stream for ident, len_ in zip(batch.ids, batch.cu_seqlens.diff(), strict=True)
    }
    planned = plan_in_memory(config)
    rows = {one.id: len(one) for index in range(len(planned)) for one in planned[index]}
    assert streamed == rows
    manifest = json.loads((tmp_path / "out/webdataset/.nv-meta/packing.json").read_text())
    assert sum(rows.values()) == manifest["tokens"]
    assert len(rows) == manifest["packed"]
    assert planned.rejects.counts == manifest["rejects"] == stream.failures.counts
    assert len(planned) == manifest["packs"]


@pytest.mark.parametrize("index", [1.5, slice(0, 2), "1"])
def test_a_row_index_is_an_integer(tokens: Path, index: Any) -> None:
    dataset = plan_in_memory(config_of(tokens, workers=1))
    with pytest.raises(TypeError) as error:
        dataset[index]
    assert str(error.value) == f"A row index must be an integer, got {index!r}. Pass the index of a single row."


def test_rows_of_a_plan_are_encoded_in_worker_processes(tokens: Path) -> None:
    dataset = plan_in_memory(config_of(tokens, workers=1))
    assert dataset.utilization > 0.9
    assert dataset.lengths.tolist() == [sum(map(len, dataset[index])) for index in range(len(dataset))]

    def new_loader() -> DataflowLoader:
        return DataflowLoader(MapDistributor(dataset), batch_size=2, num_workers=2)

    expected = [signature(batch) for batch in new_loader()]
    loader = new_loader()
    first = signature(next(iter(loader)))
    resumed = new_loader()
    resumed.load_state_dict(loader.state_dict())
    assert [first, *(signature(batch) for batch in resumed)] == expected


def test_packing_can_be_off_and_limited(tokens: Path) -> None:
    assert all(batch.num_samples == 1 for batch in PackedIterableDataset(config_of(tokens, packing=False)))
    limited = PackedIterableDataset(config_of(tokens, max_samples_per_pack=2))
    assert max(batch.num_samples for batch in limited) == 2
    assert list(map(len, (plan_in_memory(config_of(tokens, packing=False, workers=1)),))) == [60]


def test_sources_from_a_yaml_list_with_weights(tokens: Path, tmp_path: Path) -> None:
    listed = tmp_path / "sources.yaml"
    listed.write_text(yaml.safe_dump([{"path": str(tokens / "a.jsonl"), "weight": 2}, str(tokens / "b.jsonl")]))
    stream = PackedIterableDataset(config_of(tokens, dataset_path=str(listed)))
    seen = collections.Counter(ident for batch in stream for ident in batch.ids)
    assert seen == {**ALL, **{f"r{n}#2": 1 for n in range(35)}}


def test_the_format_yaml_is_a_list_of_inputs(tokens: Path, tmp_path: Path) -> None:
    listed = tmp_path / "datasets.yaml"
    listed.write_text(yaml.safe_dump({"datasets": [{"path": str(tokens / name)} for name in ("a.jsonl", "b.jsonl")]}))
    config = config_of(tokens, dataset_path=str(listed), dataset_format="yaml")
    assert collections.Counter(ident for batch in PackedIterableDataset(config) for ident in batch.ids) == ALL
    assert replace(config, seed=1).dataset_path == str(listed)
    with pytest.raises(
        ConfigError, match=r"`dataset_path` must be a YAML file \(`dataset_format` yaml\), got .*a.jsonl"
    ):
        config_of(tokens, dataset_path=str(tokens / "a.jsonl"), dataset_format="yaml")
    nested = tmp_path / "nested.yaml"
    options = {"dataset_format": "yaml", "dataset_path": str(listed), "packing_length": 24}
    nested.write_text(yaml.safe_dump({"dataset": options}))
    stream = PackedIterableDataset(DataflowConfig.from_yaml(nested))
    assert collections.Counter(ident for batch in stream for ident in batch.ids) == ALL


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.json", "a.parquet", "a.arrow", "a.csv", "saved"])
def test_every_container_streams(tokenizer_dir: Path, tmp_path: Path, name: str) -> None:
    """Each record once over two ranks, and the rest is the same from a state in the middle."""
    path = write(tmp_path, name)
    config = DataflowConfig(
        dataset_path=str(path), packing_length=2048, packing_strategy="pool_64", processor_config=str(tokenizer_dir)
    )
    seen: collections.Counter[str] = collections.Counter()
    for rank in range(2):
        stream = PackedIterableDataset(config, rank=rank, world_size=2)
        ids, states = [], []
        for batch in stream:
            ids.append(batch.ids)
            states.append(stream.state_dict())
        resumed = PackedIterableDataset(config, rank=rank, world_size=2)
        resumed.load_state_dict(states[len(states) // 2])
        assert [batch.ids for batch in resumed] == ids[len(states) // 2 + 1 :]
        seen.update(one for row in ids for one in row)
    # an empty answer gives no target
    assert seen == {record["id"]: 1 for record in RECORDS if record["messages"][1]["content"]}  # type: ignore[index]


@pytest.mark.parametrize("weight", [None, 2])
def test_one_switch_streams_or_plans(tokens: Path, weight: int | None) -> None:
    """A config is made from another one with `dataclasses.replace`, and the loaders have one interface."""
    path: Any = [str(tokens / "a.jsonl"), {"path": str(tokens / "b.jsonl"), "weight": weight}] if weight else None
    config = config_of(
        tokens, packing_strategy="pool_8", seed=3, workers=1, **({"dataset_path": path} if path else {})
    )
    seen = []
    for streaming in (True, False):
        one = replace(config, streaming=streaming)
        check_every_step(partial(get_raw_loader, one), lambda step: step % 5 == 0)
        seen.append(collections.Counter(ident for batch in get_raw_loader(one) for ident in batch.ids))
    assert seen[0] == seen[1]
    assert len(seen[0]) == (85 if weight else 60)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"packing_strategy": "worst_fit"}, "`packing_strategy` must be one of first_fit, best_fit"),
        ({"packing_length": None}, "Missing required option: `packing_length`"),
        ({"packing_length": 24, "seq_len": 32}, "`seq_len` must have one value, got 32 and, by its other name, 24"),
        ({"processor_config": {"tokeniser": "x"}}, "unknown option 'tokeniser' in `processor_config`"),
        ({"max_failures": -1}, "`max_failures` must be at least 0, got -1"),
        ({"shuffle": "yes"}, "`shuffle` must be True or False, got 'yes'"),
    ],
)
def test_an_invalid_config_is_one_line(tokens: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(tokens, **settings)


def test_inputs_that_do_not_fit_the_config_raise(tokens: Path, tmp_path: Path) -> None:
    known = "`dataset_format` must be one of auto, .*arrow, commonvoice, csv.*, got 'excel'"
    with pytest.raises(ConfigError, match=known):
        PackedIterableDataset(config_of(tokens, dataset_format="excel"))
    with pytest.raises(SourceError, match=r"a.jsonl must be parquet \(`dataset_format`\), got jsonl"):
        plan_in_memory(config_of(tokens, dataset_format="parquet", workers=1))
    assert PackedIterableDataset(config_of(tokens, dataset_format="jsonl"))
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "no tokenizer"}\n')
    with pytest.raises(ConfigError, match="text, which an encoder must turn into tokens"):
        list(PackedIterableDataset(config_of(tokens, dataset_path=str(text))))


def test_options_that_only_pack_uses_are_no_error_and_unknown_ones_are(tokens: Path, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    base = {"inputs": [str(tokens / "a.jsonl")], "seq_len": 24, "output_dir": "x", "strict": True, "overlong": "error"}
    file.write_text(yaml.safe_dump(base))
    config = DataflowConfig.from_yaml(file)
    assert (config.packing_length, config.overlong, config.strict) == (24, "error", True)
    assert config.packing_strategy == "best_fit"
    file.write_text(yaml.safe_dump(base | {"overlong": "cut"}))
    with pytest.raises(ConfigError, match="`overlong` must be one of drop, error, truncate, split, got 'cut'"):
        DataflowConfig.from_yaml(file)
    file.write_text(yaml.safe_dump(base | {"pakcing_length": 3}))
    with pytest.raises(ConfigError, match="unknown option 'pakcing_length'; did you mean packing_length"):
        DataflowConfig.from_yaml(file)
    file.write_text(yaml.safe_dump({"inputs": ["x"], "dataset_path": "y"}))
    with pytest.raises(ConfigError, match="`inputs` must have one value, .* its other name"):
        DataflowConfig.from_yaml(file)


def test_a_folder_keeps_measurements(tokens: Path, tmp_path: Path) -> None:
    assert len(plan_in_memory(config_of(tokens, work_dir=tmp_path / "w", workers=1)))
    assert list((tmp_path / "w" / "measure").rglob("*.arrow"))


def test_options_of_torch_have_the_names_and_defaults_of_torch() -> None:
    parameters = inspect.signature(torch.utils.data.DataLoader.__init__).parameters
    options = LoaderOptions(num_workers=1).of_torch()
    assert options == {name: parameters[name].default for name in options} | {"num_workers": 1}


@pytest.mark.parametrize("streaming", [True, False])
def test_an_unknown_option_of_a_loader_is_named(tokens: Path, streaming: bool) -> None:
    config = config_of(tokens, streaming=streaming)
    with pytest.raises(ConfigError, match=r"^unknown argument 'order_logs'; did you mean `order_log`\?$"):
        get_raw_loader(config, order_logs="order")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"split": "train=0.77,val=0.23"},
            "`split` must be one split in training on raw records, got train=0.77,val=",
        ),
        ({"split": {"train": 9, "test": 1}}, "`split` must be one split .*, got train=0.9,test=0.1: .*Train on the"),
        ({"split": "train=0.9"}, "the shares of `split` add up to 0.9"),
        (
            {"part": "1/3"},
            "`part` must be left out in training on raw records, got '1/3': .*Pass `part` on the command",
        ),
        ({"part": "auto"}, "`part` must be left out in training on raw records, got 'auto'"),
    ],
)
def test_a_shared_config_that_selects_data_is_refused(
    tokens: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    base = {"inputs": [str(tokens / "a.jsonl")], "seq_len": 24, "output_dir": "x"}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(base | options))
    with pytest.raises(ConfigError, match=message):
        DataflowConfig.from_yaml(tmp_path / "c.yaml")
    with pytest.raises(ConfigError, match=message):
        config_of(tokens, **options)
    for whole in ({"split": "train=1"}, {"split": {"val": 1, "train": 0}}, {"part": "0/1"}):
        (tmp_path / "c.yaml").write_text(yaml.safe_dump(base | whole))
        assert DataflowConfig.from_yaml(tmp_path / "c.yaml")
        assert replace(config_of(tokens, **whole), seed=1)


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rows_of_one_kind(demo: DemoDataset, tokenizer_dir: Path, strategy: str, streaming: bool) -> None:
    """`group_by: media` of a shared config holds in training."""
    options: Any = {"inputs": [demo.jsonl], "tokenizer": tokenizer_dir, "seq_len": 2048, "max_reject_rate": 1}
    options |= {"workers": 1, "packing_strategy": strategy, "streaming": streaming}
    rows = {
        group: [
            set(map(bool, batch.num_images)) for batch in get_raw_loader(DataflowConfig(**options, group_by=group))
        ]
        for group in ("none", "media")
    }
    assert {True, False} in rows["none"]
    assert {True, False} not in rows["media"]
    assert sum(map(len, rows["media"])) == len(rows["media"]) <= 2 * len(rows["none"])
    with pytest.raises(ConfigError, match="`group_by` must be one of none, media, got 'kind'"):
        DataflowConfig(**options, group_by="kind")


def test_chunks_and_their_records_have_another_order_in_each_epoch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two files of two chunks of 11 lines, each of 76 bytes, without ids."""
    for name, first in (("a", 10), ("b", 32)):
        lines = [json.dumps({"input_ids": [n] * 6, "labels": [n] * 6}) for n in range(first, first + 22)]
        assert {len(line) for line in lines} == {75}
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    config = config_of(tmp_path, packing_strategy="sequential", packing_length=6)
    stream = PackedIterableDataset(config, num_workers=0)
    orders, places = [], []
    for _ in range(2):
        batches = list(stream)
        numbers = [int(batch.input_ids[0, 0]) for batch in batches]
        assert [batch.ids for batch in batches] == [[f"{'ab'[n > 31]}:{(n - 10) % 22 * 76}"] for n in numbers]
        chunks = [numbers[start : start + 11] for start in range(0, 44, 11)]
        assert sorted(map(sorted, chunks)) == [list(range(first, first + 11)) for first in (10, 21, 32, 43)]
        orders.append([min(chunk) for chunk in chunks])
        places += [tuple(n - min(chunk) for n in chunk) for chunk in chunks]
    assert orders[0] != orders[1]
    assert len(set(places)) == 8
    (tmp_path / "b.jsonl").write_text('{"id": "bad", "messages": []}\n')
    list(PackedIterableDataset(config, num_workers=0))
    assert f"the last is record bad of {tmp_path / 'b.jsonl'}: empty: messages is an empty list" in caplog.text


def test_an_input_that_changes_is_an_error_of_a_stream_and_of_its_state(tmp_path: Path) -> None:
    for name in ("a", "b"):
        lines = [json.dumps({"id": f"{name}{n}", "input_ids": [n] * 6, "labels": [n] * 6}) for n in range(10, 300)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")

    def new_stream(**options: Any) -> PackedIterableDataset:
        settings = {"packing_strategy": "sequential", "packing_length": 6, "shuffle": False} | options
        return PackedIterableDataset(config_of(tmp_path, **settings), num_workers=0)

    stream, late = new_stream(), new_stream()
    next(iter(stream))
    state = stream.state_dict()
    with pytest.raises(BatchError, match="shuffle"):
        new_stream(shuffle=True).load_state_dict(state)
    buffering, restored = new_stream(packing_strategy="pool_8"), new_stream(packing_strategy="pool_8")
    next(iter(buffering))
    restored.load_state_dict(buffering.state_dict())
    started = iter(new_stream(dataset_path=str(tmp_path / "a.jsonl")))
    next(started)  # 256 of 290 records are read, and the last of 4 chunks is open
    (tmp_path / "b.jsonl").write_text(lines[0] + "\n")
    with pytest.raises(DataChangedError, match=r"b\.jsonl was replaced or changed while it was in use"):
        next(iter(late))  # the second file, before a record of the first
    (tmp_path / "a.jsonl").write_text(lines[0] + "\n")
    with pytest.raises(DataChangedError, match=r"a\.jsonl was replaced or changed while it was in use"):
        list(started)
    with pytest.raises(DataChangedError, match=r"a\.jsonl was replaced or changed while it was in use"):
        next(iter(restored))  # before it reads the records that wait for a row
    with pytest.raises(BatchError, match="content"):
        new_stream().load_state_dict(state)
