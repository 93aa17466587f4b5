"""Write the records of docs/my-data.md to files of the format that their title names, and draw the images they name.

tests/records/published.md has the same form: the records of datasets as published, with the fields that are not read.

A block with title="NAME" has the content of a file:

    .json .jsonl .csv .py .yaml   the text of the block; .gz compresses it
    .parquet, NAME/               a record per line; NAME/ is a folder of `datasets.save_to_disk`
    .tar                          `member  content` per line

`"bytes": "..."` stands for the bytes of an image, `/9j/4AAQ...` for their base64. A path that ends like an image is
drawn, in the folder of `--image-root` or beside the file, with its own size and color. A ```bash block has the
command that packs the files before it; a ```text block after it, without a title, has the rejects in their order. A
section with files and without a command has the first command of the page, with its files in place of FILE. `-o out`
becomes a folder of its own for each section.
"""

import base64
import gzip
import io
import json
import re
import shlex
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

PAGE = Path(__file__).resolve().parents[2] / "docs" / "my-data.md"
PUBLISHED = Path(__file__).resolve().parents[1] / "records" / "published.md"
_PART = re.compile(r"^### ([^\n]+)$|^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_IMAGE = re.compile(r"(?<![\w./:-])[\w-][\w./-]*\.(?:jpe?g|png|webp)\b")
_IMAGE_ID = re.compile(r'"imageId": "(\w+)"')  # GQA
_BASE64 = "/9j/4AAQ..."
_BYTES = "..."


@dataclass(slots=True)
class Entry:
    """One format of the page.

    Attributes:
        title: its heading.
        files: content of each file by name.
        command: the command that packs the files.
        rejects: `reason: detail` of each record in rejects.jsonl; "" if all are packed.
    """

    title: str
    files: dict[str, str] = field(default_factory=dict)
    command: str = ""
    rejects: str = ""

    @property
    def output(self) -> str:
        """The folder of `-o`."""
        return self.command.split(" -o ")[1].split()[0] if " -o " in self.command else ""


def entries(page: Path) -> dict[str, Entry]:
    """Return the formats of a page that have files, in order, by title."""
    formats: list[Entry] = []
    default = ""
    for heading, language, title, content in _PART.findall(page.read_text(encoding="utf-8")):
        if heading:
            formats.append(Entry(heading))
        elif title:
            formats[-1].files[title] = content
        elif language == "bash" and not formats:
            default = content.strip()
        elif language == "bash":
            assert not formats[-1].command, f"{formats[-1].title} has two commands"
            formats[-1].command = content.strip()
        elif language == "text":
            formats[-1].rejects = content.strip()
    assert " FILE -o out " in default
    found = {entry.title: entry for entry in formats if entry.files}
    for number, entry in enumerate(found.values()):
        files = shlex.join(name.rstrip("/") for name in entry.files)
        command = entry.command or default.replace("FILE", files)
        entry.command = re.sub(r" -o out(?= |$)", f" -o out/{page.stem}-{number}", command)
    return found


def write_files(entry: Entry, folder: Path) -> None:
    """Write the files of a format, and the images that they name."""
    root = re.search(r"--image-root (\S+)", entry.command)
    for name, content in entry.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".tar"):
            _write_tar(path, content)
            continue
        for image in [*_IMAGE.findall(content), *(f"{name}.jpg" for name in _IMAGE_ID.findall(content))]:
            drawn = (folder / root[1] if root else path.parent) / image
            drawn.parent.mkdir(parents=True, exist_ok=True)
            drawn.write_bytes(image_bytes(image))
        if name.endswith((".parquet", "/")):
            _write_table(path, [_with_bytes(json.loads(line)) for line in content.splitlines()])
        else:
            data = content.replace(_BASE64, base64.b64encode(image_bytes("")).decode()).encode()
            path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)


def image_bytes(name: str) -> bytes:
    """Return a JPEG whose size and color depend on the name; "" is used for `bytes` and base64 without a name."""
    seed = zlib.crc32(name.encode())
    size = (56 + 28 * (seed % 5), 56 + 28 * (seed // 5 % 5))
    stream = io.BytesIO()
    Image.new("RGB", size, tuple((seed >> shift) & 255 for shift in (0, 8, 16))).save(stream, "JPEG")
    return stream.getvalue()


def _with_bytes(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_bytes(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.get("bytes") == _BYTES:
        return {**value, "bytes": image_bytes(value.get("path") or "")}
    return {name: _with_bytes(item) for name, item in value.items()}


def _write_table(path: Path, rows: list[Any]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pylist(rows)
    if path.suffix == ".parquet":
        pq.write_table(table, path)
        return
    import datasets

    datasets.Dataset(table).save_to_disk(path)


def _write_tar(path: Path, content: str) -> None:
    with tarfile.open(path, "w") as tar:
        for name, data in _members(content):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def _members(content: str) -> Iterator[tuple[str, bytes]]:
    for line in content.splitlines():
        name, *rest = line.split(maxsplit=1)
        yield name, rest[0].encode() if rest else image_bytes(name)
