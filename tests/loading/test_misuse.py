"""Loaders in unusual hands: iterators that stay open, states that are refused, damaged or of another loader."""

import copy
import json
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from energon_packed import (
    BatchError,
    ChatEncoder,
    ConfigError,
    DataflowConfig,
    DataflowLoader,
    EnergonDistributor,
    EnergonPackedError,
    IterableDistributor,
    JointLoader,
    MapDistributor,
    PackedDataset,
    PackedIterableDataset,
    PaddingFreeCollator,
    PoolPacker,
    get_packed_loader,
    get_raw_loader,
    pack,
    steps_per_epoch,
)
from tests.internals import StoredTokens

Make = Callable[..., Any]
PACKS = 24


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: MapDistributor("out"), r"^`dataset` must be a map-style dataset, got 'out'\. Pass PackedDataset"),
        (lambda: MapDistributor(Path("out")), r"^`dataset` must be a map-style dataset, got .*\. Pass PackedDataset"),
        (lambda: PoolPacker(0), r"^`max_tokens` must be at least 1, got 0"),
        (lambda: PoolPacker(2**31), r"^a row must have at most 2147483647 tokens \(int32\), got 2147483648"),
        (lambda: get_raw_loader("c.yaml"), r"^`config` must be a DataflowConfig, got 'c\.yaml'\. Pass .*from_yaml"),
        (
            lambda: ChatEncoder("tok"),
            r"^`tokenizer` must be a tokenizer of .*, got 'tok'\. .*from_pretrained",
        ),
        (
            lambda: DataflowLoader(MapDistributor([1, 2]), num_worker=2),
            r"^unknown argument 'num_worker'; did you mean `num_workers`\?",
        ),
    ],
)
def test_a_path_or_a_misspelled_name_is_one_line_with_the_remedy(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()


def packed(folder: Path, packs: int, first: int = 0, **options: Any) -> Path:
    """Packs of one sample each."""
    folder.mkdir()
    rows = [{"id": f"s{first + n}", "input_ids": [n + 1] * 5, "labels": [n + 1] * 5} for n in range(packs)]
    (folder / "data.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    options |= {"sample_class": "PackedTokensSample", "max_samples_per_pack": 1, "workers": 1}
    return pack(folder / "data.jsonl", output_dir=folder / "out", seq_len=16, encoder=StoredTokens(), **options).shards


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda path: {"encoder": "tok"}, r"^`encoder` must be a Processor, got 'tok'\. Pass .*from_pretrained"),
        (lambda path: {"path": [path]}, r"^`path` must be the path of a dataset or a Metadataset, got \["),
        (lambda path: {"path": None}, r"^`path` must be the path of a dataset or a Metadataset, got None"),
        (
            lambda path: {"path": path.parents[1] / "data.jsonl"},
            r"data.jsonl must be a dataset folder or a Metadataset \(.yaml\), got another file\. .*get_raw_loader",
        ),
        (lambda path: {"path": next(path.glob("*.tar"))}, r"got another file\. Pass the folder of the tar"),
    ],
)
def test_an_argument_of_another_type_is_named(folder: Path, arguments: Any, message: str) -> None:
    values = {"path": folder} | arguments(folder)
    makes: list[Make] = [get_packed_loader, PackedDataset, *([] if "encoder" in values else [EnergonDistributor])]
    for make in makes:
        with pytest.raises(EnergonPackedError, match=message) as raised:
            make(**values)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("packer", 4096, "Packer"),
        ("collator", len, "Collator"),
        ("processor", "tok", "Processor"),
    ],
)
def test_a_role_of_another_type_is_named(folder: Path, name: str, value: Any, kind: str) -> None:
    makes: list[Make] = [lambda **roles: get_packed_loader(folder, **roles)] if name != "processor" else []
    makes += [lambda **roles: DataflowLoader(MapDistributor([]), **roles)]
    for make in makes:
        with pytest.raises(ConfigError, match=rf"^`{name}` must be a {kind}, got "):
            make(**{name: value})


def test_a_string_in_place_of_a_number_is_named(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"^`micro_batch_size` must be an integer, got '1'"):
        get_packed_loader(folder, micro_batch_size="1")  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed(tmp_path_factory.mktemp("misuse") / "data", PACKS)


@pytest.fixture(params=["energon", "dataflow"])
def make(request: pytest.FixtureRequest, folder: Path) -> Make:
    def energon(**options: Any) -> Any:
        return get_packed_loader(folder, epochs=1, **{"num_workers": 0, **options})

    def dataflow(**options: Any) -> Any:
        return DataflowLoader(MapDistributor(PackedDataset(folder)), batch_size=1, **options)

    return energon if request.param == "energon" else dataflow


def ids(batches: Any) -> list[Any]:
    return [batch.ids for batch in batches]


def test_an_iterator_that_stays_open_ends_no_later_epoch(make: Make) -> None:
    reference = make()
    epochs = [ids(reference) for _ in range(2)]
    loader = make()
    left = iter(loader)
    next(left)
    assert len(ids(loader)) == len(epochs[0]) - 1
    running = iter(loader)
    given = ids(next(running) for _ in range(3))
    assert next(left, None) is None
    resumed = make()
    resumed.load_state_dict(loader.state_dict())
    assert given + ids(running) == given + ids(resumed) == epochs[1]


def test_a_state_is_not_loaded_into_a_running_loop(make: Make) -> None:
    loader = make()
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    rest = ids(next(batches) for _ in range(3))
    loader.load_state_dict(state)
    with pytest.raises(BatchError, match="was called while this iterator was active. Leave the loop"):
        next(batches)
    assert ids(loader)[:3] == rest


def test_a_refused_state_changes_nothing(make: Make) -> None:
    expected, other = ids(make()), make(seed=5)
    ids(other)
    next(iter(other))
    loader = make()
    batches = iter(loader)
    given = ids(next(batches) for _ in range(4))
    with pytest.raises(BatchError, match="seed 5 saved, 0 now"):
        loader.load_state_dict(other.state_dict())
    assert given + ids(loader) == expected


def test_a_joint_loader_that_refuses_leaves_all_its_loaders(make: Make) -> None:
    def joint(seed: int) -> JointLoader:
        return JointLoader({"a": make(num_workers=1), "b": make(seed=seed)}, {"a": 1, "b": 1})

    expected = [(name, batch.ids) for name, batch in joint(1)]
    other = joint(2)
    batches = iter(other)
    for _ in range(9):
        next(batches)
    loader = joint(1)
    with pytest.raises(BatchError, match="seed 2 saved, 1 now"):
        loader.load_state_dict(other.state_dict())
    assert [(name, batch.ids) for name, batch in loader] == expected


class Interrupted(PaddingFreeCollator):
    """Ctrl-C while the fifth batch is made."""

    calls = 0

    def collate(self, samples: Any) -> Any:
        self.calls += 1
        if self.calls == 5:
            raise KeyboardInterrupt
        return super().collate(samples)


def test_after_ctrl_c_inside_the_loader_no_wrong_state_is_saved(make: Make) -> None:
    loader = make(collator=Interrupted())
    batches, given = iter(loader), []
    with pytest.raises(KeyboardInterrupt):
        given += ids(iter(lambda: next(batches), None))
    expected, resumed = ids(make()), make()
    state = loader.state_dict()
    resumed.load_state_dict(state)
    assert state["step"] == 4
    assert ids(resumed) == ids(loader) == expected[4:]


@pytest.mark.parametrize(
    "damage",
    [
        lambda state: state.pop("step"),
        lambda state: state.update(step=None),
        lambda state: state.update(epoch="1"),
        lambda state: state.update(shards=None, segments=[None]),
        lambda state: state.update(shards=[], segments=[]),
        lambda state: state.update(shards={"fields": 5}, segments=5),
        lambda state: state.update(identity=None),
    ],
)
def test_damaged_states_are_refused_in_one_line(make: Make, damage: Callable[[dict[str, Any]], object]) -> None:
    loader = make()
    batches = iter(loader)
    for _ in range(4):
        next(batches)
    state = json.loads(json.dumps(loader.state_dict()))
    make().load_state_dict(copy.deepcopy(state))
    damage(state)
    with pytest.raises(BatchError, match=r"The saved state (is corrupted \(.*\). Load|does not match this loader)"):
        make().load_state_dict(state)


def test_a_stream_refuses_a_damaged_state() -> None:
    def new() -> DataflowLoader:
        return DataflowLoader(IterableDistributor([{"input_ids": [n, n]} for n in range(9)]), batch_size=2)

    loader = new()
    next(iter(loader))
    state = json.loads(json.dumps(loader.state_dict()))
    new().load_state_dict(copy.deepcopy(state))
    changes: list[dict[str, Any]] = [{"shards": []}, {"shards": [[1, {}]]}, {"next_worker": 7}, {"num_shards": None}]
    for change in changes:
        with pytest.raises(BatchError, match=r"The saved state is corrupted \(.*\). Load an earlier"):
            new().load_state_dict(copy.deepcopy(state) | change)


def test_a_state_of_another_order_is_named(folder: Path) -> None:
    energon = get_packed_loader(folder, epochs=1, num_workers=0)
    planned = DataflowLoader(MapDistributor(PackedDataset(folder)), batch_size=1)
    with pytest.raises(BatchError, match="distributor_distributor MapDistributor saved, EnergonDistributor now"):
        energon.load_state_dict(planned.state_dict())
    with pytest.raises(BatchError, match="distributor_distributor EnergonDistributor saved, MapDistributor now"):
        planned.load_state_dict(energon.state_dict())


def test_loaders_that_share_a_blend_have_epochs_of_their_own(folder: Path, tmp_path: Path) -> None:
    other = packed(tmp_path / "other", 7, 100)
    parts = [{"path": str(folder), "weight": 3}, {"path": str(other), "weight": 1}]
    blend = PackedDataset(metadataset(tmp_path / "m.yaml", {"blend": parts}))
    alone = DataflowLoader(MapDistributor(blend), batch_size=1)
    expected = [ids(alone) for _ in range(2)][1]
    first, second = (DataflowLoader(MapDistributor(blend), batch_size=1) for _ in range(2))
    ids(first)
    batches, found = iter(first), []
    for batch in batches:
        found.append(batch.ids)
        next(iter(second))
    assert found == expected


def metadataset(file: Path, train: dict[str, Any]) -> Path:
    top = {"__module__": "megatron.energon", "__class__": "MetadatasetV2", "splits": {"train": train}}
    file.write_text(yaml.safe_dump(top))
    return file


@pytest.mark.parametrize("value", [0, -1, float("nan"), True, "2"])
def test_shares_of_a_blend_are_above_0(folder: Path, tmp_path: Path, value: object) -> None:
    for kind, name in (("blend", "weight"), ("blend_epochized", "repetitions")):
        file = metadataset(tmp_path / "m.yaml", {kind: [{"path": str(folder), name: value}]})
        for load in (PackedDataset, steps_per_epoch, get_packed_loader):
            with pytest.raises(ConfigError, match=f"{name} of .* must be above 0, got "):
                load(file)  # type: ignore[operator]


@pytest.mark.parametrize("repetitions", [(1.0, 1.0), (2.5, 1.0), (0.3, 0.7)])
def test_steps_of_a_blend_are_those_of_the_loader(
    folder: Path, tmp_path: Path, repetitions: tuple[float, ...]
) -> None:
    """Energon deals the packs of a dataset on from the worker that got the last one of the dataset before."""
    paths = [folder, packed(tmp_path / "other", 7, 100)]
    parts = [{"path": str(one), "repetitions": times} for one, times in zip(paths, repetitions, strict=True)]
    file = metadataset(tmp_path / "m.yaml", {"blend_epochized": parts})
    for world_size in (1, 2, 3, 5):
        for rows in (1, 3):
            place: dict[str, Any] = {"world_size": world_size, "micro_batch_size": rows, "num_workers": 0}
            try:
                steps = steps_per_epoch(file, **place)
            except ConfigError as error:
                with pytest.raises(ConfigError, match="rank . of . has no batch, and other ranks have") as raised:
                    get_packed_loader(file, epochs=1, rank=0, **place)
                assert str(raised.value) == str(error)
                continue
            ranks = [list(get_packed_loader(file, epochs=1, rank=rank, **place)) for rank in range(world_size)]
            assert {len(batches) for batches in ranks} == {steps}
            # The packs of Energon: the batches that are not repeated without targets.
            assert steps == max(sum(batch.ids[0] is not None for batch in batches) for batches in ranks)


def test_a_state_of_one_split_is_none_of_another(tmp_path: Path) -> None:
    path = packed(tmp_path / "both", 8, split={"train": 0.5, "val": 0.5})
    train, val = (
        DataflowLoader(MapDistributor(PackedDataset(path, split=one)), batch_size=1) for one in ("train", "val")
    )
    with pytest.raises(BatchError, match="The dataset changed since the state was saved"):
        val.load_state_dict(train.state_dict())


def test_a_streaming_state_is_of_its_encoder(text_tokenizer_dir: Path, tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there."}]
    (tmp_path / "a.jsonl").write_text(f"{json.dumps({'messages': talk})}\n" * 40)

    def loader(loss_on: Any) -> PackedIterableDataset:
        given = {"dataset_path": str(tmp_path / "a.jsonl"), "packing_length": 64, "tokenizer": text_tokenizer_dir}
        return PackedIterableDataset(DataflowConfig(**given, loss_on=loss_on))

    first = loader("assistant")
    next(iter(first))
    loader("assistant").load_state_dict(first.state_dict())
    with pytest.raises(BatchError, match="processor .* saved, .* now"):
        loader("all").load_state_dict(first.state_dict())


@pytest.mark.parametrize("context", ["spawn", "forkserver", multiprocessing.get_context("spawn")])
def test_workers_start_as_asked(folder: Path, context: Any) -> None:
    loader = DataflowLoader(
        MapDistributor(PackedDataset(folder)), batch_size=4, num_workers=1, multiprocessing_context=context
    )
    assert sorted(ident for batch in loader for ident in batch.ids) == sorted(f"s{n}" for n in range(PACKS))
    assert loader.failures.counts == {}


def test_weights_have_a_sum(folder: Path) -> None:
    loaders = {name: DataflowLoader(MapDistributor(PackedDataset(folder))) for name in "ab"}
    with pytest.raises(ConfigError, match="sum of `weights` must be finite"):
        JointLoader(loaders, {"a": 1e308, "b": 1e308})


@pytest.mark.parametrize("number", [PACKS, -PACKS - 1])
def test_packs_have_numbers(folder: Path, number: int) -> None:
    dataset = PackedDataset(folder)
    for read in (dataset.sample, dataset.__getitem__):
        with pytest.raises(IndexError, match=f"Pack index {number} is out of range for a dataset of 24 packs"):
            read(number)
    assert dataset.sample(-1).__key__ == dataset.sample(PACKS - 1).__key__


@pytest.mark.parametrize("index", [1.5, slice(0, 2), "1"])
def test_a_pack_index_is_an_integer(folder: Path, index: Any) -> None:
    dataset = PackedDataset(folder)
    for read in (dataset.sample, dataset.__getitem__, lambda index: dataset.__getitems__([0, index])):
        with pytest.raises(TypeError) as error:
            read(index)
        assert str(error.value) == f"A pack index must be an integer, got {index!r}. Pass the index of a single pack."
    assert dataset.sample(np.int64(3)).__key__ == dataset.sample(3).__key__
