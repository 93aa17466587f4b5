"""`inspect --extract` writes files inside one folder, or nothing."""

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from energon_packed import EnergonPackedError, FormatError
from tests.internals import cli, extract_pack, scan_tar


def tar_of(path: Path, name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> Path:
    with tarfile.open(path, "w") as tar:
        for one in ("0.json", name):
            content = b'{"prompts": [["a"]], "captions": [["b"]], "images": [[]]}'
            info = tarfile.TarInfo(one)
            if one == name and kind != tarfile.REGTYPE:
                info.type, info.linkname = kind, target
                tar.addfile(info)
                continue
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


@pytest.mark.parametrize("key", ["../0", "/tmp/energon-packed-evil", "a/../../0", "x\0y"])
def test_names_that_lead_out_of_the_folder_are_not_extracted(tmp_path: Path, key: str) -> None:
    folder = tmp_path / "to"
    with pytest.raises(FormatError, match="outside of"):
        extract_pack({"__key__": key, "json": b"x", "txt": b"y"}, folder)
    with pytest.raises(FormatError, match="outside of"):
        extract_pack({"__key__": "0", "json": b"x", "/../../evil": b"y"}, folder)
    assert not any(file.is_file() for file in tmp_path.rglob("*"))
    assert not Path("/tmp/energon-packed-evil").exists()


def test_a_symbolic_link_in_the_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "to").mkdir()
    (tmp_path / "to" / "0").symlink_to(tmp_path)
    with pytest.raises(FormatError, match="outside of"):
        extract_pack({"__key__": "0", "evil": b"x"}, tmp_path / "to")
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (tarfile.SYMTYPE, "symbolic link"),
        (tarfile.LNKTYPE, "hard link"),
        (tarfile.CHRTYPE, "device"),
        (tarfile.BLKTYPE, "device"),
        (tarfile.FIFOTYPE, "FIFO"),
    ],
)
def test_links_and_devices_are_not_extracted(tmp_path: Path, kind: bytes, what: str) -> None:
    tar = tar_of(tmp_path / "s.tar", "0.img0_0.jpg", kind, "/etc/passwd")
    assert f"0.img0_0.jpg is a {what}" in scan_tar(tar).problems[0]
    result = CliRunner().invoke(cli, ["inspect", str(tar), "--extract", str(tmp_path / "to")])
    assert isinstance(result.exception, EnergonPackedError), result.output
    assert "which is never read" in str(result.exception)
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize("link", [Path.hardlink_to, Path.symlink_to])
def test_a_link_in_the_folder_is_replaced(tmp_path: Path, link: Callable[[Path, Path], None]) -> None:
    (tmp_path / "to" / "0").mkdir(parents=True)
    (tmp_path / "to" / "mine").write_bytes(b"mine")
    link(tmp_path / "to" / "0" / "txt", tmp_path / "to" / "mine")
    extract_pack({"__key__": "0", "txt": b"x"}, tmp_path / "to")
    assert (tmp_path / "to" / "mine").read_bytes() == b"mine"
    assert (tmp_path / "to" / "0" / "txt").read_bytes() == b"x"
    assert not (tmp_path / "to" / "0" / "txt").is_symlink()
