"""The sources that `pack` reads to conversations, in constant memory: RecordDistributor."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np

from energon_packed.encoding import SampleSource
from energon_packed.errors import RecordError
from energon_packed.loading.distributors.base import Distributor, Item
from energon_packed.loading.permutation import Permutation
from energon_packed.loading.process import RecordAt, WithSource
from energon_packed.loading.ranks import ShardSpec
from energon_packed.pipeline.reader import RecordReader, raw_id
from energon_packed.shards.reader import OpenedFiles
from energon_packed.sources import Source, SourceRecord

# Chunks for each worker, at least: with fewer, workers would end an epoch far apart.
_CHUNKS_PER_SHARD = 4


class RecordDistributor(Distributor):
    """Assign chunks of the sources (ranges of bytes or rows) to workers, and read the records of each chunk in order.

    Args:
        reader: reader of the sources, as in every stage of `pack`.
        shuffle: chunks in a new seeded order every epoch, and the records of each chunk too; one chunk is kept in
            memory, of at most `chunk_limits` of its source (4 MiB of JSONL, 512 rows of Parquet).
        fingerprint: digest of the inputs, for loader states.

    Raises:
        DataChangedError: an input was replaced, changed or removed while it was read.
    """

    read_ahead = 256

    def __init__(self, reader: RecordReader, *, shuffle: bool = True, fingerprint: str = "") -> None:
        self.reader = reader
        self.readers = (reader,)
        self.shuffle = shuffle
        self.fingerprint = fingerprint
        self._opened = OpenedFiles(source.data for source in reader.sources if source.data.is_file())
        self._sample_sources = [SampleSource(str(source.path), {}) for source in reader.sources]

    def items(self, shard: ShardSpec, start: Any) -> Iterator[Item]:
        """Yield conversations; a position is [position of the chunk, its used records, number]."""
        self._opened.check_all()
        place, used, number = start or (0, 0, 0)
        mine = self._mine(shard)
        for at in range(place, len(mine)):
            part, (source, first, stop) = mine[at]
            skipped = used if at == place else 0
            records = islice(self._records(shard, part, source, first, stop), skipped, None)
            for after, record in enumerate(records, skipped + 1):
                key, position = [source, record.address, record.size], [at, after, number + 1]
                yield Item(number, self._value(source, record), key, position)
                number += 1

    def read_many(self, shard: ShardSpec, keys: Sequence[Any]) -> list[Any]:
        """Read records again by source and address."""
        for source in {source for source, _, _ in keys}:
            self._check_unchanged(self.reader.sources[source])
        return [self._value(source, self.reader.sources[source].read(address, size)) for source, address, size in keys]

    def identity(self) -> dict[str, Any]:
        """Return the fingerprint of the inputs, and the order."""
        return super().identity() | {"content": self.fingerprint, "shuffle": self.shuffle}

    def _value(self, source: int, record: SourceRecord) -> WithSource:
        origin = self._sample_sources[source]
        at = RecordAt(origin.dataset, source, record.address, None)
        try:
            conversation = self.reader.conversation(source, record)
        except RecordError as error:
            return WithSource(error.reject, origin, at._replace(id=raw_id(record.record)))
        if conversation.id is None:
            conversation = conversation.named(self.reader.default_id(source, record.address))
        return WithSource(conversation, origin, at._replace(id=conversation.id))

    def _mine(self, shard: ShardSpec) -> list[tuple[int, tuple[int, int, int]]]:
        """Return (index, (source, start, stop)) of every chunk of a shard, in order."""
        parts = self._chunks(shard.num_shards)
        places = np.asarray(shard.shard_indices(len(parts)), dtype=np.int64)
        order = Permutation(len(parts), [shard.seed, shard.epoch])(places) if self.shuffle else places
        return [(index, parts[index]) for index in order.tolist()]

    def _chunks(self, num_shards: int) -> list[tuple[int, int, int]]:
        """Return the chunks of all sources, divided further if there are too few for the workers."""
        chunks = [(n, *edges) for n, source in enumerate(self.reader.sources) for edges in source.chunks()]
        pieces = -(-_CHUNKS_PER_SHARD * num_shards // max(1, len(chunks)))
        return [
            (source, start + (stop - start) * piece // pieces, start + (stop - start) * (piece + 1) // pieces)
            for source, start, stop in chunks
            for piece in range(pieces)
        ]

    def _records(self, shard: ShardSpec, part: int, source: int, start: int, stop: int) -> Iterator[SourceRecord]:
        """Yield the records of a chunk; its file is checked before and after."""
        reader = self.reader.sources[source]
        # A file that was cut after the first check has fewer records and raises nothing, so it is checked again.
        self._check_unchanged(reader)
        if not self.shuffle:
            yield from reader.scan(start, stop)
            self._check_unchanged(reader)
            return
        records = reader.held(start, stop)
        self._check_unchanged(reader)
        # (part, 1): each chunk has another order, also than the chunks.
        for index in Permutation(len(records), [shard.seed, shard.epoch, part, 1])(np.arange(len(records))).tolist():
            yield reader.row(records[index])

    def _check_unchanged(self, source: Source) -> None:
        """Refuse an input that changed since the distributor was created.

        Raises:
            DataChangedError: the input was replaced, changed or removed.
        """
        if source.data in self._opened:
            self._opened.check(source.data)
