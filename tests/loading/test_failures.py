"""Samples that fail while loading are counted, logged and bounded; good data counts zero."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from energon_packed import (
    BatchError,
    ChatEncoder,
    FormatError,
    PackedDataset,
    PoolPacker,
    RecordError,
    get_packed_loader,
)
from tests.conftest import FLAVORS, Packer


@pytest.fixture
def damaged(pack_demo: Packer, tmp_path: Path) -> Path:
    """A dataset in which two packs name an image that is not there."""
    shards = pack_demo(max_packs_per_shard=1000).shards
    copy = tmp_path / "damaged"
    shutil.copytree(shards, copy)
    tar = next(copy.glob("*.tar"))
    data = tar.read_bytes()
    head = b'{"images":[["img'
    for _ in range(2):
        place = data.index(head + b"0_0")
        data = data[:place] + b"X" + data[place + 1 :]
    tar.write_bytes(data)
    return copy


@pytest.mark.parametrize("num_workers", [0, 2])
def test_failures_are_counted_by_reason_and_logged(
    damaged: Path, encoder: ChatEncoder, num_workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    loader = get_packed_loader(damaged, encoder, epochs=1, num_workers=num_workers, max_failures=2)
    packs = json.loads((damaged / ".nv-meta" / "packing.json").read_text())["packs"]
    with caplog.at_level(logging.ERROR):
        assert len(list(loader)) == packs - 2
    assert loader.failures.counts == {"bad_format": 2}
    if num_workers == 0:  # what workers log goes to their own standard error
        assert caplog.text.count("failed to load: FormatError: pack_") == 2
        assert "the json part is damaged" in caplog.text
        assert "damaged/pack-000000.tar" in caplog.text


def test_a_bad_image_drops_its_sample_and_not_its_pack(
    pack_demo: Packer, encoder: ChatEncoder, tmp_path: Path
) -> None:
    result = pack_demo()
    copy = tmp_path / "copy"
    shutil.copytree(result.shards, copy)
    tar = next(copy.glob("*.tar"))
    data = tar.read_bytes()
    place = data.index(b"\x89PNG\r\n\x1a\n") + 8  # the first chunk of the first PNG
    tar.write_bytes(data[:place] + bytes(40) + data[place + 40 :])
    loader = get_packed_loader(copy, encoder, epochs=1, num_workers=0, max_failures=1)
    batches = list(loader)
    assert loader.failures.counts == {"corrupt_image": 1}
    assert len(batches) == result.manifest.packs
    assert sum(batch.num_samples for batch in batches) == result.manifest.packed - 1


@pytest.mark.parametrize("limit", [0, 1])
def test_a_failing_sample_inside_a_pack_is_counted_once(
    pack_demo: Packer, encoder: ChatEncoder, tmp_path: Path, limit: int
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(pack_demo().shards, copy)
    tar = next(copy.glob("*.tar"))
    data = tar.read_bytes()
    place = 0
    for _ in range(limit + 1):
        place = data.index(b"\x89PNG\r\n\x1a\n", place) + 8
        data = data[:place] + bytes(40) + data[place + 40 :]
    tar.write_bytes(data)
    loader = get_packed_loader(copy, encoder, epochs=1, num_workers=0, max_failures=limit)
    message = "corrupt_image: " if limit == 0 else r"2 samples failed to load, .* \(corrupt_image 2\)"
    with pytest.raises((RecordError, BatchError), match=message):
        list(loader)
    assert loader.failures.counts == {"corrupt_image": limit + 1}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_past_the_limit_the_run_stops(damaged: Path, encoder: ChatEncoder, num_workers: int) -> None:
    loader = get_packed_loader(damaged, encoder, epochs=1, num_workers=num_workers, max_failures=1)
    with pytest.raises(BatchError, match=r"2 samples failed to load, more than `max_failures` 1 \(bad_format 2\)"):
        list(loader)


def test_by_default_the_first_failure_is_raised(damaged: Path, encoder: ChatEncoder) -> None:
    with pytest.raises(FormatError, match="pack_0000.*: the json part is damaged"):
        list(get_packed_loader(damaged, encoder, epochs=1, num_workers=0))


@pytest.mark.parametrize("flavor", FLAVORS)
def test_good_data_counts_zero(pack_demo: Packer, encoder: ChatEncoder, flavor: str) -> None:
    loader = get_packed_loader(
        pack_demo(sample_class=flavor).shards, encoder, epochs=1, num_workers=0, max_failures=10
    )
    list(loader)
    assert loader.failures.counts == {}


@pytest.mark.parametrize("flavor", FLAVORS)
@pytest.mark.parametrize("named", [True, False])
def test_the_same_shards_as_crude_data(
    pack_demo: Packer, encoder: ChatEncoder, flavor: str, named: bool, tmp_path: Path
) -> None:
    shards = pack_demo(sample_class=flavor).shards
    crude = tmp_path / "crude"
    shutil.copytree(shards, crude)
    lines = ["__module__: megatron.energon", "__class__: CrudeWebdataset"]
    lines += [f"subflavors: {{sample_class: {flavor}}}"] if named else []
    (crude / ".nv-meta" / "dataset.yaml").write_text("\n".join(lines) + "\n")
    options: dict[str, Any] = {"epochs": 1, "num_workers": 0, "shuffle": False}
    expected, found = (list(get_packed_loader(path, encoder, **options)) for path in (shards, crude))
    assert [b.ids for b in found] == [b.ids for b in expected]
    assert all(a.input_ids.equal(b.input_ids) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("limit", [0, 3, 100])
def test_on_the_fly_a_sample_that_fits_no_row_fails_alone(pack_demo: Packer, encoder: ChatEncoder, limit: int) -> None:
    shards = pack_demo(sample_class="MultiMixQASample").shards
    lengths = PackedDataset(shards, encoder).lengths
    row = int(np.sort(lengths)[-6])  # five are longer
    task_encoder_options: dict[str, Any] = {"epochs": 1, "num_workers": 0, "packing_buffer_size": 30}
    loader = get_packed_loader(shards, encoder, packer=PoolPacker(row), max_failures=limit, **task_encoder_options)
    if limit < 5:
        with pytest.raises(
            BatchError, match=f"does not fit a row: .* more than seq_len {row}|more than `max_failures` 3"
        ):
            list(loader)
        return
    assert sum(batch.num_samples for batch in loader) == len(lengths) - 5
    assert loader.failures.counts == {"bad_batch": 5}
