"""Datasets with referenced images, for tests: images that differ in their content only, as files or in a tar."""

import io
import json
import shutil
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from energon_packed import PackOptions, PackResult, pack


def bmp(number: int, side: int = 32) -> bytes:
    """Return a noisy image; images of a side have the same size in bytes."""
    pixels = np.random.default_rng(number).integers(0, 256, (side, side, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "BMP")
    return out.getvalue()


def write_tar(path: Path, numbers: Sequence[int], *, images: Sequence[int] | None = None) -> None:
    """Write a tar with an image and a caption of each number; `images` are the images to write in their place."""
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for number, image in zip(numbers, images or numbers, strict=True):
            for name, content in ((f"{number:04d}.bmp", bmp(image)), (f"{number:04d}.txt", b"a picture of noise")):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def write_files(folder: Path, numbers: Sequence[int]) -> Path:
    """Write images to `folder/images`, and a JSONL file with a record of each; return the file."""
    (folder / "images").mkdir(parents=True)
    lines = []
    for number in numbers:
        (folder / "images" / f"{number:04d}.bmp").write_bytes(bmp(number))
        turns = [
            {"role": "user", "content": "<image>What is it?"},
            {"role": "assistant", "content": "a picture of noise"},
        ]
        lines.append(json.dumps({"id": f"r{number}", "messages": turns, "images": [f"images/{number:04d}.bmp"]}))
    (folder / "data.jsonl").write_text("\n".join(lines))
    return folder / "data.jsonl"


def pack_media(folder: Path, tokenizer: Path, inputs: Sequence[Path], **options: Any) -> PackResult:
    """Pack inputs into `folder` with references; equal options plan equal packs."""
    settings: dict[str, Any] = {
        "inputs": tuple(str(path) for path in inputs),
        "output_dir": folder,
        "tokenizer": tokenizer,
        "seq_len": 256,
        "workers": 1,
        "shard_prefix": "d",
        "media": "reference",
    }
    return pack(PackOptions(**{**settings, **options}))


def restore(backup: Path, folder: Path) -> None:
    """Make `folder` a copy of `backup`, which has the same times of change."""
    shutil.rmtree(folder)
    shutil.copytree(backup, folder, copy_function=shutil.copy2)


def pack_and_move(folder: Path, tokenizer: Path) -> tuple[Path, Path]:
    """Pack images of files and of a tar as `folder/copy` and `folder/reference`, and then move the inputs.

    Returns:
        the folder of the inputs before, and now.
    """
    old, new = folder / "old", folder / "new"
    jsonl = write_files(old, range(6))
    write_tar(old / "tar.tar", range(100, 106))
    for media in ("copy", "reference"):
        pack_media(folder / media, tokenizer, [jsonl, old / "tar.tar"], media=media)
    old.rename(new)
    return old, new
