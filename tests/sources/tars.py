"""Tars as other programs write them."""

import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from energon_packed import Conversation, MediaReference, Source, normalize


def picture(seed: int, size: int = 40, kind: str = "JPEG") -> bytes:
    """An image of noise."""
    pixels = np.random.default_rng(seed).integers(0, 255, (size, size, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, kind)
    return out.getvalue()


def write_tar(path: Path, members: Sequence[tuple[str, Any]]) -> Path:
    """Members in order: bytes, text, or what becomes JSON."""
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            if isinstance(content, str):
                content = content.encode()
            if not isinstance(content, bytes):
                content = json.dumps(content).encode()
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def conversations(sources: Sequence[Source]) -> list[Conversation]:
    """What the records of sources become, with the bytes of their images and videos in memory.

    Each row is also read by its address, and must be the same.
    """
    found = []
    for source in sources:
        for start, stop in source.chunks():
            for row in source.scan(start, stop):
                assert start <= row.address < stop
                assert source.read(row.address, row.size) == row
                assert row.reject is None, str(row.reject)
                found.append(in_memory(conversation(source, row.record)))
    return found


def conversation(source: Source, record: Any) -> Conversation:
    return record if isinstance(record, Conversation) else normalize(record, image_root=source.image_root)


def in_memory(one: Conversation, **changes: Any) -> Conversation:
    fields: Mapping[str, Any] = {name: getattr(one, name) for name in one.__dataclass_fields__}
    images = tuple(MediaReference(data=image.read()) for image in one.images)
    videos = []
    for video in one.videos:
        file = None if video.file is None else MediaReference(data=video.file.read())
        frames = tuple(MediaReference(data=image.read()) for image in video.images)
        videos.append(replace(video, file=file, images=frames))
    return Conversation(**{**fields, "images": images, "videos": tuple(videos), **changes})
