"""JsonlSource: one JSON object a line, read by byte ranges; memory does not grow with the file."""

import codecs
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from energon_packed.errors import Reason, RecordError
from energon_packed.sources.base import Row, Source, parsed_or_raise


class JsonlSource(Source):
    """A JSONL file. Blank lines are no records.

    A range [start, stop) holds the lines that begin in it, so ranges can be read by different processes.
    """

    def __init__(self, path: Path, *, data: Path | None = None, image_root: Path | None = None) -> None:
        super().__init__(path, data=data, image_root=image_root)
        self._stream: BinaryIO | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_stream": None}

    @property
    def chunk_limits(self) -> tuple[int, int]:
        """256 KiB to 4 MiB of lines."""
        return 256 << 10, 4 << 20

    def extent(self) -> int:
        """Size of the file in bytes."""
        return self.data.stat().st_size

    def scan(self, start: int, stop: int) -> Iterator[Row]:
        """Lines that begin in bytes [start, stop)."""
        with self.data.open("rb", buffering=1 << 20) as stream:
            offset = start
            if start > 0:
                stream.seek(start - 1)
                offset = start - 1 + len(stream.readline())
            else:
                stream.seek(0)
            while offset < stop and (line := stream.readline()):
                if line.strip():
                    yield Row(offset, len(line), _parse(line))
                offset += len(line)

    def read(self, address: int, size: int) -> Any:
        """The record in bytes [address, address + size)."""
        if self._stream is None:
            self._stream = self.data.open("rb", buffering=0)
        return parsed_or_raise(_parse(os.pread(self._stream.fileno(), size, address)))


def _parse(line: bytes) -> Any:
    try:
        return orjson.loads(line.removeprefix(codecs.BOM_UTF8))
    except orjson.JSONDecodeError as error:
        return RecordError(Reason.BAD_JSON, str(error))
