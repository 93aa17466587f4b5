"""Index files of a dataset. Input: `ShardRows` of tars. Output: two indexes, equal to the files of `energon prepare`.

    {shard}.tar.idx         uint64 little-endian: offset of each sample, then the end of the last sample
    .nv-meta/index.sqlite   tables `samples` and `sample_parts` over all shards, or over single members of other tars

Source of the format: `TarIndexWriter` and `SqliteIndexWriter` of megatron-energon 7; tests compare with them.
"""

import contextlib
import errno
import os
import shutil
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile

import numpy as np

from energon_packed.files import atomic_path, atomic_write, open_regular
from energon_packed.shards.tar import ShardRows
from energon_packed.storage import READ_AHEAD, RemotePath

_TABLES = """
CREATE TABLE samples (
    tar_file_id INTEGER NOT NULL,
    sample_key TEXT NOT NULL UNIQUE,
    sample_index INTEGER NOT NULL,
    byte_offset INTEGER,
    byte_size INTEGER
);
CREATE TABLE sample_parts (
    tar_file_id INTEGER,
    sample_index INTEGER,
    part_name TEXT,
    content_byte_offset INTEGER,
    content_byte_size INTEGER
);
"""
_INDEXES = """
CREATE INDEX idx_samples_by_tar_and_idx ON samples(tar_file_id, sample_index);
CREATE INDEX idx_sample_parts_seq ON sample_parts(tar_file_id, sample_index, content_byte_offset);
CREATE INDEX idx_sample_parts_full
    ON sample_parts(tar_file_id, sample_index, part_name, content_byte_offset, content_byte_size);
"""


def open_sqlite_index(path: Path) -> sqlite3.Connection:
    """Open an untrusted `index.sqlite` for reading; its schema cannot run code.

    Raises:
        sqlite3.Error: it is not a database, or `samples` or `sample_parts` is a view or other code, not a table.
    """
    with contextlib.ExitStack() as stack:
        if isinstance(path, RemotePath):  # SQLite reads files: its connection keeps the deleted copy open
            copy = stack.enter_context(NamedTemporaryFile(suffix=path.suffix))
            with open_regular(path) as stream:
                shutil.copyfileobj(stream, copy, READ_AHEAD)
            copy.flush()
            path = Path(copy.name)
        return _opened_index(path)


def _opened_index(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
    try:
        database.execute("PRAGMA trusted_schema = OFF")
        query = "SELECT count(*) FROM sqlite_master WHERE name IN ('samples', 'sample_parts') AND type != 'table'"
        if database.execute(query).fetchone() != (0,):
            raise sqlite3.DatabaseError("its tables are views")
    except sqlite3.Error:
        database.close()
        raise
    return database


def write_tar_index(tar: Path, rows: ShardRows) -> None:
    """Write `{shard}.tar.idx` next to the shard."""
    atomic_write(tar.with_suffix(".tar.idx"), np.array(rows.offsets, dtype="<u8").tobytes())


def write_sqlite_index(path: Path, shards: Iterable[ShardRows], staging: Path | None = None) -> None:
    """Write `index.sqlite` for the shards; `tar_file_id` is their position. `staging` as in `atomic_path`.

    Raises:
        OSError: the disk is full, or fails.
    """
    with _new_index(path, staging) as database:
        for shard, rows in enumerate(shards):
            sizes = np.diff(rows.offsets).tolist()
            database.executemany(
                "INSERT INTO samples VALUES (?, ?, ?, ?, ?)",
                (
                    (shard, key, sample, offset, size)
                    for sample, (key, offset, size) in enumerate(zip(rows.keys, rows.offsets, sizes, strict=False))
                ),
            )
            database.executemany(
                "INSERT INTO sample_parts VALUES (?, ?, ?, ?, ?)", ((shard, *part) for part in rows.parts)
            )


def write_member_index(path: Path, members: Iterable[tuple[int, str, str, int, int]]) -> None:
    """Write `index.sqlite` for members of tars, each a sample with one part; repeated members are ignored.

    Args:
        path: the file.
        members: `tar_file_id`, key, part, offset and size of each.

    Raises:
        OSError: the disk is full, or fails.
    """
    with _new_index(path) as database:
        for tar, key, part, offset, size in members:
            # A tar has one member at an offset, so the offset is also a unique `sample_index`.
            added = database.execute(
                "INSERT OR IGNORE INTO samples VALUES (?, ?, ?, ?, ?)", (tar, key, offset, offset, size)
            )
            if added.rowcount:
                database.execute("INSERT INTO sample_parts VALUES (?, ?, ?, ?, ?)", (tar, offset, part, offset, size))


@contextmanager
def _new_index(path: Path, staging: Path | None = None) -> Iterator[sqlite3.Connection]:
    """Yield a database with empty tables, which becomes `path` with its indexes if the block succeeds."""
    with atomic_path(path, staging) as temporary, _os_errors(path):
        temporary.unlink(missing_ok=True)  # of an earlier process with the same PID: its tables would remain
        database = sqlite3.connect(temporary, isolation_level=None)
        try:
            # A crash leaves only the temporary file, so the database needs no journal; `atomic_path` syncs it.
            database.executescript("PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF;" + _TABLES)
            database.execute("BEGIN")
            yield database
            database.execute("COMMIT")
            database.executescript(_INDEXES)  # after the rows: sorting once is faster than an update per row
        finally:
            database.close()


@contextmanager
def _os_errors(path: Path) -> Iterator[None]:
    """Convert errors of SQLite to OSError: the statements are fixed, so only the disk can fail."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        is_full = error.sqlite_errorcode == sqlite3.SQLITE_FULL
        number, text = (errno.ENOSPC, os.strerror(errno.ENOSPC)) if is_full else (errno.EIO, f"SQLite: {error}")
        raise OSError(number, text, str(path)) from error
