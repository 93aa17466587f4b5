"""Fixtures that many tests share: the demo dataset, its tokenizer, and packed outputs of each flavor."""

import json
import os
import signal
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from energon_packed import ChatEncoder, PackOptions, PackResult, pack
from tests.frozen import freeze
from tests.internals import DemoDataset, storage_reader, storage_status, write_dataset, write_tokenizer
from tests.storage import BUCKET, Store, start_store
from tests.video_demo import VideoDemo


def _keep_files_in_memory() -> None:
    """Set the folder of temporary files to /dev/shm, if it has 4 GiB for them and may have programs.

    A `pack` of few records calls fsync 30 times, each of which waits some ms for a disk.
    """
    with suppress(OSError):
        status = os.statvfs("/dev/shm")
        if status.f_bavail * status.f_frsize >= 4 << 30 and not status.f_flag & os.ST_NOEXEC:
            os.environ.setdefault("TMPDIR", "/dev/shm")
            tempfile.tempdir = None  # an import may have chosen another folder


_keep_files_in_memory()
os.environ["HF_HUB_OFFLINE"] = "1"
torch.set_num_threads(1)  # tests run side by side
signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore Ctrl-C for background processes
settings.register_profile("compiled", deadline=None)  # the first example may load compiled code
settings.load_profile("compiled")

FLAVORS = ("PackedCaptioningSample", "PackedMultiMixQASample", "PackedTokensSample", "MultiMixQASample")
Packer = Callable[..., PackResult]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the modules of this folder first: a long test of theirs would run alone at the end."""
    items.sort(key=lambda item: item.path.parent != Path(__file__).parent)


def pytest_collection_finish() -> None:
    freeze()


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> DemoDataset:
    return write_dataset(tmp_path_factory.mktemp("demo"), records=120, broken=6)


@pytest.fixture(scope="session")
def tokenizer_dir(demo: DemoDataset) -> Path:
    folder = write_tokenizer(demo.jsonl.parent / "tokenizer", demo.texts)
    file = folder / "preprocessor_config.json"
    # Pixels take most of the time of packs and batches with images.
    file.write_text(json.dumps(json.loads(file.read_text()) | {"max_pixels": 28 * 28 * 48}))
    return folder


@pytest.fixture(scope="session")
def text_tokenizer_dir(demo: DemoDataset) -> Path:
    """The same tokenizer without image settings."""
    return write_tokenizer(demo.jsonl.parent / "text-tokenizer", demo.texts, vision=False)


@pytest.fixture(scope="session")
def encoder(tokenizer_dir: Path) -> ChatEncoder:
    return ChatEncoder.from_pretrained(tokenizer_dir)


@pytest.fixture(scope="session")
def pack_demo(demo: DemoDataset, tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Packer:
    """Function that packs the demo dataset with any options; equal options are packed once."""
    done: dict[str, PackResult] = {}

    def run(**options: object) -> PackResult:
        key = repr(sorted(options.items()))
        if key not in done:
            settings: dict[str, object] = {
                "inputs": (str(demo.jsonl),),
                "output_dir": tmp_path_factory.mktemp("packed"),
                "tokenizer": tokenizer_dir,
                "seq_len": 1024,
                "max_reject_rate": 0.2,
                "workers": 1,
                "shard_prefix": "pack",  # the default is the name of the folder
                "unpacked": options.get("sample_class") == "MultiMixQASample",
            }
            done[key] = pack(PackOptions(**{**settings, **options}))  # type: ignore[arg-type]
        return done[key]

    return run


@pytest.fixture(scope="session")
def video_demo(tmp_path_factory: pytest.TempPathFactory) -> VideoDemo:
    return VideoDemo(tmp_path_factory.mktemp("video-demo"))


@pytest.fixture(scope="session")
def store_server(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Started once per process: importing and starting moto takes a second."""
    return start_store(tmp_path_factory.mktemp("store"))


@pytest.fixture
def store(store_server: Store) -> Store:
    """An object store with one empty bucket."""
    keys = store_server.client.list_objects_v2(Bucket=BUCKET).get("Contents", [])
    for key in keys:
        store_server.client.delete_object(Bucket=BUCKET, Key=key["Key"])
    for known in (
        storage_status._recent,
        storage_reader._blocks,
    ):  # of other tests, at most a minute old
        known.clear()
    return store_server
