"""`energon-packed steps`: the numbers of the loaders, for folders, blends, images, and any parallelism."""

import json
import shutil
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from energon_packed import BalancedSampler, ChatEncoder, CostModel, PackedDataset, PackOptions, pack, steps_per_epoch
from tests.cli.test_cli import run
from tests.conftest import Packer
from tests.internals import StoredTokens, expected_steps, read_sizes, steps_inspection


@pytest.fixture(scope="module")
def tail(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("steps")
    lengths = np.random.default_rng(0).integers(20, 2000, 300).tolist()
    records = [{"id": str(n), "input_ids": [1] * length, "labels": [1] * length} for n, length in enumerate(lengths)]
    (folder / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    options: dict[str, Any] = {"sample_class": "PackedTokensSample", "workers": 1, "encoder": StoredTokens()}
    inputs = (str(folder / "data.jsonl"),)
    return pack(PackOptions(inputs=inputs, output_dir=folder, seq_len=2000, algorithm="sequential", **options)).shards


def test_the_imbalance_is_that_of_the_sampler(tail: Path) -> None:
    done = run("steps", tail, "--world-size", "8", "--json")
    assert done.returncode == 0, done.stderr
    value = json.loads(done.stdout)
    dataset = PackedDataset(tail)
    assert value["packs"] == value["read"] == len(dataset)
    assert (value["steps"], value["rest"]) == (steps_per_epoch(tail, world_size=8), len(dataset) % 8)
    sampler = BalancedSampler(dataset, 8, 0)
    # The same packs in another seeded order: steps are not the same, but as balanced.
    assert value["shuffled"]["mean"] == pytest.approx(sampler.imbalance.before, rel=0.05)
    assert value["aligned"]["mean"] == pytest.approx(sampler.imbalance.after, rel=0.02)
    assert 1 <= value["aligned"]["p50"] <= value["aligned"]["p99"] <= value["aligned"]["max"]
    assert value["cost"] == CostModel().constants()
    assert "shuffled" in done.stderr


def test_parallelism_and_a_model_count(tail: Path, tmp_path: Path) -> None:
    config = {"model_type": "qwen2", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_attention_heads": 4, "num_key_value_heads": 2}))
    parallel = ("--tp", "2", "--cp", "2", "--pp", "2", "--accumulation", "4")
    done = run("steps", tail, "--world-size", "32", *parallel, "--model-config", tmp_path, "--json")
    value = json.loads(done.stdout)
    assert (value["ranks"], value["accumulation"]) == (4, 4)
    assert value["rest"] == value["packs"] % 16 > 0
    assert value["steps"] == ceil(steps_per_epoch(tail, world_size=4) / 4) == value["packs"] // 16 + 1
    assert f" x accumulation 4), and {value['rest']} in the last step\n" in done.stderr
    assert value["cost"]["token"] > 1000
    plain, padded = (read_sizes(tail, multiple=multiple).sizes for multiple in (1, 4))
    assert plain.tokens.sum() < padded.tokens.sum() < plain.tokens.sum() * 1.01
    refused = run("steps", tail, "--world-size", "12", "--tp", "8")
    assert refused.returncode == 2
    assert "--world-size must be a multiple of" in refused.stderr
    refused = run("steps", tail, "--world-size", "5000")
    assert "error: a step has 5,000 packs (5000 ranks x 1 micro batches x 1), but an epoch has" in refused.stderr


def test_a_sample_of_the_packs_stands_for_all(tail: Path, tmp_path: Path) -> None:
    """Of a blend, too, in which a dataset is read 2.5 times."""
    members = [{"path": str(tail), "repetitions": 2.5}]
    blend: dict[str, Any] = {"__module__": "megatron.energon", "__class__": "MetadatasetV2"}
    blend["splits"] = {"train": {"blend_epochized": members}}
    (tmp_path / "blend.yaml").write_text(yaml.safe_dump(blend))
    packs = len(PackedDataset(tail))
    whole = read_sizes(tmp_path / "blend.yaml")
    assert (len(whole.sizes.tokens), whole.read) == (int(2.5 * packs), packs)
    part = read_sizes(tmp_path / "blend.yaml", max_packs=50)
    assert (len(part.sizes.tokens), part.read) == (int(2.5 * packs), 50)
    assert part.sizes.tokens.mean() == pytest.approx(whole.sizes.tokens.mean(), rel=0.1)
    few = expected_steps(part.sizes, CostModel(), ranks=8).shuffled.mean
    assert few == pytest.approx(expected_steps(whole.sizes, CostModel(), ranks=8).shuffled.mean, rel=0.1)
    report = run("report", tmp_path / "blend.yaml", "-o", tmp_path / "blend.html")
    assert report.returncode == 0, report.stderr
    assert 'id="steps"' in (tmp_path / "blend.html").read_text()


def test_images_count_with_the_mean_of_those_that_are_read(
    pack_demo: Packer, encoder: ChatEncoder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shards = shutil.copytree(pack_demo().shards, tmp_path / "packs")
    exact = PackedDataset(shards, encoder).row_sizes()
    read = read_sizes(shards)
    assert sorted(map(tuple, read.sizes.columns().tolist())) == sorted(map(tuple, exact.columns().tolist()))
    monkeypatch.setattr(steps_inspection, "_MAX_WITH_MEDIA", 3)
    few = read_sizes(shards)
    with_images = (exact.patches > 0).sum()
    assert read.notes == ()
    assert few.notes == (f"images of 3 of {with_images} packs were read; others count with the mean",)
    assert (few.sizes.patches > 0).sum() == with_images
    assert few.sizes.patches.sum() == pytest.approx(exact.patches.sum(), rel=0.7)
    assert run("report", shards, "-o", tmp_path / "page.html").returncode == 0
    page = (tmp_path / "page.html").read_text()
    assert "aligned, p99" in page[page.index('id="steps"') :]
    manifest = shards / ".nv-meta" / "packing.json"
    recorded = json.loads(manifest.read_text())
    recorded["encoder"]["tokenizer"] = "elsewhere"
    manifest.write_text(json.dumps(recorded))
    without = read_sizes(shards)
    assert not without.sizes.patches.any()
    assert "images do not count: the tokenizer elsewhere of packing.json does not exist here" in without.notes[0]
