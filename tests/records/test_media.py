"""Media bytes come from where the record says, and from nowhere outside the image root."""

import base64
from pathlib import Path

import pytest

from energon_packed import MediaReference, RecordError


def test_paths_bytes_ranges_and_data_urls(tmp_path: Path) -> None:
    (tmp_path / "a b.bin").write_bytes(b"0123456789")
    root = str(tmp_path)
    values = {
        "a b.bin": b"0123456789",
        str(tmp_path / "a b.bin"): b"0123456789",
        f"file://{tmp_path}/a%20b.bin": b"0123456789",
        "data:image/png;base64," + base64.b64encode(b"xyz").decode(): b"xyz",
    }
    for value, expected in values.items():
        assert MediaReference.from_value(value, root).read() == expected
    assert MediaReference(path="a b.bin", root=root, offset=2, size=3).read() == b"234"
    assert MediaReference.from_value({"bytes": b"q", "path": None}).read() == b"q"


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "sub/../../secret", "link/../../secret"])
def test_nothing_outside_the_root_is_read(tmp_path: Path, name: str) -> None:
    root = tmp_path / "root"
    (root / "sub").mkdir(parents=True)
    (tmp_path / "secret").write_bytes(b"s")
    (root / "link").symlink_to(root / "sub")
    with pytest.raises(RecordError, match="outside `image_root`") as caught:
        MediaReference.from_value(name, str(root)).read()
    assert caught.value.reason.value == "image_outside_root"


def test_a_folder_whose_name_starts_like_the_root_is_outside(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "root2").mkdir()
    (tmp_path / "root2" / "a").write_bytes(b"a")
    with pytest.raises(RecordError, match="outside"):
        MediaReference(path="../root2/a", root=str(tmp_path / "root")).read()


@pytest.mark.parametrize("name", ["none.png", ".", "a\0b"])
def test_missing_files_are_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(RecordError) as caught:
        MediaReference(path=name, root=str(tmp_path)).read()
    assert caught.value.reason.value == "missing_image"


def test_a_range_past_the_end_is_missing(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"0123")
    with pytest.raises(RecordError, match="ends inside bytes 2..9"):
        MediaReference(path=str(tmp_path / "a"), offset=2, size=7).read()
