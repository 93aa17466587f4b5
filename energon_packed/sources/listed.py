"""ListedSource: a format whose records come from several files in; a line per record in a converted copy out.

The copy is named after its content, which is also the fingerprint: no single file of the input decides the records.
"""

import hashlib
import json
from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from energon_packed.errors import Reason, Reject, SourceError
from energon_packed.sources.base import SourceRecord
from energon_packed.sources.convert import converted
from energon_packed.sources.json import ELEMENTS, JsonlSource


class ListedSource(JsonlSource):
    """Base class of formats whose records come from several files; a subclass implements `records`."""

    @classmethod
    @abstractmethod
    def records(cls, path: Path) -> Iterator[dict[str, Any]]:
        """Yield the records of an input; a record with a `fault`, (reason, detail), is rejected.

        Raises:
            SourceError: the input cannot be read.
        """

    @classmethod
    def _readable(cls, path: Path, work_dir: Path) -> Path:
        """Write a line per record to a copy."""
        digest = hashlib.sha256()
        for line in cls._lines_of(path):
            digest.update(line)

        def convert(source: Path, out: BinaryIO) -> None:
            out.writelines(cls._lines_of(source))

        return converted(path, work_dir, ELEMENTS, convert, name=digest.hexdigest())

    @classmethod
    def _lines_of(cls, path: Path) -> Iterator[bytes]:
        for record in cls.records(path):
            try:
                yield json.dumps(record, ensure_ascii=False).encode() + b"\n"
            except UnicodeEncodeError as error:
                name = record["id"]
                raise SourceError(
                    f"{path} has the file name {name!r}, which is not UTF-8. Rename the file."
                ) from error

    def fingerprint(self) -> str:
        """Digest of all records."""
        return self.data.name.removesuffix(ELEMENTS)

    def row(self, entry: tuple[int, bytes]) -> SourceRecord:
        """Parse a line; a record with a fault is rejected."""
        row = super().row(entry)
        fault = row.record.get("fault")
        return row if fault is None else row._replace(record=None, reject=Reject(Reason(fault[0]), fault[1]))
