"""PackedDataset over Metadatasets: known length, the shares that Energon draws, nested, seeded."""

import collections
import itertools
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from torch.utils.data import RandomSampler

from energon_packed import (
    ConfigError,
    DataflowLoader,
    MapDistributor,
    PackedDataset,
    get_packed_loader,
    steps_per_epoch,
)
from tests.internals import cli, make_blend, read_blend, read_metadataset
from tests.loading.flows import check_every_step, energon_folders

PACKS = {"a": 40, "b": 12, "c": 8}


@pytest.fixture(scope="session")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return energon_folders(tmp_path_factory, PACKS)


def metadataset(file: Path, split: str) -> Path:
    file.write_text(f"__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train: {split}\n")
    return file


def shares(dataset: PackedDataset) -> dict[str, int]:
    return dict(collections.Counter(Path(dataset[i][0].source.dataset).parent.name[0] for i in range(len(dataset))))


def test_weights_are_shares_of_an_epoch_as_long_as_all_together(outputs: dict[str, Path], tmp_path: Path) -> None:
    inner = metadataset(tmp_path / "inner.yaml", f"{{blend: [{{path: {outputs['a']}, weight: 1}}, "
                        f"{{path: {outputs['b']}, weight: 3, subflavors: {{x: y}}}}]}}")  # fmt: skip
    outer = metadataset(tmp_path / "outer.yaml", f"{{blend: [{{path: {inner}, weight: 4}}, "
                        f"{{path: {outputs['c']}, weight: 2}}]}}")  # fmt: skip
    dataset = PackedDataset(outer)
    assert len(dataset) == len(dataset.lengths) == sum(PACKS.values()) == 60
    assert shares(dataset) == {"a": 10, "b": 30, "c": 20}
    seen = collections.Counter(dataset[i][0].id for i in range(len(dataset)))
    assert {n for ident, n in seen.items() if ident[0] == "b"} == {2, 3}
    assert {n for ident, n in seen.items() if ident[0] == "a"} == {1}
    assert next(one.source.subflavors for i in range(60) for one in dataset[i] if one.id[0] == "b") == {"x": "y"}
    again = PackedDataset(outer)
    assert [again[i][0].id for i in range(60)] == [dataset[i][0].id for i in range(60)]
    again.set_epoch(1)
    assert [again[i][0].id for i in range(60)] != [dataset[i][0].id for i in range(60)]
    assert shares(again) == shares(dataset)
    drawn = itertools.islice(get_packed_loader(outer, num_workers=0), 3000)
    energon = collections.Counter(batch.ids[0][0] for batch in drawn)
    for name, count in shares(dataset).items():
        p = count / 60
        assert abs(energon[name] - 3000 * p) < 4 * (3000 * p * (1 - p)) ** 0.5


@pytest.mark.parametrize(
    ("weights", "expected"),  # of an epoch of 60 packs
    [
        ((1, 1, 1), (20, 20, 20)),
        ((0.26, 0.74, 0.01), (15, 44, 1)),
        ((1, 1, 5), (9, 8, 43)),
        ((1, 0.001, 1), (30, 0, 30)),
    ],
)
def test_shares_that_are_no_integers_lose_less_than_a_pack(
    outputs: dict[str, Path], tmp_path: Path, weights: tuple[float, ...], expected: tuple[int, ...]
) -> None:
    members = ", ".join(f"{{path: {outputs[name]}, weight: {w}}}" for name, w in zip("abc", weights, strict=True))
    dataset = PackedDataset(metadataset(tmp_path / "m.yaml", f"{{blend: [{members}]}}"))
    exact = [60 * weight / sum(weights) for weight in weights]
    assert all(abs(count - part) < 1 for count, part in zip(expected, exact, strict=True))
    assert shares(dataset) == {name: count for name, count in zip("abc", expected, strict=True) if count}


@pytest.mark.parametrize(
    ("kind", "numbers", "repeats"),
    [
        ("blend_epochized", {"a": 1, "b": 1}, False),
        ("blend_epochized", {"a": 0.5, "b": 1}, False),
        ("blend_epochized", {"a": 1, "b": 2}, True),
        ("blend_epochized", {"a": 1, "a/": 1}, True),  # the same folder
        ("blend", {"a": 1, "b": 1}, True),
    ],
)
def test_an_epoch_repeats_packs_by_weights_repetitions_or_a_folder_that_is_listed_twice(
    outputs: dict[str, Path], tmp_path: Path, kind: str, numbers: dict[str, float], repeats: bool
) -> None:
    name = "weight" if kind == "blend" else "repetitions"
    members = ", ".join(f"{{path: {outputs[folder[0]]}, {name}: {n}}}" for folder, n in numbers.items())
    assert PackedDataset(metadataset(tmp_path / "m.yaml", f"{{{kind}: [{members}]}}")).repeats is repeats
    assert not PackedDataset(outputs["a"]).repeats


def test_repetitions_are_those_of_energons_epoch(outputs: dict[str, Path], tmp_path: Path) -> None:
    repetitions = {"a": 1, "b": 2, "c": 0.7}
    blend = ", ".join(f"{{path: {outputs[name]}, repetitions: {n}}}" for name, n in repetitions.items())
    recipe = metadataset(tmp_path / "r.yaml", f"{{blend_epochized: [{blend}]}}")
    dataset = PackedDataset(recipe)
    assert shares(dataset) == {"a": 40, "b": 24, "c": 5}
    theirs = collections.Counter(b.ids[0] for b in get_packed_loader(recipe, epochs=1, num_workers=0))
    ours = collections.Counter(dataset[i][0].id for i in range(len(dataset)))
    assert {i: n for i, n in theirs.items() if i[0] != "c"} == {i: n for i, n in ours.items() if i[0] != "c"}
    assert sum(theirs.values()) == sum(ours.values()) == len(dataset)
    assert sorted(RandomSampler(dataset)) == list(range(len(dataset)))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_blend_resumes_under_the_torch_loader(outputs: dict[str, Path], tmp_path: Path, num_workers: int) -> None:
    recipe = metadataset(
        tmp_path / "m.yaml", f"{{blend: [{{path: {outputs['b']}, weight: 1}}, {{path: {outputs['c']}, weight: 1}}]}}"
    )

    def new_loader() -> DataflowLoader:
        return DataflowLoader(MapDistributor(PackedDataset(recipe)), batch_size=4, num_workers=num_workers)

    check_every_step(new_loader)


def test_metadatasets_without_a_map_style_epoch_are_refused(outputs: dict[str, Path], tmp_path: Path) -> None:
    subset = metadataset(tmp_path / "s.yaml", f"{{path: {outputs['a']}, subset: {{range: [0%, 50%]}}}}")
    with pytest.raises(ConfigError, match="uses 'subset' of .*, which only Energon"):
        PackedDataset(subset)
    with pytest.raises(
        ConfigError, match="has no split 'val'; it has train. Pass one of these as `split`, blend again with"
    ):
        PackedDataset(subset, split="val")
    assert np.array_equal(PackedDataset(outputs["c"]).lengths, [3] * 8)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_steps_of_an_epochized_blend_are_those_of_the_loader(
    outputs: dict[str, Path], tmp_path: Path, world_size: int, num_workers: int
) -> None:
    blend = ", ".join(f"{{path: {outputs[name]}, repetitions: {n}}}" for name, n in {"a": 1, "b": 2}.items())
    recipe = metadataset(tmp_path / "r.yaml", f"{{blend_epochized: [{blend}]}}")
    place = {"world_size": world_size, "num_workers": num_workers, "micro_batch_size": 3}
    found = [
        len(list(get_packed_loader(recipe, epochs=1, rank=rank, **place)))  # type: ignore[arg-type]
        for rank in range(world_size)
    ]
    assert found == [steps_per_epoch(recipe, **place)] * world_size


def test_an_epoch_of_a_blend_by_weight_is_the_same_everywhere(outputs: dict[str, Path], tmp_path: Path) -> None:
    """As many packs as all datasets together: in PackedDataset, its steps, the report and the comments of blends."""
    numbers = {"a": 1, "b": 3, "c": 2}
    blend = ", ".join(f"{{path: {outputs[name]}, weight: {number}}}" for name, number in numbers.items())
    recipe = metadataset(tmp_path / "w.yaml", f"{{blend: [{blend}]}}")
    dataset = PackedDataset(recipe)
    assert len(dataset) == steps_per_epoch(recipe) == sum(PACKS.values())
    (split,) = read_blend(read_metadataset(recipe))
    assert split.drawn("packs") == pytest.approx(len(dataset))
    times = [entry.times for entry in split.entries]
    assert times == pytest.approx([shares(dataset)[name] / PACKS[name] for name in numbers], abs=0.01)
    made = make_blend([(outputs[name], number) for name, number in numbers.items()])
    assert made.times_seen() == pytest.approx(times)
    for world_size, rows, epoch_end in itertools.product((1, 7), (1, 3), ("repeat", "drop")):
        place: Any = {"rank": 0, "world_size": world_size, "epoch_end": epoch_end}
        steps = len(DataflowLoader(MapDistributor(dataset), batch_size=rows, **place))
        assert steps_per_epoch(recipe, world_size=world_size, micro_batch_size=rows, epoch_end=epoch_end) == steps
    with pytest.raises(ConfigError, match="`epoch_end='error'`"):
        steps_per_epoch(recipe, world_size=7, epoch_end="error")
    with pytest.raises(ConfigError, match="`world_size` must be at least 1, got 0"):
        steps_per_epoch(recipe, world_size=0)
    assert steps_per_epoch(outputs["c"], micro_batch_size=3) == 3


def test_verify_checks_every_dataset_of_a_blend(outputs: dict[str, Path], tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(outputs["c"], broken)
    blend = ", ".join(f"{{path: {path}, weight: 1}}" for path in (outputs["b"], broken))
    recipe = metadataset(tmp_path / "w.yaml", f"{{blend: [{blend}]}}")
    runner = CliRunner()
    done = runner.invoke(cli, ["verify", str(recipe), "--fast", "--workers", "1"])
    assert done.exit_code == 0, done.output
    assert len(re.findall(r"^\d+ checks passed, [13] not checked: ", done.output, re.MULTILINE)) == 2
    tar = next(broken.glob("*.tar"))
    tar.write_bytes(tar.read_bytes()[:-2000])
    done = runner.invoke(cli, ["verify", str(recipe), "--fast", "--workers", "1"])
    assert done.exit_code == 1
    assert f"do not train on {broken}" in done.output
    assert f" checks passed, 1 not checked: {outputs['b']}" in done.output
