"""Ranks and workers: each has packs, all end together, or the loader says why that cannot be."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner

from energon_packed import (
    BalancedSampler,
    ChatEncoder,
    ConfigError,
    DataflowLoader,
    FormatError,
    IterableDistributor,
    MapDistributor,
    PackedDataset,
    PackOptions,
    PaddingFreeCollator,
    get_packed_loader,
    pack,
    steps_per_epoch,
)
from tests.conftest import Packer
from tests.internals import cli, make_blend, write_metadataset
from tests.loading.flows import FEATURES, ITEMS
from tests.processes import run_ranks


def test_a_rank_or_worker_without_packs_is_refused(pack_demo: Packer, encoder: ChatEncoder, tmp_path: Path) -> None:
    result = pack_demo(sample_class="PackedTokensSample", seq_len=4096)
    packs = result.manifest.packs
    assert packs < 40
    message = f"has {packs} packs in split 'train', fewer than the 40 loader workers.*world_size 20, num_workers 2"
    with pytest.raises(ConfigError, match=message):
        get_packed_loader(result.shards, encoder, rank=0, world_size=20, num_workers=2)
    for choice in ("repeat", "drop"):
        with pytest.raises(ConfigError, match=r"rank \d+ of 40 has no batch, and other ranks have 1"):
            get_packed_loader(result.shards, encoder, rank=0, world_size=40, num_workers=0, epochs=1, epoch_end=choice)
    loader = get_packed_loader(result.shards, encoder, rank=packs - 1, world_size=packs, num_workers=1)
    batches = iter(loader)
    assert [next(batches).num_samples > 0 for _ in range(3)] == [True] * 3


def test_the_encoder_is_compared_with_every_data_set_of_a_metadataset(
    pack_demo: Packer, encoder: ChatEncoder, tokenizer_dir: Path, tmp_path: Path
) -> None:
    shards = [pack_demo(shard_prefix=prefix, split={"train": 0.7, "val": 0.3}).shards for prefix in ("a", "b")]
    write_metadataset(make_blend([(shards[0], 1), (shards[1], 1)]), tmp_path / "inner.yaml")
    write_metadataset(make_blend([(tmp_path / "inner.yaml", 1)]), tmp_path / "outer.yaml")
    other = ChatEncoder.from_pretrained(tokenizer_dir, loss_on="all")
    for path in ("inner.yaml", "outer.yaml"):
        for split in ("train", "val"):
            with pytest.raises(ConfigError, match="different encoder: `loss_on` was 'assistant', now 'all'"):
                get_packed_loader(tmp_path / path, other, split=split, num_workers=0)
        get_packed_loader(tmp_path / path, other, num_workers=0, check_encoder=False)
        with pytest.raises(ConfigError, match="packed with seq_len 1024; `seq_len` must be at least that, got 512"):
            get_packed_loader(tmp_path / path, encoder, num_workers=0, seq_len=512)
        assert next(iter(get_packed_loader(tmp_path / path, encoder, num_workers=0))).num_samples > 0
    with pytest.raises(ConfigError, match="has no split 'test'"):
        get_packed_loader(tmp_path / "inner.yaml", encoder, split="test", num_workers=0)


def test_tokens_need_no_encoder(text_tokenizer_dir: Path, pack_demo: Packer, tmp_path: Path) -> None:
    lines = [{"id": f"r{n}", "text": "red square " * (n + 1)} for n in range(30)]
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, lines)))
    options = {"inputs": (str(tmp_path / "d.jsonl"),), "output_dir": tmp_path / "out", "seq_len": 128, "workers": 1}
    pack(PackOptions(tokenizer=text_tokenizer_dir, sample_class="PackedTokensSample", **options))  # type: ignore[arg-type]
    encoder = ChatEncoder.from_pretrained(text_tokenizer_dir)
    loaders = [get_packed_loader(tmp_path / "out", given, epochs=1, num_workers=0) for given in (None, encoder)]
    for bare, full in zip(*loaders, strict=True):
        assert bare.ids == full.ids
        assert bare.input_ids.equal(full.input_ids)
        assert bare.labels.equal(full.labels)
        assert bare.position_ids.equal(full.position_ids)
    with pytest.raises(ConfigError, match="stores PackedTokensSample with images, which needs an encoder"):
        get_packed_loader(pack_demo(sample_class="PackedTokensSample").shards)
    with pytest.raises(ConfigError, match="stores PackedCaptioningSample with images"):
        get_packed_loader(pack_demo().shards, None)


@pytest.mark.parametrize("change", ["other", "cut"])
def test_a_manifest_that_cannot_be_read_is_no_missing_one(
    pack_demo: Packer, encoder: ChatEncoder, tmp_path: Path, change: str
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(pack_demo().shards, copy)
    manifest = copy / ".nv-meta" / "packing.json"
    text = manifest.read_text()
    other = json.dumps(json.loads(text) | {"format_version": 99})
    manifest.write_text(other if change == "other" else text[:200])
    message = "has format version 99" if change == "other" else "is not a packing manifest"
    for use in (
        lambda: get_packed_loader(copy, encoder),
        lambda: PackedDataset(copy, encoder),
        lambda: make_blend([(copy, None)]),
    ):
        with pytest.raises(FormatError, match=message):
            use()


def test_excluded_packs_do_not_count_as_steps(pack_demo: Packer, encoder: ChatEncoder, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    result = pack_demo(max_packs_per_shard=3)
    shutil.copytree(result.shards, copy)
    split = copy / ".nv-meta" / "split.yaml"
    split.write_text(yaml.safe_dump(yaml.safe_load(split.read_text()) | {"exclude": ["pack-000000.tar"]}))
    options: dict[str, Any] = {"epochs": 1, "num_workers": 0, "rank": 0, "world_size": 2}
    steps = steps_per_epoch(copy, world_size=2)
    loaders = [get_packed_loader(copy, encoder, **options | {"rank": rank}) for rank in range(2)]
    ranks = [list(loader) for loader in loaders]
    assert [len(batches) for batches in ranks] == [steps] * 2
    packs = sum(batch.ids[0] is not None for batches in ranks for batch in batches)
    assert packs == result.manifest.packs - result.manifest.shards[0].packs
    shown = CliRunner().invoke(cli, ["verify", str(copy)])
    assert shown.exit_code == 0, shown.output
    assert "split.yaml excludes 1 names" in shown.output


def test_padding_that_was_not_planned_is_told(
    pack_demo: Packer, encoder: ChatEncoder, caplog: pytest.LogCaptureFixture
) -> None:
    get_packed_loader(pack_demo().shards, encoder, num_workers=0, collator=PaddingFreeCollator(pad_multiple=16))
    assert "was packed with pad_multiple 1 and is padded to multiples of 16" in caplog.text
    caplog.clear()
    shards = pack_demo(pad_multiple=16).shards
    get_packed_loader(shards, encoder, num_workers=0, collator=PaddingFreeCollator(pad_multiple=8))
    assert not caplog.text


TENSOR_PARALLEL = """
from energon_packed import ChatEncoder, get_packed_loader
encoder = ChatEncoder.from_pretrained(sys.argv[5])
options = {"epochs": 1, "num_workers": 0, "rank": rank // 2, "world_size": count // 2}
print(len([batch for batch in get_packed_loader(sys.argv[4], encoder, **options)]))
"""


def test_tensor_parallel_processes_share_a_data_parallel_rank(
    pack_demo: Packer, tokenizer_dir: Path, tmp_path: Path
) -> None:
    path = tmp_path / "epochs.yaml"
    results: list[Any] = [pack_demo(sample_class="PackedTokensSample", shard_prefix=prefix) for prefix in ("a", "b")]
    entries = [{"path": str(result.shards), "repetitions": n} for result, n in zip(results, (1, 2), strict=True)]
    splits = {"train": {"blend_epochized": entries}}
    path.write_text(yaml.safe_dump({"__module__": "megatron.energon", "__class__": "MetadatasetV2", "splits": splits}))
    steps = run_ranks(TENSOR_PARALLEL, 4, tmp_path / "store", path, tokenizer_dir)
    assert len(set(steps)) == 1
    assert int(steps[0]) == -(-3 * results[0].manifest.packs // 2)


def test_shorter_ranks_get_a_batch_without_targets(folder: Path) -> None:
    options: dict[str, Any] = {"epochs": 1, "num_workers": 0, "world_size": 3}
    ranks = [list(get_packed_loader(folder, rank=rank, **options)) for rank in range(3)]
    assert [len(rank) for rank in ranks] == [-(-ITEMS // 3)] * 3
    assert sorted(str(name) for rank in ranks for batch in rank for name in batch.ids if name) == sorted(
        f"s{number}" for number in range(ITEMS)
    )
    masked = [batch for rank in ranks for batch in rank if batch.ids == [None]]
    assert len(masked) == 2
    for batch in masked:
        assert not batch.loss_mask.any()
        assert (batch.labels == -100).all()
        logits = torch.randn(1, batch.input_ids.shape[1], ITEMS, requires_grad=True)
        loss = batch.loss(logits)
        loss.backward()  # type: ignore[no-untyped-call]
        assert loss == 0
        assert logits.grad is not None
        assert not logits.grad.any()


LINE = "`epoch_end='drop'` leaves out 1 of 13 packs in each epoch. Set 'repeat' to train on all."
DROPPING: dict[str, tuple[Callable[..., Any], str]] = {
    "get_packed_loader": (
        lambda folder, **end: get_packed_loader(folder, epochs=1, num_workers=0, rank=0, world_size=3, **end),
        LINE,
    ),
    "get_packed_loader, batches": (
        lambda folder, **end: get_packed_loader(folder, epochs=1, num_workers=0, micro_batch_size=3, **end),
        LINE,
    ),
    "DataflowLoader": (
        lambda folder, **end: list(DataflowLoader(MapDistributor(PackedDataset(folder)), batch_size=3, **end)),
        LINE,
    ),
    "DataflowLoader, ranks": (
        lambda folder, **end: list(DataflowLoader(MapDistributor(PackedDataset(folder)), rank=0, world_size=3, **end)),
        LINE,
    ),
    "BalancedSampler": (
        lambda folder, **end: list(BalancedSampler(PackedDataset(folder), 3, 0, **end)),
        LINE,
    ),
    "DataflowLoader, stream": (
        lambda folder, **end: list(DataflowLoader(IterableDistributor(FEATURES), batch_size=3, **end)),
        "`epoch_end='drop'` leaves out the last items of each worker that do not fill a batch in each epoch.",
    ),
}


@pytest.mark.parametrize("kind", DROPPING)
def test_drop_logs_one_line_and_error_raises(folder: Path, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    load, line = DROPPING[kind]
    load(folder)
    assert not caplog.records
    load(folder, epoch_end="drop")
    assert [record.getMessage() for record in caplog.records] == [line]
    message = "got 1 of 13 packs in the last step. Set 'repeat' or 'drop'"
    if "stream" in kind:
        message = "got a last batch of 1 items. Set 'repeat' or 'drop'"
    with pytest.raises(ConfigError, match=message):
        load(folder, epoch_end="error")


@pytest.mark.parametrize("epoch_end", ["drop", "error"])
def test_items_that_fill_all_steps_log_nothing(folder: Path, caplog: pytest.LogCaptureFixture, epoch_end: Any) -> None:
    dataset = PackedDataset(folder)
    list(DataflowLoader(MapDistributor(dataset), batch_size=ITEMS, epoch_end=epoch_end))
    list(get_packed_loader(folder, epochs=1, num_workers=0, rank=0, world_size=ITEMS, epoch_end=epoch_end))
    assert not caplog.records


@pytest.mark.parametrize("epoch_end", ["drop", "error"])
def test_ranks_of_a_stream_that_cannot_communicate_are_refused(epoch_end: Any) -> None:
    with pytest.raises(ConfigError, match="needs packs of a known number, or a process group with the ranks"):
        DataflowLoader(IterableDistributor(FEATURES), rank=0, world_size=2, epoch_end=epoch_end)
