"""Converted copies: a file without random access in, a JSONL or Arrow copy with random access out, written once.

The copy is named after the content of the input, so an unchanged input is not converted again.
"""

import io
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa

from energon_packed.errors import EnergonPackedError, ResourceError, SourceError
from energon_packed.files import atomic_path, open_regular
from energon_packed.libraries import calls
from energon_packed.records.fields import shown
from energon_packed.sources.base import changed_at, file_fingerprint
from energon_packed.storage import is_remote
from energon_packed.system import raise_resource_error

BATCH_ROWS = 256  # small, because a random read loads a whole batch
_COPY_BLOCK = 8 << 20
_ARROW_ERRORS = (pa.ArrowException, OSError, ValueError, OverflowError, LookupError)  # for damaged files


def converted(
    path: Path, folder: Path, suffix: str, convert: Callable[[Path, BinaryIO], None], *, name: str | None = None
) -> Path:
    """Return the converted copy of `path` in `folder`; make it if it does not exist yet.

    Args:
        path: the input.
        folder: folder of the copies.
        suffix: file extension of the copy.
        convert: function that writes the copy.
        name: name of the copy; by default, derived from the content and the time of the last change.

    Raises:
        SourceError: the input cannot be read.
    """
    # The time of change is part of the name, because the fingerprint reads only samples of a large file.
    target = folder / f"{name or f'{file_fingerprint(path)[:16]}-{changed_at(path)}'}{suffix}"
    if target.exists():
        return target
    with atomic_path(target) as temporary:
        copy = _Copy(temporary)
        try:
            with copy:
                convert(path, copy)
        except (SourceError, ResourceError) as error:
            # Converters turn every OSError into an error about the input, also a failed write of the copy.
            if copy.failed is None:
                raise
            raise copy.failed from error
    return target


def local_copy(path: Path, folder: Path) -> Path:
    """Return a file for random access without requests: the input itself, or a copy in `folder` of an object.

    Raises:
        StorageError: the object cannot be read.
    """
    return converted(path, folder, path.suffix.lower(), _copy) if is_remote(path) else path


def _copy(path: Path, out: BinaryIO) -> None:
    with open_regular(path) as stream:
        shutil.copyfileobj(stream, out, _COPY_BLOCK)


class _Copy(io.BufferedWriter):
    """A file that remembers a failed write, so that a full disk is not reported as a damaged input."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "wb"), 1 << 20)
        self.failed: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.failed = error
            raise


@contextmanager
def arrow_errors(path: Path, fault: str, remedy: str = "") -> Iterator[None]:
    """Convert the exceptions of pyarrow in the block.

    Args:
        path: the file that is read.
        fault: message after the path; the message of pyarrow follows, and then the remedy.
        remedy: end of the message.

    Raises:
        SourceError: the file is damaged.
        ResourceError: memory, open files or the disk fail.
    """
    with calls("pyarrow"):
        try:
            yield
        except EnergonPackedError:
            raise
        except _ARROW_ERRORS as error:
            raise_resource_error(error, path)
            raise SourceError(f"{path} {fault}: {one_line(error).rstrip('.')}{remedy}") from error


def one_line(error: Exception) -> str:
    """Shorten the message of another library to a single line; the type of the error if the message is empty."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def not_utf8(byte: int) -> str:
    """Describe a byte that is not UTF-8, with the remedy."""
    return (
        f"the byte 0x{byte:02x} is not UTF-8 text; if the file is Latin-1 or Windows-1252, convert it: "
        "iconv -f WINDOWS-1252 -t UTF-8 FILE"
    )


def refuse_repeated(names: Sequence[str], path: Path) -> None:
    """Refuse a table with two columns of the same name: a record has one value per name, so the others would be lost.

    Args:
        names: names of all columns.
        path: the input, for the message.

    Raises:
        SourceError: a name occurs twice.
    """
    if len(set(names)) < len(names):
        name, count = Counter(names).most_common(1)[0]
        raise SourceError(
            f"{path}: column names must be unique, got {count} columns {shown(name)}. Rename or remove all but one."
        )


def write_batches(schema: Any, batches: Iterator[Any], out: BinaryIO, path: Path) -> None:
    """Write an Arrow IPC file of record batches of at most `BATCH_ROWS` rows; `path` is the input.

    Raises:
        SourceError: two columns have the same name.
    """
    refuse_repeated(schema.names, path)  # before the rows are copied, which can be slow
    with pa.ipc.new_file(out, schema) as writer:
        for batch in batches:
            for start in range(0, batch.num_rows, BATCH_ROWS):
                writer.write_batch(batch.slice(start, BATCH_ROWS))


def nested_type(kind: Any, replaced: Callable[[Any], Any]) -> Any:
    """Replace each type t inside an Arrow type by `replaced(t)`, also in lists and structs."""
    if pa.types.is_struct(kind):
        inner = map(kind.field, range(kind.num_fields))
        return pa.struct([field.with_type(nested_type(field.type, replaced)) for field in inner])
    if pa.types.is_large_list(kind):
        return pa.large_list(kind.value_field.with_type(nested_type(kind.value_type, replaced)))
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(nested_type(kind.value_type, replaced)))
    return replaced(kind)
