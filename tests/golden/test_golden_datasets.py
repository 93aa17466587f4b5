"""Datasets of earlier releases load as they were written: by both loaders, Energon itself, verify and inspect.

What is in the folders is in README.md. Nothing here writes to them, and no expectation is made from what is read.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from megatron.energon import DefaultTaskEncoder, WorkerConfig, get_loader, get_val_dataset

from energon_packed import ChatEncoder, ConfigError, FormatError, PackedDataset, PaddingFreeCollator, get_packed_loader
from tests.internals import PackedFolder, cli, make_nv_meta, verify

HERE = Path(__file__).parent
EXPECTED = json.loads((HERE / "expected.json").read_text())
DATASETS = sorted(str(folder.relative_to(HERE)) for folder in HERE.glob("identity-*/*"))
SHORT = [name for name in DATASETS if "identity-7" in name or name.endswith(("images", "frames", "special"))]
"""Those for Energon's loaders, each of which takes half a second."""
OF_INPUT = {"texts": "t", "images": "i", "positions": "p", "system": "s", "frames": "v", "tokens": "k", "special": "x"}
PACKED_FROM = {
    "captions-text": "texts", "captions-images": "images", "captions-positions": "positions", "unpacked": "images",
    "multimix-text": "system", "multimix-images": "images", "multimix-frames": "frames", "tokens-text": "texts",
    "tokens-images": "images", "stored": "tokens", "special": "special", "llava-onevision2": "images",
}  # fmt: skip


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy, so that no test writes to the data."""
    return shutil.copytree(HERE, tmp_path_factory.mktemp("golden") / "golden")


@pytest.fixture(scope="module")
def golden_encoder(golden: Path) -> ChatEncoder:
    return ChatEncoder.from_pretrained(golden / "tokenizer")


def expected_ids(name: str) -> list[str]:
    """Records of the input that a dataset was packed from."""
    letter = OF_INPUT[PACKED_FROM[name.partition("/")[2]]]
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


READINGS = [(by_dataset, name) for name in DATASETS] + [(by_loader, name) for name in SHORT]


@pytest.mark.parametrize(("read", "name"), [reading for reading in READINGS if reading[1] != "identity-6/special"])
def test_tokens_targets_and_image_sizes(
    golden: Path, golden_encoder: ChatEncoder, name: str, read: Callable[..., Iterator[Any]]
) -> None:
    if name.startswith("identity-4"):  # another encoder: loaded where a user says so
        with pytest.raises(ConfigError, match="or an earlier release packed it.* repack the data"):
            next(read(golden / name, golden_encoder))
        options = {"check_encoder": False}
    else:
        options = {}
    if name == "identity-4/special":
        with pytest.raises(FormatError, match="sample x0 of pack .* has 49 tokens, but 43 were recorded"):
            list(read(golden / name, golden_encoder, **options))
        return
    actual = {sample.id: as_seen(sample) for sample in read(golden / name, golden_encoder, **options)}
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
    for sample in read(golden / "format-2" / f"weights-{name}", golden_encoder):
        batch = PaddingFreeCollator().collate([sample])
        masked = zip(batch.input_ids[0].tolist(), batch.loss_mask[0].tolist(), strict=True)
        runs = [(weight, [token for token, _ in run]) for weight, run in groupby(masked, key=lambda pair: pair[1])]
        backend = golden_encoder.parts.backend
        found[sample.id] = [(backend.decode(ids, skip_special_tokens=False), w) for w, ids in runs if w]
    assert found == WEIGHTED


@pytest.mark.parametrize("read", [by_dataset, by_loader])
def test_special_tokens_in_old_datasets_stay_control_tokens(
    golden: Path, golden_encoder: ChatEncoder, read: Callable[..., Iterator[Any]]
) -> None:
    folder = golden / "identity-6" / "special"
    with pytest.raises(FormatError, match="sample x0 of pack .* has 49 tokens, but 43 were recorded: use"):
        list(read(folder, golden_encoder))
    as_then = ChatEncoder.from_pretrained(golden / "tokenizer", allow_special_in_text=True)
    actual = {sample.id: as_seen(sample) for sample in read(folder, as_then)}
    assert actual == {"x0": EXPECTED["x0"]["seen with special tokens in text"], "x1": EXPECTED["x1"]["seen"]}


@pytest.mark.parametrize("name", SHORT)
def test_verify_and_inspect(golden: Path, golden_encoder: ChatEncoder, name: str, tmp_path: Path) -> None:
    folder = shutil.copytree(golden / name, tmp_path / "copy") / "webdataset"
    failed = [check for check in verify(PackedFolder.open(folder), golden_encoder) if not check.passed]
    if name.startswith("identity-4"):  # no crude.yaml yet: named, with what makes it
        (problem,) = failed.pop().problems
        assert problem == "crude.yaml is missing. Run energon-packed nv-meta."
        if name == "identity-4/multimix-frames":
            make_nv_meta(folder)
            assert all(check.passed for check in verify(PackedFolder.open(folder), golden_encoder))
    problems = [problem for check in failed for problem in check.problems]
    if name in ("identity-4/special", "identity-6/special"):
        assert problems[0] == "special-000000.tar: special_00000000, sample x0 has 49 tokens, 43 are recorded"
    else:
        assert not problems
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


@pytest.mark.parametrize("name", SHORT)
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
        if name.endswith("/llava-onevision2"):  # images that are no JPEG were converted
            assert all(image.data.startswith(b"\xff\xd8") for image in sample.images)
            assert len(sample.images) == len(names)
        else:
            assert [image.data for image in sample.images] == [(HERE / "inputs" / file).read_bytes() for file in names]
        arrays = [(HERE / "inputs" / file).read_bytes() for file in expected.get("arrays", [])]
        assert list(sample.patch_positions) == arrays
        length = len(expected["seen"]["input_ids"])
        then = {"x0": 43}.get(sample.conversation.id, length) if "identity-7" not in name else length
        assert sample.length == then
