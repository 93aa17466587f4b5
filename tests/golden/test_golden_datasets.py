"""Stored datasets load: by both loaders, Energon itself, verify and inspect; and `pack` writes the same bytes again.

README.md lists the folders. No test writes to them, and no expectation is made from their content.
"""

import json
import re
import shlex
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from megatron.energon import DefaultTaskEncoder, WorkerConfig, get_loader, get_val_dataset

from energon_packed import ChatEncoder, PackedDataset, PaddingFreeCollator, get_packed_loader
from tests.internals import PackedFolder, cli, verify

HERE = Path(__file__).parent
EXPECTED = json.loads((HERE / "expected.json").read_text())
PACKED = {
    name: options
    for _, name, *options in map(shlex.split, re.findall("^one .*", (HERE / "pack.sh").read_text(), re.M))
}
"""Input, flavor and further options of each dataset, by its name."""
DATASETS = [name for name in PACKED if not name.startswith("weights-")]
OF_INPUT = {"texts": "t", "images": "i", "positions": "p", "system": "s", "frames": "v", "tokens": "k", "special": "x"}


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy, so that no test writes to the data."""
    return shutil.copytree(HERE / "datasets", tmp_path_factory.mktemp("golden") / "golden")


@pytest.fixture(scope="module")
def golden_encoder() -> ChatEncoder:
    return ChatEncoder.from_pretrained(HERE / "tokenizer")


def expected_ids(name: str) -> list[str]:
    """Records of the input that a dataset was packed from."""
    letter = OF_INPUT[PACKED[name][0]]
    return sorted(ident for ident in EXPECTED if ident.startswith(letter))


def supervised(labels: list[int]) -> list[list[int]]:
    """Spans `[start, stop)` of targets; the first token of a sample is never one."""
    labels = [-100, *labels[1:]]
    edges = [n for n in range(len(labels) + 1) if (labels[n : n + 1] or [-100]) != [-100]]
    starts = [n for n in edges if n - 1 not in edges]
    return [[start, next(n for n in range(start, len(labels) + 1) if n not in edges)] for start in starts]


def as_seen(sample: Any) -> dict[str, Any]:
    """What a model sees of a sample, but pixels."""
    grid = None if sample.image_grid_thw is None else sample.image_grid_thw.tolist()
    return {"input_ids": sample.input_ids.tolist(), "supervised": supervised(sample.labels.tolist()), "grid": grid}


def by_dataset(folder: Path, encoder: ChatEncoder, **options: Any) -> Iterator[Any]:
    dataset = PackedDataset(folder, encoder, **options)
    return (sample for number in range(len(dataset)) for sample in dataset[number])


def by_loader(folder: Path, encoder: ChatEncoder, **options: Any) -> Iterator[Any]:
    settings = {"epochs": 1, "num_workers": 0, "max_failures": 0}
    return (sample for batch in get_packed_loader(folder, encoder, **settings, **options) for sample in batch.split())


@pytest.mark.parametrize("name", DATASETS)
@pytest.mark.parametrize("read", [by_dataset, by_loader])
def test_tokens_targets_and_image_sizes(
    golden: Path, golden_encoder: ChatEncoder, name: str, read: Callable[..., Iterator[Any]]
) -> None:
    actual = {sample.id: as_seen(sample) for sample in read(golden / name, golden_encoder)}
    assert sorted(actual) == expected_ids(name)
    assert actual == {ident: EXPECTED[ident]["seen"] for ident in actual}


WEIGHTED = {
    "w0": [("Hello.<|im_end|>", 0.5), ("5.<|im_end|>", 2)],
    "w1": [("Hello.<|im_end|>", 0.25)],
    "w2": [("wo words.<|im_end|>", 3)],
}
"""Supervised text of the records of `inputs/weights.jsonl`, and its loss weights."""


@pytest.mark.parametrize("read", [by_dataset, by_loader])
@pytest.mark.parametrize("name", ["captions", "multimix", "tokens"])
def test_loss_weights(
    golden: Path, golden_encoder: ChatEncoder, name: str, read: Callable[..., Iterator[Any]]
) -> None:
    found = {}
    for sample in read(golden / f"weights-{name}", golden_encoder):
        batch = PaddingFreeCollator().collate([sample])
        masked = zip(batch.input_ids[0].tolist(), batch.loss_mask[0].tolist(), strict=True)
        runs = [(weight, [token for token, _ in run]) for weight, run in groupby(masked, key=lambda pair: pair[1])]
        backend = golden_encoder.parts.backend
        found[sample.id] = [(backend.decode(ids, skip_special_tokens=False), w) for w, ids in runs if w]
    assert found == WEIGHTED


@pytest.mark.parametrize("name", DATASETS)
def test_verify_and_inspect(golden: Path, golden_encoder: ChatEncoder, name: str, tmp_path: Path) -> None:
    folder = shutil.copytree(golden / name, tmp_path / "copy") / "webdataset"
    checks = verify(PackedFolder.open(folder), golden_encoder)
    assert [problem for check in checks for problem in check.problems] == []
    shown = CliRunner().invoke(cli, ["inspect", "--json", "--limit", "9", str(golden / name)])
    assert shown.exit_code == 0, shown.output
    samples = [sample for line in shown.stdout.splitlines() for sample in json.loads(line).get("samples", [])]
    assert sorted(sample["id"] for sample in samples) == expected_ids(name)
    for sample in samples:
        sizes = [[image["width"], image["height"]] for image in sample["images"]]
        assert sizes == EXPECTED[sample["id"]]["images"]
        assert [image["problem"] for image in sample["images"]] == [None] * len(sizes)


class Whole(DefaultTaskEncoder):  # type: ignore[misc]
    decoder = None


@pytest.mark.parametrize("name", DATASETS)
def test_energon_alone(golden: Path, name: str) -> None:
    def refuse(error: Exception, *rest: Any) -> None:
        raise error

    config = WorkerConfig(rank=0, world_size=1, num_workers=0, global_error_handler=refuse)
    settings = {"split_part": "train", "worker_config": config, "batch_size": None, "task_encoder": Whole()}
    packs = list(get_loader(get_val_dataset(golden / name / "webdataset", **settings)))
    stored = [sample for pack in packs for sample in pack.stored_samples()]
    assert sorted(sample.conversation.id for sample in stored) == expected_ids(name)
    for sample in stored:
        expected = EXPECTED[sample.conversation.id]
        names = expected["files"]
        if name == "llava-onevision2":  # images that are no JPEG were converted
            assert all(image.data.startswith(b"\xff\xd8") for image in sample.conversation.images)
            assert len(sample.conversation.images) == len(names)
        else:
            assert [image.data for image in sample.conversation.images] == [
                (HERE / "inputs" / file).read_bytes() for file in names
            ]
        arrays = [(HERE / "inputs" / file).read_bytes() for file in expected.get("arrays", [])]
        assert [file.data for file in sample.conversation.patch_positions] == arrays
        assert sample.length == len(expected["seen"]["input_ids"])


@pytest.mark.parametrize("name", PACKED)
def test_pack_writes_the_same_again(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(HERE)  # lengths.parquet and rejects.jsonl have the path of the input
    source, flavor, *options = PACKED[name]
    arguments = f"pack inputs/{source}.jsonl --tokenizer tokenizer --seq-len 160 --max-packs-per-shard 2 --workers 1"
    more = ["--output-dir", str(tmp_path), "--sample-class", flavor, "--shard-prefix", name, *options]
    done = CliRunner().invoke(cli, [*arguments.split(), *more])
    assert done.exit_code == 0, done.output
    before = HERE / "datasets" / name
    assert (tmp_path / "rejects.jsonl").read_bytes() == (before / "rejects.jsonl").read_bytes()
    tables = [pq.read_table(folder / "lengths.parquet") for folder in (tmp_path, before)]
    assert tables[0].equals(tables[1])
    recorded = json.loads((tmp_path / "webdataset/.nv-meta/packing.json").read_text())["fingerprint"]
    assert tables[0].schema.metadata == {b"fingerprint": recorded.encode()}
    folders = (tmp_path / "webdataset", before / "webdataset")
    tars, stored = ({file.name: file.read_bytes() for file in folder.glob("*.tar*")} for folder in folders)
    assert tars.keys() == stored.keys()
    if name != "llava-onevision2":  # the bytes of converted images depend on the version of Pillow
        assert tars == stored
        assert index_rows(tmp_path) == index_rows(before)


def index_rows(folder: Path) -> dict[str, list[Any]]:
    """Rows of all tables of index.sqlite."""
    with closing(sqlite3.connect(f"file:{folder}/webdataset/.nv-meta/index.sqlite?mode=ro", uri=True)) as database:
        tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return {name: sorted(database.execute(f"SELECT * FROM {name}")) for name in tables}
