"""The recipes in metadatasets/ load as they are, with data where they say it is."""

import collections
import shutil
from pathlib import Path

from energon_packed import ChatEncoder, get_packed_loader
from tests.conftest import Packer

RECIPES = Path(__file__).parents[1] / "metadatasets"


def test_two_outputs(pack_demo: Packer, encoder: ChatEncoder, tmp_path: Path) -> None:
    shutil.copytree(RECIPES, tmp_path / "metadatasets")
    for name in ("node_a", "node_b"):
        options = {"split": {"train": 0.7, "val": 0.3}, "max_packs_per_shard": 4, "shard_prefix": name}
        shards = pack_demo(sample_class="PackedTokensSample", **options).shards
        shutil.copytree(shards, tmp_path / "out" / name / "webdataset")
    recipe = tmp_path / "metadatasets" / "two_outputs.yaml"
    train = iter(get_packed_loader(recipe, encoder, num_workers=0))
    drawn = collections.Counter(next(train).__key__[0].rpartition("_")[0] for _ in range(400))
    assert 265 < drawn["node_a"] < 335  # three in four, within 4 standard deviations
    val = [b.__key__[0] for b in get_packed_loader(recipe, encoder, split="val", epochs=1, num_workers=0)]
    assert val
    assert {key.rpartition("_")[0] for key in val} == {"node_a"}
