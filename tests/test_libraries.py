"""Installed packages of other releases: one line names the package and its version, and no data is rejected.

Each test changes the installed package as a later release may: an argument or a private name that is gone.
"""

import inspect
import io
import re
import runpy
from importlib.metadata import version
from pathlib import Path
from typing import Any

import accelerate
import av
import numpy as np
import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import transformers
from megatron.core import num_microbatches_calculator
from megatron.energon.flavors.webdataset.base_webdataset import BaseWebdatasetFactory
from megatron.energon.flavors.webdataset.sample_loader import WebdatasetSampleLoaderDataset
from multistorageclient.providers.s3 import S3StorageProvider
from torch.utils.data import dataloader
from torch.utils.data._utils import signal_handling
from torch.utils.data.dataloader import _BaseDataLoaderIter, _MultiProcessingDataLoaderIter

from energon_packed import (
    ChatEncoder,
    ConfigError,
    MediaReference,
    PackedDataset,
    PackedTrainer,
    RecordError,
    get_packed_loader,
    normalize,
    pack,
    prepare_loader,
)
from tests.conftest import Packer
from tests.integrations.launched import tiny_qwen2
from tests.internals import WatchedWorkers, as_path, isolation, load_image, ranks, read_video_info
from tests.storage import Store
from tests.video_demo import VideoDemo
from tests.videos import make_video

Patch = pytest.MonkeyPatch


def folder(pack_demo: Packer) -> Path:
    return pack_demo().shards.parent


def line(package: str, cause: str) -> str:
    """Pattern of the message: limit, value and remedy."""
    got = f"`{package}` must be a version that energon-packed knows, got {version(package)}, {cause}"
    return rf"^{re.escape(got)}.*\. Run pip install '{package}==[\d.]+\.\*', or install a newer energon-packed\.$"


def absent(name: str) -> property:
    """An attribute that objects do not have, whatever they set."""

    def read(self: Any) -> None:
        raise AttributeError(name)

    return property(read, lambda self, value: None)


def calls_damaged(*args: Any, **options: Any) -> None:
    raise AttributeError("'SpiderImageFile' object has no attribute 'stkoffset'")  # as a plugin of Pillow does


@pytest.mark.parametrize("workers", [1, 2])
def test_another_pyav_stops_pack(video_demo: VideoDemo, tmp_path: Path, monkeypatch: Patch, workers: int) -> None:
    monkeypatch.setattr(av, "open", lambda file, mode=None: None)
    with pytest.raises(ConfigError, match=line("av", "which raises TypeError: ")):
        pack(video_demo.jsonl, **video_demo.options(tmp_path / "out", workers=workers))
    assert not (tmp_path / "out" / "rejects.jsonl").exists()


@pytest.mark.parametrize("max_failures", [None, 0])
def test_another_pyav_skips_no_sample(video_demo: VideoDemo, monkeypatch: Patch, max_failures: int | None) -> None:
    packed = video_demo.packed()
    monkeypatch.setattr(av, "open", lambda file, mode=None: None)
    loader = get_packed_loader(
        packed.shards.parent, video_demo.encoder, num_workers=0, epochs=1, max_failures=max_failures
    )
    with pytest.raises(ConfigError, match=line("av", "which raises TypeError: ")):
        list(loader)


def test_a_missing_name_of_pyav_is_not_damage(tmp_path: Path, monkeypatch: Patch) -> None:
    make_video(tmp_path / "a.mp4", frames=3, audio=True)
    monkeypatch.delattr(av.stream, "Discard")
    with pytest.raises(ConfigError, match=line("av", "which raises AttributeError: ")):
        read_video_info(MediaReference(path=str(tmp_path / "a.mp4")))


def test_only_errors_of_the_call_are_a_change_of_pillow(monkeypatch: Patch) -> None:
    content = io.BytesIO()
    PIL.Image.new("RGB", (4, 4)).save(content, "PNG")
    reference = MediaReference(data=content.getvalue())

    with monkeypatch.context() as patch:
        # Errors count by the module of their line: that of a plugin is not in energon_packed.
        patch.setattr(PIL.Image.Image, "load", calls_damaged)
        with pytest.raises(RecordError, match="corrupt_image"):
            load_image(reference)
    monkeypatch.setattr(PIL.Image, "open", lambda: None)
    with pytest.raises(ConfigError, match=line("pillow", "which raises TypeError: ")):
        load_image(reference)


def test_another_pyarrow_is_not_a_damaged_table(tmp_path: Path, tokenizer_dir: Path, monkeypatch: Patch) -> None:
    pq.write_table(pa.table({"text": ["A document."] * 3}), tmp_path / "a.parquet")
    monkeypatch.setattr(pq, "ParquetFile", lambda: None)
    with pytest.raises(ConfigError, match=line("pyarrow", "which raises TypeError: ")):
        pack(tmp_path / "a.parquet", output_dir=tmp_path / "out", seq_len=64, tokenizer=tokenizer_dir, workers=1)


def test_another_transformers_rejects_no_record(encoder: ChatEncoder, monkeypatch: Patch) -> None:
    monkeypatch.setattr(transformers.utils.chat_template_utils, "render_jinja_template", lambda messages: None)
    with pytest.raises(ConfigError, match=line("transformers", "which raises TypeError: ")):
        ChatEncoder(encoder.tokenizer).encode(normalize({"prompts": ["2 + 2?"], "captions": ["4"]}))


def test_trainer_without_the_methods_that_packed_trainer_replaces(monkeypatch: Patch) -> None:
    resume = ("_inner_training_loop", "_init_training_state", "_run_epoch")
    for name in ("_save_checkpoint", "_issue_warnings_after_load", *resume):
        with monkeypatch.context() as patch:
            patch.delattr(transformers.Trainer, name)
            with pytest.raises(ConfigError, match=line("transformers", f"in which Trainer has no `{name}`")):
                PackedTrainer(torch.nn.Linear(1, 1))


def test_transformers_without_the_name_of_the_attention(monkeypatch: Patch) -> None:
    model = tiny_qwen2()
    monkeypatch.setattr(transformers.PreTrainedConfig, "_attn_implementation", absent("_attn_implementation"))
    with pytest.raises(ConfigError, match=line("transformers", "in which Qwen2Config has no `_attn_implementation`")):
        isolation.describe(model)


def test_accelerate_that_wraps_a_prepared_loader(pack_demo: Packer, encoder: ChatEncoder, monkeypatch: Patch) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    monkeypatch.setattr(accelerator, "prepare", lambda loader: accelerate.data_loader.prepare_data_loader(loader))
    loader = get_packed_loader(folder(pack_demo), encoder, num_workers=0, epochs=1)
    with pytest.raises(ConfigError, match=line("accelerate", "which prepares a loader")):
        prepare_loader(accelerator, loader)


def test_energon_without_a_private_name(pack_demo: Packer, encoder: ChatEncoder, monkeypatch: Patch) -> None:
    monkeypatch.setattr(WebdatasetSampleLoaderDataset, "join_readers", absent("join_readers"), raising=False)
    message = line("megatron-energon", "in which WebdatasetSampleLoaderDataset has no `join_readers`")
    with pytest.raises(ConfigError, match=message):
        get_packed_loader(folder(pack_demo), encoder, num_workers=0, epochs=1).state_dict()


def test_energon_that_describes_no_folder(pack_demo: Packer, encoder: ChatEncoder, monkeypatch: Patch) -> None:
    described = BaseWebdatasetFactory.config

    def renamed(self: Any) -> dict[str, Any]:
        return {name.replace("_path", "path"): value for name, value in described(self).items()}

    monkeypatch.setattr(BaseWebdatasetFactory, "config", renamed)
    with pytest.raises(ConfigError, match=line("megatron-energon", "in which config() of a dataset")):
        get_packed_loader(folder(pack_demo), encoder, num_workers=0, epochs=1).state_dict()


@pytest.mark.parametrize("name", ["_workers", "_worker_pids_set", "_set_worker_pids", "_remove_worker_pids"])
def test_torch_without_the_workers_of_a_loader(name: str, monkeypatch: Patch) -> None:
    batches = WatchedWorkers(torch.utils.data.DataLoader([1, 2], num_workers=1))
    if name in ("_workers", "_worker_pids_set"):
        monkeypatch.setattr(_MultiProcessingDataLoaderIter, name, absent(name), raising=False)
    else:
        monkeypatch.delattr(signal_handling, name)
    owner = "WatchedWorkers" if name in ("_workers", "_worker_pids_set") else signal_handling.__name__
    with pytest.raises(ConfigError, match=line("torch", f"in which {owner} has no `{name}`")):
        next(batches)
    monkeypatch.undo()  # before it is deleted
    del batches


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (dataloader, "_MultiProcessingDataLoaderIter"),
        (_MultiProcessingDataLoaderIter, "_reset"),
        (dataloader.DataLoader, "_get_iterator"),
    ],
)
def test_torch_without_the_methods_that_are_overridden(owner: Any, name: str, monkeypatch: Patch) -> None:
    monkeypatch.delattr(owner, name)
    monkeypatch.delattr(_BaseDataLoaderIter, name, raising=False)
    with pytest.raises(ConfigError, match=line("torch", f"in which {owner.__name__} has no `{name}`")):
        runpy.run_path(inspect.getfile(WatchedWorkers))


def test_a_storage_client_without_its_provider(store: Store, monkeypatch: Patch) -> None:
    path = as_path(store.url("a"))
    client, _ = path._client()
    with monkeypatch.context() as patch:
        patch.setattr(type(client), "_storage_provider", absent("_storage_provider"))
        for call in (lambda: path.create(b"x"), path.abort_uploads):
            with pytest.raises(ConfigError, match=line("multi-storage-client", "in which StorageClient has no ")):
                call()
    assert path.create(b"x")
    assert not path.create(b"y")
    monkeypatch.setattr(S3StorageProvider, "put_object", lambda self, path, body: None)
    with pytest.raises(ConfigError, match=line("multi-storage-client", "which raises TypeError: ")):
        path.create(b"z")


def test_megatron_without_its_calculator(monkeypatch: Patch) -> None:
    assert ranks.num_microbatches() == 1
    monkeypatch.delattr(num_microbatches_calculator, "_GLOBAL_NUM_MICROBATCHES_CALCULATOR")
    name = num_microbatches_calculator.__name__
    with pytest.raises(ConfigError, match=line("megatron-core", f"in which {name} has no `_GLOBAL")):
        ranks.num_microbatches()


def test_installed_versions_pack_load_and_decode(
    video_demo: VideoDemo, pack_demo: Packer, encoder: ChatEncoder
) -> None:
    """Images and videos with whatever is installed; `make test-newest` runs it with the newest versions."""
    images, videos = pack_demo(), video_demo.packed()
    assert not videos.rejects.read_text()
    for packed, own, pixels in (
        (images, encoder, "pixel_values"),
        (videos, video_demo.encoder, "pixel_values_videos"),
    ):
        samples, found = 0, 0
        for batch in get_packed_loader(packed.shards.parent, own, num_workers=0, epochs=1):
            samples += len(batch.ids)
            values = getattr(batch, pixels)
            if values is not None:
                found += len(values)
                assert np.isfinite(values.float().numpy()).all()
        data = PackedDataset(packed.shards.parent, own)
        assert samples == sum(len(data[index]) for index in range(len(data)))
        assert found > 0
