"""RecordDistributor: the records of every source that `pack` reads, as conversations, in constant memory."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from energon_packed.encoding import SampleSource
from energon_packed.errors import RecordError
from energon_packed.loading.distributors.base import Distributor, Item
from energon_packed.loading.process import RecordAt, WithSource
from energon_packed.loading.ranks import ShardSpec, shuffled
from energon_packed.pipeline.reader import RecordReader, raw_id
from energon_packed.shards.reader import OpenedFiles
from energon_packed.sources import Source, SourceRecord

_PARTS_PER_SHARE = 4


class RecordDistributor(Distributor):
    """Deals chunks of the sources (ranges of bytes or rows) to shares, and reads the records of each in order.

    Args:
        reader: of the sources, as every stage of `pack` uses it.
        shuffle: chunks in a new seeded order every epoch, and the records of each chunk too; one chunk is held in
            memory, of at most `chunk_limits` of its source (4 MiB of JSONL, 512 rows of Parquet).
        fingerprint: of what is read, for loader states.

    Raises:
        DataChangedError: while it is read, an input was replaced, changed or removed.
    """

    read_ahead = 256

    def __init__(self, reader: RecordReader, *, shuffle: bool = True, fingerprint: str = "") -> None:
        self.reader = reader
        self.readers = (reader,)
        self.shuffle = shuffle
        self.fingerprint = fingerprint
        self._opened = OpenedFiles(source.data for source in reader.sources if source.data.is_file())
        self._sample_sources = [SampleSource(str(source.path), {}) for source in reader.sources]

    def items(self, share: ShardSpec, start: Any) -> Iterator[Item]:
        """Conversations; a cursor is [place of the chunk, rows used of it, number]."""
        self._opened.check_all()
        place, used, number = start or (0, 0, 0)
        mine = self._mine(share)
        for at in range(place, len(mine)):
            part, (source, first, stop) = mine[at]
            begin = used if at == place else 0
            rows = islice(self._rows(share, part, source, first, stop), begin, None)
            for after, row in enumerate(rows, begin + 1):
                key, cursor = [source, row.address, row.size], [at, after, number + 1]
                yield Item(number, self._value(source, row), key, cursor)
                number += 1

    def read_many(self, share: ShardSpec, keys: Sequence[Any]) -> list[Any]:
        """By source and address."""
        for source in {source for source, _, _ in keys}:
            self._check_unchanged(self.reader.sources[source])
        return [self._value(source, self.reader.sources[source].read(address, size)) for source, address, size in keys]

    def identity(self) -> dict[str, Any]:
        """Fingerprint of the data, and the order."""
        return super().identity() | {"content": self.fingerprint, "shuffle": self.shuffle}

    def _value(self, source: int, row: SourceRecord) -> WithSource:
        of = self._sample_sources[source]
        try:
            talk = self.reader.conversation(source, row)
        except RecordError as error:
            return WithSource(error.reject, of, RecordAt(source, row.address, raw_id(row.record)))
        if talk.id is None:
            talk = replace(talk, id=self.reader.default_id(source, row.address))
        return WithSource(talk, of, RecordAt(source, row.address, talk.id))

    def _mine(self, share: ShardSpec) -> list[tuple[int, tuple[int, int, int]]]:
        """(number, (source, start, stop)) of every chunk of a share, in order."""
        parts = self._parts(share.count)
        order = shuffled(len(parts), share, shuffle=self.shuffle)[share.index :: share.count]
        return [(int(number), parts[number]) for number in order]

    def _parts(self, shares: int) -> list[tuple[int, int, int]]:
        """Chunks of all sources, divided further where there are few for so many shares."""
        chunks = [(n, *edges) for n, source in enumerate(self.reader.sources) for edges in source.chunks()]
        pieces = -(-_PARTS_PER_SHARE * shares // max(1, len(chunks)))
        return [
            (source, start + (stop - start) * piece // pieces, start + (stop - start) * (piece + 1) // pieces)
            for source, start, stop in chunks
            for piece in range(pieces)
        ]

    def _rows(self, share: ShardSpec, part: int, source: int, start: int, stop: int) -> Iterator[SourceRecord]:
        """Rows of a chunk; its file is looked at before and after, as one that is cut just has fewer rows."""
        of = self.reader.sources[source]
        self._check_unchanged(of)
        if not self.shuffle:
            yield from of.scan(start, stop)
            self._check_unchanged(of)
            return
        held = of.held(start, stop)
        self._check_unchanged(of)
        for place in shuffled(len(held), share, part, 1).tolist():
            yield of.row(held[place])

    def _check_unchanged(self, source: Source) -> None:
        """Refuse an input that is not the one of before.

        Raises:
            DataChangedError: it was replaced, changed or removed.
        """
        if source.data in self._opened:
            self._opened.check(source.data)
