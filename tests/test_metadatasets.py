"""The recipes in metadatasets/ load without changes, with data at the paths that they name."""

import collections
import itertools
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from megatron.energon import TaskEncoder, WorkerConfig, get_loader, get_train_dataset

from energon_packed import ConfigError, PackedDataset, get_packed_loader
from tests.conftest import Packer
from tests.internals import DemoDataset, cli

RECIPES = Path(__file__).parents[1] / "metadatasets"


@pytest.fixture(scope="module")
def recipes(
    demo: DemoDataset, pack_demo: Packer, text_tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A copy of the recipes, with out/node_a, node_b and node_c beside it: texts, as the tests draw 2,000 packs."""
    root = tmp_path_factory.mktemp("recipes")
    shutil.copytree(RECIPES, root / "metadatasets")
    texts = root / "texts.jsonl"
    texts.write_bytes(b"\n".join(line for line in demo.jsonl.read_bytes().splitlines() if b"image" not in line))
    options: dict[str, Any] = {"split": {"train": 0.7, "val": 0.3}, "max_packs_per_shard": 2, "seq_len": 256}
    options |= {"inputs": (str(texts),), "tokenizer": text_tokenizer_dir, "sample_class": "PackedTokensSample"}
    for name in ("node_a", "node_b", "node_c"):
        shards = pack_demo(shard_prefix=name, **options).shards
        shutil.copytree(shards, root / "out" / name / "webdataset")
    return root / "metadatasets"


def drawn(recipe: Path, count: int, **options: Any) -> collections.Counter[str]:
    """How many packs come from each node."""
    loader = get_packed_loader(recipe, num_workers=0, **options)
    return collections.Counter(b.__key__[0].rpartition("_")[0] for b in itertools.islice(loader, count))


def test_every_recipe_is_tested() -> None:
    here = Path(__file__).read_text()
    assert all(f'"{recipe.name}"' in here for recipe in RECIPES.glob("*.yaml"))


@pytest.mark.parametrize("name", sorted(recipe.name for recipe in RECIPES.glob("*.yaml")))
def test_the_command_of_a_recipe_writes_the_recipe(
    recipes: Path, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(recipes.parent, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    recipe = RECIPES / name
    (command,) = re.findall(r"^#   energon-packed (metadataset .*)", recipe.read_text(), re.M)
    done = CliRunner().invoke(cli, shlex.split(command.removesuffix(" --overwrite")))
    assert (done.exit_code, type(done.exception)) == (1, ConfigError)  # the recipe has comments of its own
    assert Path("metadatasets", name).read_bytes() == recipe.read_bytes()
    for _ in range(2):
        done = CliRunner().invoke(cli, shlex.split(command))
        assert done.exit_code == 0, done.output
        command = command.removesuffix(" --overwrite")  # the command replaces its own file without it
    assert yaml.safe_load(Path("metadatasets", name).read_text()) == yaml.safe_load(recipe.read_text())


@pytest.mark.parametrize("name", ["two_outputs.yaml", "two_outputs_v1.yaml"])
def test_two_outputs(recipes: Path, name: str) -> None:
    assert 265 < drawn(recipes / name, 400)["node_a"] < 335  # three in four, within 4 standard deviations
    val = drawn(recipes / name, 10_000, split="val", epochs=1, shuffle=False)
    assert set(val) == {"node_a"}
    packs = PackedDataset(recipes.parent / "out" / "node_a", split="val")
    assert val["node_a"] == len(packs)


def test_epochized(recipes: Path) -> None:
    packs = len(PackedDataset(recipes.parent / "out" / "node_a"))
    seen = drawn(recipes / "epochized.yaml", 10_000, epochs=1)
    assert seen == {"node_a": packs, "node_b": 2 * packs}


def test_a_weighted_blend_has_no_epoch(recipes: Path) -> None:
    with pytest.raises(ConfigError, match=r"nested.yaml draws by weight indefinitely, .*--epochized"):
        get_packed_loader(recipes / "nested.yaml", num_workers=0, epochs=1)


def test_nested(recipes: Path) -> None:
    seen = drawn(recipes / "nested.yaml", 1000)
    for name, share in (("node_a", 0.675), ("node_b", 0.225), ("node_c", 0.1)):
        assert abs(seen[name] - 1000 * share) < 4 * (1000 * share * (1 - share)) ** 0.5


def test_subflavors(recipes: Path) -> None:
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    dataset = get_train_dataset(
        recipes / "subflavors.yaml",
        worker_config=config,
        batch_size=None,
        shuffle_buffer_size=None,
        max_samples_per_sequence=None,
        task_encoder=_Nothing(),
    )
    found = {
        (s.__key__.rpartition("_")[0], s.__subflavors__["source"]) for s in itertools.islice(get_loader(dataset), 60)
    }
    assert found == {("node_a", "captions"), ("node_b", "chats")}


class _Nothing(TaskEncoder):  # type: ignore[misc]
    decoder = None

    def encode_sample(self, sample: Any) -> Any:
        return sample
