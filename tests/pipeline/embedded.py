"""Records with images that are in no file: bytes in Parquet and Arrow cells, and base64 in JSON."""

import base64
import gzip
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

DIFFERENT = 7
"""Different images of `rows`."""


def png(number: int, size: int = 28) -> bytes:
    pixels = np.random.default_rng(number).integers(0, 255, (size, size, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def rows(count: int = 40, different: int = DIFFERENT) -> list[dict[str, Any]]:
    """Records of which every fourth has no image, and every fifth two."""
    return [
        {
            "id": f"r{i}",
            "images": [
                {"bytes": png((i + j) % different), "path": f"{i}.png"} for j in range((i % 4 > 0) + (i % 5 == 0))
            ],
            "prompts": ["Which one?"],
            "captions": [f"number {i} " * (i % 9 + 1)],
        }
        for i in range(count)
    ]


def as_base64(record: dict[str, Any]) -> dict[str, Any]:
    images = ["data:image/png;base64," + base64.b64encode(image["bytes"]).decode() for image in record["images"]]
    return record | {"images": images}


def write_parquet(folder: Path, records: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(records), folder / "data.parquet", row_group_size=8)
    return folder / "data.parquet"


def write_arrow(folder: Path, records: list[dict[str, Any]]) -> Path:
    table = pa.Table.from_pylist(records)
    with pa.ipc.new_file(folder / "data.arrow", table.schema) as out:
        out.write_table(table, max_chunksize=8)
    return folder / "data.arrow"


def write_jsonl(folder: Path, records: list[dict[str, Any]]) -> Path:
    (folder / "data.jsonl").write_text("".join(json.dumps(as_base64(record)) + "\n" for record in records))
    return folder / "data.jsonl"


def write_gzip(folder: Path, records: list[dict[str, Any]]) -> Path:
    file = folder / "data.jsonl.gz"
    file.write_bytes(gzip.compress(write_jsonl(folder, records).read_bytes()))
    (folder / "data.jsonl").unlink()
    return file


def write_mixed(folder: Path, records: list[dict[str, Any]]) -> Path:
    """Every record has an image in a file, too."""
    (folder / "own.png").write_bytes(png(99))
    lines = [as_base64(record) for record in records]
    lines = [line | {"images": ["own.png", *line["images"]]} for line in lines]
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / "data.jsonl"
