"""`media_root`: loaders and `pack` read referenced images of folders that moved."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from megatron.energon.errors import FatalSampleError

from energon_packed import (
    ChatEncoder,
    ConfigError,
    DataChangedError,
    DataflowConfig,
    DataflowLoader,
    EnergonDistributor,
    MapDistributor,
    PackedDataset,
    get_packed_loader,
    get_raw_loader,
    pack,
    set_media_root,
)
from tests.internals import global_loader
from tests.loading.test_changed_media import plain_energon
from tests.media import pack_and_move
from tests.processes import CONTEXT


class Moved(NamedTuple):
    """A dataset whose images are in `new`, and were in `old` when they were packed."""

    out: Path
    copied: Path
    old: Path
    new: Path

    @property
    def root(self) -> dict[str, str]:
        return {str(self.old): str(self.new)}


@pytest.fixture
def moved(tokenizer_dir: Path, tmp_path: Path) -> Moved:
    return Moved(tmp_path / "reference", tmp_path / "copy", *pack_and_move(tmp_path, tokenizer_dir))


Loader = Callable[..., Any]
LOADERS: dict[str, Loader] = {
    "PackedDataset": lambda out, encoder, **more: DataflowLoader(
        MapDistributor(PackedDataset(out, encoder, **more)), batch_size=1, num_workers=1
    ),
    "EnergonDistributor": lambda out, encoder, **more: DataflowLoader(
        EnergonDistributor(out, **more), encoder, batch_size=1, num_workers=1
    ),
    "get_packed_loader": lambda out, encoder, **more: get_packed_loader(out, encoder, epochs=1, num_workers=1, **more),
    "get_raw_loader": lambda out, encoder, **more: get_raw_loader(
        DataflowConfig(dataset_path=str(out), encoder=encoder, packing_length=256, shuffle=False, **more)
    ),
}


def _pixels(loader: Any) -> list[tuple[list[Any], bytes]]:
    return [(list(batch.ids), batch.pixel_values.numpy().tobytes()) for batch in loader]


@pytest.mark.parametrize("name", LOADERS)
def test_moved_images_are_read_from_the_new_folder_and_states_do_not_depend_on_it(
    moved: Moved, encoder: ChatEncoder, name: str
) -> None:
    make = LOADERS[name]
    with pytest.raises(DataChangedError, match="does not exist|No such file"):
        _pixels(make(moved.out, encoder))
    loader, expected = make(moved.out, encoder, media_root=moved.root), make(moved.copied, encoder)
    assert _pixels(loader) == _pixels(expected)
    states = [made.state_dict() for made in (loader, make(moved.out, encoder, media_root={}))]
    assert states[0]["identity"] == states[1]["identity"]


@pytest.mark.parametrize("workers", [0, 1])
def test_set_media_root_is_for_the_loaders_of_energon(moved: Moved, encoder: ChatEncoder, workers: int) -> None:
    with pytest.raises(FatalSampleError, match="does not exist"):
        list(plain_energon(moved.out, encoder, workers))
    set_media_root(moved.root)
    found, expected = (
        [
            image.data
            for batch in plain_energon(folder, encoder, workers)
            for sample in batch.stored[0]
            for image in sample.conversation.images
        ]
        for folder in (moved.out, moved.copied)
    )
    assert found == expected
    assert len(found) > 1


def test_a_loader_of_megatron_reads_moved_images(moved: Moved, encoder: ChatEncoder) -> None:
    loader = global_loader(
        moved.out,
        encoder,
        rank=0,
        world_size=1,
        num_workers=0,
        media_root=moved.root,
    )
    assert next(iter(loader)).pixel_values is not None


@pytest.mark.parametrize("name", ["PackedDataset", "EnergonDistributor"])
def test_spawned_workers_read_moved_images(moved: Moved, encoder: ChatEncoder, name: str) -> None:
    distributor: Any = (
        MapDistributor(PackedDataset(moved.out, encoder, media_root=moved.root))
        if name == "PackedDataset"
        else EnergonDistributor(moved.out, media_root=moved.root)
    )
    loader = DataflowLoader(distributor, encoder, batch_size=1, num_workers=1, multiprocessing_context=CONTEXT)
    assert len(_pixels(loader)) == len(PackedDataset(moved.out, encoder))


def test_packs_of_moved_images_can_be_packed_again_with_references_to_the_original_files(
    moved: Moved, tokenizer_dir: Path, encoder: ChatEncoder, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"tokenizer": tokenizer_dir, "seq_len": 512, "shard_prefix": "d", "workers": 1}
    with pytest.raises(DataChangedError, match=r"d_0000000\d: img.*is not the packed image: .*No such file"):
        pack(moved.out, output_dir=tmp_path / "no", **settings)
    for media in ("copy", "reference"):
        pack(moved.out, output_dir=tmp_path / f"{media}-1", media=media, media_root=moved.root, **settings)
        pack(moved.copied, output_dir=tmp_path / f"{media}-2", media=media, **settings)
    tars = [(tmp_path / name / "webdataset" / "d-000000.tar").read_bytes() for name in ("copy-1", "copy-2")]
    assert tars[0] == tars[1]
    # The new references name the files of the first run, and not its packs.
    dataset = PackedDataset(tmp_path / "reference-1", encoder)
    content = b"".join(dataset.reader[pack]["media.json"] for pack in range(len(dataset)))
    assert content.count(str(moved.new / "images").encode()) >= 6
    assert str(moved.out).encode() not in content
    assert sum(len(dataset.sample(pack).stored_samples()) for pack in range(len(dataset))) == 12
    # A changed file stops the run: it is not packed as another image.
    file = moved.new / "images" / "0003.bmp"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(DataChangedError, match=r"\(r3\), is not the packed image: .*0003.bmp has other bytes"):
        pack(moved.out, output_dir=tmp_path / "changed", media="copy", media_root=moved.root, **settings)


def test_an_invalid_media_root_is_one_line(moved: Moved, encoder: ChatEncoder) -> None:
    old, new = str(moved.old), str(moved.new)
    with pytest.raises(ConfigError, match=r"`media_root` must have one new folder for .*old, got .*new and .*copy"):
        PackedDataset(moved.out, encoder, media_root={old: new, f"{old}/": str(moved.copied)})
    with pytest.raises(ConfigError, match=r"must name folders that exist, got .*nowhere"):
        PackedDataset(moved.out, encoder, media_root={old: f"{new}/nowhere"})
    for value in ("old=new", ["old"], {1: "new"}, {"old": None}):
        with pytest.raises(ConfigError, match="must map old folders to new folders, got"):
            get_packed_loader(moved.out, encoder, media_root=value)  # type: ignore[arg-type]
    set_media_root({old: new})
    set_media_root({old: new})
    with pytest.raises(ConfigError, match="must have one new folder"):
        set_media_root({old: str(moved.copied)})
