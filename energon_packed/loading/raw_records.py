"""`plan_in_memory`: raw records are measured and planned at start, and served map-style with a known length.

PackedIterableDataset: raw records, packed on the fly in constant memory.
"""

import hashlib
import logging
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from energon_packed.encoding import EncodedSample, SampleSource
from energon_packed.errors import ConfigError, RecordError, Reject
from energon_packed.loading.batch import PackedBatch
from energon_packed.loading.collator import Collator
from energon_packed.loading.config import DataflowConfig, work_folder
from energon_packed.loading.dataflow.loader import DataflowLoader, Position
from energon_packed.loading.distributors.datasets import MapDistributor
from energon_packed.loading.distributors.records import RecordDistributor
from energon_packed.loading.failures import FailureLog
from energon_packed.loading.features import hf_dataset
from energon_packed.loading.packers.base import Sizes
from energon_packed.loading.ranks import check_not_resharded, refuse_dispatch, resolve_rank
from energon_packed.packing.balance import RowSizes
from energon_packed.pipeline.encoders import EncoderLoader, prepare_workers
from energon_packed.pipeline.engine import LocalEngine, Progress
from energon_packed.pipeline.measure import MeasureStage
from energon_packed.pipeline.plan import plan_rejects
from energon_packed.pipeline.reader import RecordReader, open_reader
from energon_packed.pipeline.rejects import RejectReport, warning_of
from energon_packed.pipeline.run_state import compute_fingerprints, digest
from energon_packed.pipeline.table import RecordRefs
from energon_packed.records import Conversation

Int64 = npt.NDArray[np.int64]
_log = logging.getLogger(__name__)


class PlannedDataset(torch.utils.data.Dataset[list[EncodedSample]]):
    """Row i of a plan, encoded when it is read: for samplers, epochs and stock trainers, as PackedDataset.

    Attributes:
        lengths: int64 (P,), tokens of each row.
        rejects: records that are in no row: `counts` by reason, and the first 1,000 `rows`.
        seq_len: tokens that fit in a row.
    """

    def __init__(
        self,
        reader: RecordReader,
        encoder: EncoderLoader,
        refs: RecordRefs,
        groups: list[Int64],
        **facts: Any,
    ) -> None:
        """Use `plan_in_memory`.

        Args:
            reader, encoder: as the records were measured with.
            refs: where the packed records are.
            groups: numbers of the records in each row.
            facts: `rejects`; `seq_len`; `truncate`, tokens that longer samples are truncated to, or None; and the
                `fingerprint` of what is read.
        """
        self.rejects: RejectReport = facts["rejects"]
        self._truncate: int | None = facts["truncate"]
        self.seq_len: int = facts["seq_len"]
        self._fingerprint: str = facts["fingerprint"]
        self._reader, self._encoder, self._refs = reader, encoder, refs
        self._groups = np.concatenate(groups) if groups else np.zeros(0, dtype=np.int64)
        self._offsets = np.cumsum([0, *map(len, groups)])
        self.lengths = np.array([int(refs.length[group].sum()) for group in groups], dtype=np.int64)
        squares = [int((refs.length[group].astype(np.int64) ** 2).sum()) for group in groups]
        self._squares = np.array(squares, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def utilization(self) -> float:
        """Tokens divided by the capacity of all rows, 0 to 1."""
        return float(self.lengths.sum() / (len(self) * self.seq_len)) if len(self) else 1.0

    def row_sizes(self) -> RowSizes:
        """What decides the cost of each row; patches count as the tokens that they become."""
        return RowSizes(tokens=self.lengths, squares=self._squares, patches=np.zeros(len(self), dtype=np.int64))

    def fingerprint(self) -> str:
        """Of data, encoder and plan, for loader states; the same for a copy of the data elsewhere."""
        content = hashlib.sha256(self._fingerprint.encode())
        for part in (self._groups, self._offsets, self._refs.source, self._refs.address, self._refs.length):
            content.update(np.asarray(part, dtype=np.int64).tobytes())
        return content.hexdigest()[:16]

    def ids(self, index: int) -> list[str | None]:
        """Names of the samples of one row, without encoding them."""
        return [talk.id for talk, _ in self._read(index)]

    def to_hf(self) -> Any:
        """The rows as a `datasets.Dataset`, for trainers that take nothing else; see `hf_dataset`."""
        return hf_dataset(self)

    def __getitem__(self, index: int) -> list[EncodedSample]:
        """The encoded samples of one row; negative numbers count from the end.

        Raises:
            IndexError: there is no such row.
            RecordError: a record was changed since it was measured.
        """
        read = self._read(index)
        found = []
        encoded = self._encoder.load().encode_many([talk for talk, _ in read])
        for one, (_, row) in zip(encoded, read, strict=True):
            if isinstance(one, Reject):
                raise RecordError.of(one)
            one = one if self._truncate is None else one.truncated(self._truncate)
            if len(one) != self._refs.length[row]:
                raise ConfigError(
                    f"sample {one.id} has {len(one)} tokens and was measured with {self._refs.length[row]}: its file "
                    "changed after planning; plan again"
                )
            path = self._reader.sources[int(self._refs.source[row])].path
            found.append(one.of(SampleSource(str(path), {})))
        return found

    def _read(self, index: int) -> list[tuple[Conversation, int]]:
        """(conversation, number of the record) of the samples of one row."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} is not among the {len(self)} rows")
        index %= len(self)
        refs, read = self._refs, []
        for row in self._groups[self._offsets[index] : self._offsets[index + 1]].tolist():
            number = int(refs.source[row])
            talk = self._reader.read(number, int(refs.address[row]), int(refs.size[row]))
            if talk.id is None:
                talk = replace(talk, id=self._reader.default_id(number, int(refs.row[row])))
            read.append((talk, row))
        return read


def plan_in_memory(config: DataflowConfig, progress: Progress | None = None) -> PlannedDataset:
    """Measure all records of a config, plan the rows, and serve them map-style.

        dataset = plan_in_memory(config)
        loader = DataflowLoader(MapDistributor(dataset), num_workers=4)

    Every rank that calls it measures; with a shared `work_dir`, what one has measured is reused.

    Args:
        config: what is read, and how it is packed.
        progress: notified of measuring.

    Raises:
        ConfigError, SourceError: as `pack`; `max_patches`, which lengths do not tell.
        RejectLimitError: no record can be packed, or more are rejected than `strict`, `overlong`, `max_failures` or
            `max_reject_rate` allow.
    """
    if config.max_patches is not None:
        raise ConfigError("`max_patches` needs the images of a record, which planning does not read; use `max_images`")
    folder = work_folder(config)
    reader = open_reader(config, folder)
    config.check_format(reader)
    keys = compute_fingerprints(config, reader.sources, None)
    with closing(LocalEngine(config.processes)) as engine:
        table = MeasureStage(
            options=config,
            reader=reader,
            folder=folder / "measure" / keys.measure[:16],
            engine=engine,
            keep_tokens=False,
            progress=progress or Progress(),
            strict=config.strict,
        ).run()
        rejects, _ = plan_rejects(table, config, reader, engine, max_images=config.max_images)
    rejects.check(config.limits)
    report, usable = rejects.report(), np.flatnonzero(rejects.status == 0)
    if line := warning_of(report.counts, len(table), "`rejects.rows` of the dataset"):
        _log.warning("%s", line)
    refs = table.refs(usable)
    if config.truncate is not None:
        refs = replace(refs, length=np.minimum(refs.length, config.truncate))
    lengths = refs.length.astype(np.int64)
    sizes = Sizes(lengths, table.num_images[usable].astype(np.int64), np.zeros_like(lengths))
    groups = config.packer().groups(sizes)
    order = np.random.default_rng(config.seed).permutation(len(groups)) if config.shuffle else range(len(groups))
    groups = [groups[number] for number in order]
    read = digest(keys.input, keys.encoder, config.reader_fingerprint())
    facts = {"rejects": report, "seq_len": config.row_length, "truncate": config.truncate, "fingerprint": read}
    return PlannedDataset(reader, config.encoder_loader, refs, groups, **facts)


class PackedIterableDataset(torch.utils.data.IterableDataset[PackedBatch]):
    """Streams the records of a config, and yields a PackedBatch for each row; every iteration is one epoch.

        for batch in PackedIterableDataset(DataflowConfig.from_yaml("pack.yaml"), num_workers=4):
            ...

    Records are read in ranges, sharded over ranks and workers; memory does not grow with the data. It has worker
    processes of its own: iterate it directly.

    Args:
        config: what is read, and how it is packed.
        rank, world_size: data-parallel place; by default from torch.distributed.
        num_workers: worker processes.
        collator: makes the batch; by default PaddingFreeCollator.
        options: other options of `DataflowLoader`, such as `order_log`.

    Raises:
        ConfigError, SourceError: as `pack`.
    """

    def __init__(
        self,
        config: DataflowConfig,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        num_workers: int = 0,
        collator: Collator | None = None,
        **options: Any,
    ) -> None:
        reader = open_reader(config, work_folder(config))
        config.check_format(reader)
        self.config = config
        self._place = (rank, world_size)
        prepare_workers(config.encoder_loader, sum(len(source.chunks()) for source in reader.sources))
        fingerprint = compute_fingerprints(config, reader.sources, None).input
        self.loader = DataflowLoader(
            RecordDistributor(reader, shuffle=config.shuffle, fingerprint=fingerprint),
            config.encoder_loader.load(),
            config.packer(),
            collator,
            num_workers=num_workers,
            rank=rank,
            world_size=world_size,
            **{"seed": config.seed, "max_failures": config.max_failures} | options,
        )
        self.loader.failures.limits = config.limits

    def __iter__(self) -> Iterator[PackedBatch]:
        """The rest of the current epoch; after its last batch, the next epoch.

        Raises:
            RejectLimitError: more records are rejected than `strict`, `overlong`, `max_failures` or `max_reject_rate`
                allow.
            ConfigError: it is read in a worker process of another loader, or accelerate splits or dispatches it again.
        """
        refuse_dispatch()
        check_not_resharded(resolve_rank(*self._place)[1])
        if torch.utils.data.get_worker_info() is not None:
            raise ConfigError(
                "a PackedIterableDataset is read in a worker process of a DataLoader, and each worker would read "
                "everything: iterate it directly, and set its own `num_workers`"
            )
        return iter(self.loader)

    def rest_of_epoch(self) -> Iterator[PackedBatch]:
        """As `DataflowLoader.rest_of_epoch`."""
        return self.loader.rest_of_epoch()

    @property
    def failures(self) -> FailureLog:
        """Records of the current epoch that were rejected: `counts` by reason, and the first `rows`."""
        return self.loader.failures

    @property
    def place(self) -> tuple[int, int]:
        """(rank, world size) of this process."""
        return self.loader.place

    def position(self) -> Position:
        """As `DataflowLoader.position`."""
        return self.loader.position()

    def state_dict(self, position: Position | None = None) -> dict[str, Any]:
        """As `DataflowLoader.state_dict`."""
        return self.loader.state_dict(position)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As `DataflowLoader.load_state_dict`."""
        self.loader.load_state_dict(state)


def get_raw_loader(
    config: DataflowConfig,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    num_workers: int = 0,
    collator: Collator | None = None,
    **options: Any,
) -> DataflowLoader:
    """Raw records as batches of one row each, the same way from either form.

        loader = get_raw_loader(DataflowConfig.from_yaml("train.yaml"), num_workers=4)

    With `streaming: true` it is the loader of a `PackedIterableDataset`; with `streaming: false`, a
    `MapDistributor` over `plan_in_memory`, whose length is known. Its `failures` has the counts and rows of the
    rejected records in both forms.

    Args:
        config: what is read, and how it is packed.
        rank, world_size: data-parallel place; by default from torch.distributed.
        num_workers: worker processes.
        collator: makes the batch; by default PaddingFreeCollator.
        options: other options of `DataflowLoader`, such as `order_log`; `seed` and `max_failures` are of the config.

    Raises:
        ConfigError, SourceError, RejectLimitError: as those two.
    """
    place: dict[str, Any] = {"rank": rank, "world_size": world_size, "num_workers": num_workers}
    if config.streaming:
        return PackedIterableDataset(config, collator=collator, **place, **options).loader
    dataset = plan_in_memory(config)
    given = {"seed": config.seed, "max_failures": config.max_failures} | options
    items = MapDistributor(dataset, shuffle=config.shuffle)
    loader = DataflowLoader(items, collator=collator, **place, **given)
    loader.failures.planned = dataset.rejects
    return loader
