"""Packs of every flavor come out as padding-free batches, every one exactly once."""

import collections
import hashlib
import io
import itertools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from megatron.energon import DefaultTaskEncoder, WorkerConfig, get_loader, get_val_dataset
from megatron.energon.flavors.webdataset.itar import ITarFile
from megatron.energon.flavors.webdataset.itar_reader import ITarReader
from PIL import Image

from energon_packed import (
    ChatEncoder,
    ConfigError,
    EncoderSettings,
    FormatError,
    PackedDataset,
    PaddingFreeCollator,
    get_packed_loader,
    normalize,
    pack,
    steps_per_epoch,
)
from tests.conftest import FLAVORS, Packer
from tests.internals import OpenedSplits, loaded_splits, read_whole_packs
from tests.processes import run_ranks


def ids_of(loader: Any) -> tuple[int, list[str]]:
    batches = list(loader)
    return len(batches), [name for batch in batches for name in batch.ids]


@pytest.mark.parametrize("flavor", FLAVORS)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_one_epoch_gives_every_sample_once(
    pack_demo: Packer, encoder: ChatEncoder, flavor: str, num_workers: int
) -> None:
    result = pack_demo(sample_class=flavor)
    for micro_batch_size in (1, 3):
        loader = get_packed_loader(
            result.shards, encoder, epochs=1, num_workers=num_workers, micro_batch_size=micro_batch_size
        )
        batches, ids = ids_of(loader)
        assert len(ids) == len(set(ids)) == result.manifest.packed
        assert batches == steps_per_epoch(result.manifest, micro_batch_size=micro_batch_size, num_workers=num_workers)


class RawSamples(DefaultTaskEncoder):  # type: ignore[misc]
    decoder = None


def test_packs_are_read_as_energon_reads_them(pack_demo: Packer, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = pack_demo(sample_class="PackedCaptioningSample").shards
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)

    def dataset() -> Any:
        return get_val_dataset(
            str(shards), split_part="train", worker_config=config, batch_size=None, task_encoder=RawSamples()
        )

    expected = list(get_loader(dataset(), watchdog_timeout_seconds=None))
    replaced = dataset()
    read_whole_packs(replaced, OpenedSplits(loaded_splits(shards, "train")))
    monkeypatch.delattr(ITarReader, "_get_item_by_sample_pointer")  # Energon's way to read a pack
    samples = list(get_loader(replaced, watchdog_timeout_seconds=None))
    assert [vars(sample) for sample in samples] == [vars(sample) for sample in expected]
    assert sum(len(sample.__sources__[0].file_names) for sample in samples) > 2 * len(samples)


def test_energon_reads_a_pack_by_more_than_one_read(pack_demo: Packer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this, the readers of Energon's datasets need not be replaced (`pack_reader.py`)."""
    headers, following = [], ITarFile.next
    monkeypatch.setattr(ITarFile, "next", lambda tar: headers.append(1) or following(tar))
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    dataset = get_val_dataset(
        str(pack_demo(sample_class="PackedCaptioningSample").shards),
        split_part="train",
        worker_config=config,
        batch_size=None,
        task_encoder=RawSamples(),
    )
    samples = list(get_loader(dataset, watchdog_timeout_seconds=None))
    assert len(headers) >= sum(len(sample.__sources__[0].file_names) for sample in samples) > len(samples)


@pytest.mark.parametrize("flavor", FLAVORS)
def test_batches_are_consistent(pack_demo: Packer, encoder: ChatEncoder, flavor: str) -> None:
    loader = get_packed_loader(
        pack_demo(sample_class=flavor).shards, encoder, epochs=1, num_workers=0, micro_batch_size=2
    )
    for batch in loader:
        tokens = batch.input_ids.shape[1]
        bounds = batch.cu_seqlens.tolist()
        assert (bounds[0], bounds[-1], len(bounds)) == (0, tokens, batch.num_samples + 1)
        assert batch.max_seqlen == max(b - a for a, b in itertools.pairwise(bounds))
        assert batch.position_ids.shape == (4, 1, tokens)
        assert (batch.position_ids[0, 0] == 0).sum() == batch.num_samples
        assert (batch.labels[0, bounds[:-1]] == -100).all()
        assert ((batch.labels != -100) == batch.loss_mask.bool()).all()
        images = 0 if batch.image_grid_thw is None else int(batch.image_grid_thw.prod(1).sum()) // 4
        assert int((batch.input_ids == encoder.image_token_id).sum()) == images
        if images:
            assert batch.pixel_values.shape == (4 * images, 3 * 2 * 14 * 14)


def test_ranks_share_the_packs(pack_demo: Packer, encoder: ChatEncoder) -> None:
    result = pack_demo(sample_class="PackedTokensSample")
    seen: collections.Counter[str] = collections.Counter()
    for rank in range(3):
        loader = get_packed_loader(result.shards, encoder, epochs=1, num_workers=0, rank=rank, world_size=3)
        batches, ids = ids_of(loader)
        assert batches == steps_per_epoch(result.manifest, world_size=3)
        seen.update(name for name in ids if name is not None)
    assert set(seen.values()) == {1}
    assert len(seen) == result.manifest.packed


def test_packing_on_the_fly_loses_nothing(pack_demo: Packer, encoder: ChatEncoder) -> None:
    result = pack_demo(sample_class="MultiMixQASample")
    loader = get_packed_loader(result.shards, encoder, epochs=1, num_workers=0, packing_buffer_size=40)
    batches = list(loader)
    ids = [name for batch in batches for name in batch.ids]
    assert sorted(ids) == sorted(set(ids))
    assert len(ids) == result.manifest.packed
    assert max(batch.input_ids.shape[1] for batch in batches) <= 1024
    assert len(batches) < result.manifest.packed / 3


def test_without_epochs_the_data_repeats(pack_demo: Packer, encoder: ChatEncoder) -> None:
    result = pack_demo(sample_class="PackedTokensSample")
    # Without a shuffle buffer, which would let the second round begin before the first has ended.
    loader = iter(get_packed_loader(result.shards, encoder, num_workers=0, shuffle_buffer_size=1))
    keys = [next(loader).__key__[0] for _ in range(2 * result.manifest.packs)]
    assert set(collections.Counter(keys).values()) == {2}


def test_order_is_that_of_the_shards_without_shuffling(pack_demo: Packer, encoder: ChatEncoder) -> None:
    result = pack_demo(sample_class="PackedTokensSample", max_packs_per_shard=4)
    loader = get_packed_loader(result.shards.parent, encoder, epochs=1, num_workers=0, shuffle=False)
    assert [b.__key__[0] for b in loader] == [f"pack_{i:08d}" for i in range(result.manifest.packs)]
    shuffled = get_packed_loader(result.shards, encoder, epochs=1, num_workers=0)
    assert [b.__key__[0] for b in shuffled] != [f"pack_{i:08d}" for i in range(result.manifest.packs)]


def test_a_metadataset_blends_two_outputs(pack_demo: Packer, encoder: ChatEncoder, tmp_path: Path) -> None:
    results = [pack_demo(sample_class="PackedTokensSample", shard_prefix=prefix) for prefix in ("a", "b")]
    blend = [{"path": str(result.shards), "weight": weight} for result, weight in zip(results, (3, 1), strict=True)]
    path = tmp_path / "blend.yaml"
    path.write_text(
        yaml.safe_dump(
            {"__module__": "megatron.energon", "__class__": "MetadatasetV2", "splits": {"train": {"blend": blend}}}
        )
    )
    loader = iter(get_packed_loader(path, encoder, num_workers=0))
    drawn = collections.Counter(next(loader).__key__[0][0] for _ in range(200))
    assert 130 < drawn["a"] < 170


def test_a_padding_collator_pads_every_row(pack_demo: Packer, encoder: ChatEncoder) -> None:
    loader = get_packed_loader(
        pack_demo(pad_multiple=8).shards,
        encoder,
        epochs=1,
        num_workers=0,
        collator=PaddingFreeCollator(pad_multiple=8, pad_to=1024),
    )
    assert {tuple(batch.input_ids.shape) for batch in loader} == {(1, 1024)}


def test_another_encoder_is_noticed(pack_demo: Packer, tokenizer_dir: Path) -> None:
    smaller = ChatEncoder.from_pretrained(tokenizer_dir, max_pixels=28 * 28 * 16)
    with pytest.raises(ConfigError, match="packed with a different encoder: `max_pixels` was not set, now 12544. Use"):
        get_packed_loader(pack_demo().shards, smaller, epochs=1)
    loader = get_packed_loader(pack_demo().shards, smaller, epochs=1, num_workers=0, check_encoder=False)
    with pytest.raises(FormatError, match=r"tokens, but \d+ were recorded: use the tokenizer"):
        list(loader)
    last = ChatEncoder.from_pretrained(tokenizer_dir, loss_on="last")
    list(get_packed_loader(pack_demo().shards, last, epochs=1, num_workers=0, check_encoder=False))


@pytest.mark.parametrize(
    ("settings", "differences"),
    [
        (
            {"max_pixels": 12544, "loss_on": "all"},
            "`max_pixels` was not set, now 12544, `loss_on` was 'assistant', now 'all'",
        ),
        ({"allow_special_in_text": True}, "`allow_special_in_text` was False, now True"),
        ({"template": "{# #}", "loss_on": "last"},
         "`loss_on` was 'assistant', now 'last', the chat template differs (`template_fingerprint` was {before}, now "
         "{after}), `tokenizer` was {packed!r}, now {folder!r}"),
        ({"token": "<new>"}, "the tokenizer (`tokenizer_fingerprint`) differs, "
         "`tokenizer` was {packed!r}, now {folder!r}"),
        ({"token": "<new>", "min_pixels": 3136},
         "`min_pixels` was not set, now 3136, `tokenizer` was {packed!r}, now {folder!r}"),
    ],
)  # fmt: skip
def test_every_setting_and_digest_that_differs_is_named(
    pack_demo: Packer, tokenizer_dir: Path, tmp_path: Path, settings: dict[str, Any], differences: str
) -> None:
    folder = tokenizer_dir
    result = pack_demo()
    before = after = result.manifest.template_fingerprint
    if {"template", "token"} & settings.keys():
        folder = tmp_path / "tokenizer"
        shutil.copytree(tokenizer_dir, folder)
        loaded = ChatEncoder.from_pretrained(folder).tokenizer
        loaded.chat_template = settings.get("template", "") + loaded.chat_template
        loaded.add_tokens([settings.get("token", "<|im_end|>")])
        loaded.save_pretrained(folder)
        after = hashlib.sha256(loaded.chat_template.encode()).hexdigest()
    named = {name: value for name, value in settings.items() if name not in ("template", "token")}
    encoder = ChatEncoder.from_pretrained(folder, **named)
    for name, value in {"{before}": before[:12], "{after}": after[:12]}.items():
        differences = differences.replace(name, value)
    differences = differences.replace("{packed!r}", repr(str(tokenizer_dir))).replace("{folder!r}", repr(str(folder)))
    with pytest.raises(ConfigError, match=re.escape(f"with a different encoder: {differences}. Use the settings of")):
        PackedDataset(result.shards, encoder)


def copied_folder(source: Path, folder: Path, **images: Any) -> Path:
    """A copy of a tokenizer folder with other settings of images."""
    shutil.copytree(source, folder)
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").write_text(json.dumps(settings | images))
    return folder


def test_other_settings_of_images_are_named(pack_demo: Packer, tokenizer_dir: Path, tmp_path: Path) -> None:
    folder = copied_folder(tokenizer_dir, tmp_path / "tokenizer", image_mean=[0.5, 0.5, 0.5])
    message = r"encoder: `image_mean` of the media was \[0\.48\d+, .*\], now \[0\.5, 0\.5, 0\.5\], `tokenizer` was"
    with pytest.raises(ConfigError, match=message):
        PackedDataset(pack_demo().shards, ChatEncoder.from_pretrained(folder))


@pytest.mark.parametrize("kind", ["link", "copy"])
def test_another_path_of_the_same_folder_is_no_difference(
    pack_demo: Packer, tokenizer_dir: Path, tmp_path: Path, kind: str
) -> None:
    folder = tmp_path / "tokenizer"
    if kind == "link":
        folder.symlink_to(tokenizer_dir)
    else:
        shutil.copytree(tokenizer_dir, folder)
    message = r"encoder: `max_pixels` was not set, now 12544\. Use the settings of"
    with pytest.raises(ConfigError, match=message):
        PackedDataset(pack_demo().shards, ChatEncoder.from_pretrained(folder, max_pixels=12544))


def test_an_encoder_made_in_python_is_compared_by_what_is_known(
    pack_demo: Packer, text_tokenizer_dir: Path, tmp_path: Path
) -> None:
    loaded = ChatEncoder.from_pretrained(text_tokenizer_dir).tokenizer
    data = tmp_path / "a.jsonl"
    data.write_text('{"text": "Hi"}\n')
    result = pack(data, output_dir=tmp_path / "out", encoder=ChatEncoder(loaded), seq_len=64, workers=1)
    assert result.manifest.encoder.keys() == {"processor_class"}
    packed = pack(data, output_dir=tmp_path / "b", tokenizer=text_tokenizer_dir, seq_len=64, workers=1)
    for shards in (result.shards, packed.shards):
        with pytest.raises(ConfigError, match=r"encoder: `loss_on` was 'assistant', now 'all'\. Use"):
            PackedDataset(shards, ChatEncoder(loaded, settings=EncoderSettings(loss_on="all")))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seq_len": 512}, "packed with seq_len 1024; `seq_len` must be at least that, got 512"),
        ({"split": "val"}, "has no packs in split 'val'; it has train"),
        ({"num_workers": -1}, "`num_workers` must be at least 0, got -1"),
        ({"epochs": 2}, "`epochs` must be None .repeat indefinitely. or 1 .one exact pass., got 2"),
        ({"shuffle": False}, "`shuffle=False` requires `epochs=1`"),
        ({"micro_batch_size": 0}, "`micro_batch_size` must be at least 1, got 0"),
        ({"sead": 3}, "unknown argument 'sead'; did you mean `seed`"),
        ({"packing_buffer_size": 0}, "`packing_buffer_size` must be at least 1, got 0"),
        ({"rank": 1}, "`rank` and `world_size` must be passed together, got 1 and None"),
        ({"rank": 2, "world_size": 2}, "`rank` must be from 0 to `world_size` - 1, got 2"),
    ],
)
def test_bad_options_are_named(pack_demo: Packer, encoder: ChatEncoder, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        get_packed_loader(pack_demo().shards, encoder, **options)


def test_paths_without_a_dataset_are_named(encoder: ChatEncoder, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="does not exist"):
        get_packed_loader(tmp_path / "none", encoder)
    with pytest.raises(FormatError, match="must be a dataset folder, got a folder without .nv-meta and tars"):
        get_packed_loader(tmp_path, encoder)
    shards = tmp_path / "webdataset"
    shards.mkdir()
    (shards / "a-000000.tar").write_bytes(bytes(1024))
    for folder in (tmp_path, shards):
        with pytest.raises(FormatError, match=f"no .nv-meta folder; run energon-packed nv-meta {shards}$"):
            get_packed_loader(folder, encoder)
    (tmp_path / ".work").mkdir()
    for folder in (tmp_path, shards):
        with pytest.raises(FormatError, match=f"no dataset yet; run .* pack with `output_dir` {tmp_path}$"):
            get_packed_loader(folder, encoder)


def test_each_epoch_is_another_order_of_all_packs(pack_demo: Packer, encoder: ChatEncoder) -> None:
    loader = get_packed_loader(pack_demo(sample_class="PackedTokensSample").shards, encoder, epochs=1, num_workers=0)
    first, second = ([batch.__key__[0] for batch in loader] for _ in range(2))
    assert first != second
    assert sorted(first) == sorted(second)


def test_images_at_the_very_start_and_end_of_samples(encoder: ChatEncoder) -> None:
    out = io.BytesIO()
    Image.new("RGB", (112, 56)).save(out, "PNG")
    run = [encoder.image_token_id] * 8  # 4 x 8 patches, merged 2 x 2
    samples = [
        encoder.encode(normalize({"id": name, "input_ids": ids, "images": [out.getvalue()]}))
        for name, ids in (("start", [*run, 50, 51]), ("end", [50, 51, *run]), ("both sides", [50, *run, 51]))
    ]
    one = encoder.encode(normalize({"input_ids": [50, 51]}))
    batch = PaddingFreeCollator().collate([*samples, one])
    assert batch.cu_seqlens.tolist() == [0, 10, 20, 30, 32]
    assert batch.position_ids[1, 0, :10].tolist() == [0] * 8 + [4, 5]
    assert batch.position_ids[3, 0, 10:20].tolist() == [0, 1, 2, 3, 4, 5, 2, 3, 4, 5]
    assert batch.image_grid_thw.tolist() == [[1, 4, 8]] * 3
    assert (batch.labels == encoder.image_token_id).sum() == 0


RANK = """
from energon_packed import ChatEncoder, get_packed_loader
shards, tokenizer = sys.argv[4:]
loader = get_packed_loader(shards, ChatEncoder.from_pretrained(tokenizer), epochs=1, num_workers=0)
steps = 0
for batch in loader:
    total = torch.tensor([batch.num_samples])
    torch.distributed.all_reduce(total)  # hangs where one rank has a batch more than the other
    steps += 1
print(steps)
"""


def test_ranks_of_a_process_group_do_not_hang(pack_demo: Packer, tokenizer_dir: Path, tmp_path: Path) -> None:
    result = next(
        r
        for seq_len in (1024, 900, 800, 700)
        if (r := pack_demo(sample_class="PackedTokensSample", seq_len=seq_len)).manifest.packs % 2
    )
    for out in run_ranks(RANK, 2, tmp_path / "store", result.shards, tokenizer_dir):
        assert int(out.split()[-1]) == result.manifest.packs // 2 + 1


def test_a_dataset_is_built_once_an_epoch_and_only_when_needed(
    pack_demo: Packer, encoder: ChatEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.internals import energon_distributor

    built: list[int] = []
    create = energon_distributor.epoch_dataset

    def counted(path: Path, config: Any, epoch: int, **options: Any) -> Any:
        built.append(epoch)
        return create(path, config, epoch, **options)

    monkeypatch.setattr(energon_distributor, "epoch_dataset", counted)
    shards = pack_demo(sample_class="PackedTokensSample").shards
    loader = get_packed_loader(shards, encoder, epochs=1, num_workers=0)
    assert built == []
    first = list(loader)
    assert built == [0]
    assert len(list(loader)) == len(first)
    states = [loader.state_dict() for _ in range(2)]
    assert built == [0, 1, 0]  # for the fingerprint
    resumed = get_packed_loader(shards, encoder, epochs=1, num_workers=0)
    for state in states:
        resumed.load_state_dict(state)
    assert built == [0, 1, 0, 0]
    assert [b.ids for b in resumed] == [b.ids for b in loader]
    assert built == [0, 1, 0, 0, 2, 2]
