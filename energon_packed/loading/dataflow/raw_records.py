"""Raw records while training: a DataflowConfig in, rows of EncodedSamples or PackedBatches out; no shards on disk.

| function | reads | memory | length |
|---|---|---|---|
| `plan_in_memory` | all records at start, to measure them; then each row at random | 100 bytes per record | known |
| `PackedIterableDataset` | records in ranges, packed on the fly | constant | unknown |
| `get_raw_loader` | one of both, as `config.streaming` says | | |
"""

import hashlib
import logging
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any, SupportsIndex, Unpack

import numpy as np
import torch

from energon_packed.encoding import EncodedSample, SampleSource
from energon_packed.encoding.fragments import fragment_id, fragment_of
from energon_packed.errors import ConfigError, RecordError, Reject
from energon_packed.keywords import LoaderKeywords
from energon_packed.loading.collation.batch import PackedBatch
from energon_packed.loading.collation.collator import Collator
from energon_packed.loading.collation.features import hf_dataset
from energon_packed.loading.costs.model import RowSizes
from energon_packed.loading.dataflow.config import DataflowConfig, work_folder
from energon_packed.loading.dataflow.loader import DataflowLoader
from energon_packed.loading.distributors.datasets import MapDistributor
from energon_packed.loading.distributors.records import RecordDistributor
from energon_packed.loading.packers.base import Sizes
from energon_packed.loading.resharding import refuse_dispatch
from energon_packed.options import check_type
from energon_packed.packing.balance import Int64
from energon_packed.pipeline.encoders import EncoderLoader, prepare_workers
from energon_packed.pipeline.engine import LocalEngine, Progress
from energon_packed.pipeline.measured.table import RecordRefs
from energon_packed.pipeline.output.run_state import compute_fingerprints, digest
from energon_packed.pipeline.reader import RecordReader, open_reader
from energon_packed.pipeline.rejects import RejectReport, warning_of
from energon_packed.pipeline.stages.measure import MeasureStage
from energon_packed.pipeline.stages.plan import plan_rejects
from energon_packed.records import Conversation
from energon_packed.records.groups import group_key
from energon_packed.records.media.reference import urls_of
from energon_packed.seqlens import round_up
from energon_packed.storage import request_objects

_log = logging.getLogger(__name__)
_KEPT_BYTES = 1 << 26  # of encoded documents; the last document is kept whatever its size


class PlannedDataset(torch.utils.data.Dataset[list[EncodedSample]]):
    """Map-style dataset returned by `plan_in_memory`: `dataset[i]` returns the EncodedSamples of row i.

    Records are read and encoded when their row is; long documents are kept for their other fragments, up to 64 MiB of
    them in a process. It works with samplers and stock trainers, as PackedDataset.

    Attributes:
        lengths: int64 (P,), tokens of each row.
        rejects: records that are in no row: `counts` by reason, and the first 1,000 `rows`.
        seq_len: tokens that fit in a row.

    Examples:
        >>> config = DataflowConfig(inputs=[data], tokenizer=tokenizer, seq_len=2048, max_reject_rate=0.1)
        >>> dataset = plan_in_memory(config)
        >>> len(dataset), dataset.rejects.counts["bad_role"], int(dataset.lengths.max())
        (12, 1, 2048)
    """

    def __init__(
        self,
        reader: RecordReader,
        encoder: EncoderLoader,
        refs: RecordRefs,
        groups: list[Int64],
        *,
        rejects: RejectReport,
        seq_len: int,
        truncate: int | None,
        fingerprint: str,
    ) -> None:
        """Wrap a finished plan; call `plan_in_memory` to make one.

        Args:
            reader, encoder: reader and encoder that the records were measured with.
            refs: positions and lengths of the packed records.
            groups: indices into `refs` of the records in each row.
            rejects: records that are in no row.
            seq_len: tokens that fit in a row.
            truncate: tokens that longer samples are truncated to, or None.
            fingerprint: digest of the input, the encoder and the settings of reading.
        """
        self.rejects, self.seq_len = rejects, seq_len
        self._truncate, self._fingerprint = truncate, fingerprint
        self._reader, self._encoder, self._refs = reader, encoder, refs
        self._kept: dict[int, EncodedSample] = {}  # split documents, the last used last
        self._kept_bytes = 0
        # One array and its offsets instead of a list of arrays: forked workers share it, as no reference is counted.
        self._groups = np.concatenate(groups) if groups else np.zeros(0, dtype=np.int64)
        self._offsets = np.cumsum([0, *map(len, groups)])
        self.lengths = np.array([int(refs.length[group].sum()) for group in groups], dtype=np.int64)
        # The cost of attention sums squared lengths of samples, not of the row: samples do not attend to each other.
        squares = [int((refs.length[group].astype(np.int64) ** 2).sum()) for group in groups]
        self._squares = np.array(squares, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def utilization(self) -> float:
        """Tokens divided by the capacity of all rows, 0 to 1."""
        return float(self.lengths.sum() / (len(self) * self.seq_len)) if len(self) else 1.0

    def row_sizes(self) -> RowSizes:
        """Sizes that determine the cost of each row; patches count as the tokens that they become."""
        no_images = np.zeros(len(self), dtype=np.int64)
        return RowSizes(tokens=self.lengths, squares=self._squares, patches=no_images, patch_squares=no_images)

    def fingerprint(self) -> str:
        """Digest of data, encoder and plan, for loader states; equal for a copy of the data in another folder."""
        content = hashlib.sha256(self._fingerprint.encode())
        for column in (self._groups, self._offsets, self._refs.source, self._refs.address, self._refs.length):
            content.update(np.asarray(column, dtype=np.int64).tobytes())
        return content.hexdigest()[:16]

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: all epochs are equal.

        Raises:
            ConfigError: accelerate calls it with `dispatch_batches=True`, which would split rows between ranks.
        """
        refuse_dispatch()

    def ids(self, index: int) -> list[str | None]:
        """Ids of the samples of one row, without encoding them."""
        fragments, records = self._refs.fragments, self._records(index)
        names = [conversation.id for conversation in self.conversations(index)]
        if fragments is None:
            return names
        # `conversations` has the samples of groups, with their ids.
        numbers = [-1 if fragments[record]["member"] else int(fragments[record]["number"]) for record in records]
        return [name if k < 0 else fragment_id(str(name), k) for k, name in zip(numbers, names, strict=True)]

    def conversations(self, index: int) -> list[Conversation]:
        """Records of the samples of one row; of a fragment, its whole document; of a group, its samples."""
        return [self._read(record) for record in self._records(index)]

    def to_hf(self) -> Any:
        """Return the rows as a `datasets.Dataset`, for trainers that accept nothing else; see `hf_dataset`."""
        return hf_dataset(self)

    def __getitem__(self, index: int) -> list[EncodedSample]:
        """Return the encoded samples of one row; negative indices count from the end.

        Raises:
            IndexError: the index is out of range.
            TypeError: the index is not an integer.
            RecordError: a record cannot be encoded, because it changed since it was measured.
            ConfigError: the length of a sample changed since it was measured.
        """
        records, fragments, samples = self._records(index), self._refs.fragments, []
        # A long document has thousands of fragments, so it is not read and encoded again for each.
        documents = [self._document(record) for record in records]
        encoded: dict[int, EncodedSample | Reject] = {key: self._kept[key] for key in documents if key in self._kept}
        missing = {key: record for key, record in zip(documents, records, strict=True) if key not in encoded}
        conversations = [self._read(record) for record in missing.values()]
        request_objects([url for conversation in conversations for url in urls_of(conversation.files)])
        named = dict(zip(missing, conversations, strict=True))
        encoded |= zip(missing, self._encoder.load().encode_many(conversations), strict=True)
        for key, record in zip(documents, records, strict=True):
            sample = encoded[key]
            if isinstance(sample, Reject):
                raise RecordError.of(sample)
            if (own := named.get(key)) is not None:  # a document that was kept has them
                sample = sample.in_group(own.group, own.role, own.label)
            sample = sample if self._truncate is None else sample.truncated(self._truncate)
            if fragments is not None and key >= 0:
                self._keep(key, sample)
                sample = fragment_of(sample, fragments[record])
            # A longer sample would not fit the planned row, so a changed file is an error instead of a longer row.
            if len(sample) != self._refs.length[record]:
                raise ConfigError(
                    f"Sample {sample.id} must have {self._refs.length[record]} tokens, as measured, got "
                    f"{len(sample)}: its file changed after planning. Plan again."
                )
            path = self._reader.sources[int(self._refs.source[record])].path
            samples.append(sample.of(SampleSource(str(path), {})))
        return samples

    def _records(self, index: int) -> list[int]:
        """Indices in `refs` of the samples of one row."""
        if not isinstance(index, SupportsIndex):
            raise TypeError(f"A row index must be an integer, got {index!r}. Pass the index of a single row.")
        if not -len(self) <= index < len(self):
            raise IndexError(f"Row index {index} is out of range for a plan of {len(self)} rows.")
        index %= len(self)
        records: list[int] = self._groups[self._offsets[index] : self._offsets[index + 1]].tolist()
        return records

    def _document(self, record: int) -> int:
        """Key of a record: the same for all fragments of a document, and negative for complete records."""
        fragments = self._refs.fragments
        if fragments is None or fragments[record]["number"] < 0 or fragments[record]["member"]:
            return ~record
        return int(fragments[record]["record"])

    def _keep(self, key: int, document: EncodedSample) -> None:
        """Keep a document for its other fragments, in place of the documents that were not used for the longest."""
        if self._kept.pop(key, None) is None:
            self._kept_bytes += _num_bytes(document)
        self._kept[key] = document
        while self._kept_bytes > _KEPT_BYTES and len(self._kept) > 1:
            self._kept_bytes -= _num_bytes(self._kept.pop(next(iter(self._kept))))

    def _read(self, record: int) -> Conversation:
        """Read a record of `refs`, or a sample of a record that is a group."""
        # By address: a record of a large file is read without the records before it.
        refs, source, row = self._refs, int(self._refs.source[record]), int(self._refs.row[record])
        conversation = self._reader.read(source, int(refs.address[record]), int(refs.size[record]), row)
        if conversation.group is not None:
            return replace(conversation, group=group_key(source, conversation.group))
        if refs.fragments is None or not refs.fragments[record]["member"]:
            return conversation
        number = int(refs.fragments[record]["number"])
        if number >= len(conversation.members):
            raise ConfigError(
                f"Record {conversation.id} must have a sample {number}, as measured, got "
                f"{len(conversation.members)} samples: its file changed after planning. Plan again."
            )
        ident = fragment_id(str(conversation.id), number)
        return replace(conversation.members[number], id=ident, group=group_key(source, row))


def _num_bytes(sample: EncodedSample) -> int:
    """Bytes of the arrays and tensors of a sample."""
    values = [*vars(sample).values(), *(sample.vision_inputs.values.values() if sample.vision_inputs else ())]
    return sum([getattr(value, "nbytes", 0) for value in values])


def plan_in_memory(config: DataflowConfig, progress: Progress | None = None) -> PlannedDataset:
    """Measure all records of a config, plan the rows, and return them as a map-style dataset.

        dataset = plan_in_memory(config)
        loader = DataflowLoader(MapDistributor(dataset), num_workers=4)

    Every rank measures for itself; with a shared `work_dir`, measurements of another rank are reused.

    Args:
        config: the input, and how it is packed.
        progress: receives the progress of measuring.

    Raises:
        ConfigError, SourceError: as `pack`; or `max_patches` is set, which cannot be planned from lengths.
        RejectLimitError: no record can be packed, or more are rejected than `strict`, `overlong`, `max_failures` or
            `max_reject_rate` allow.
    """
    if config.max_patches is not None:
        raise ConfigError(
            f"`max_patches` must be None with `streaming: false`, got {config.max_patches}: planning does not read "
            "images. Use `max_images`."
        )
    folder = work_folder(config)
    reader = open_reader(config, folder)
    config.check_format(reader)
    keys = compute_fingerprints(config, reader.sources, None)
    # The stages of `pack`, without writing: measurements in `work_dir` are shared with other ranks.
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
        if config.max_images is not None and table.num_frames.any():
            vision = config.encoder_loader.load().vision
            if vision is not None and vision.video_token is None:  # the frames are images of the model
                table = replace(table, num_images=table.num_images + table.num_frames)
        rejects, entries = plan_rejects(table, config, reader, engine, max_images=config.max_images)
    rejects.check(config.limits)
    report, usable = rejects.report(), np.flatnonzero(entries.status == 0)
    if line := warning_of(report.counts, len(table), "`rejects.rows` of the dataset"):
        _log.warning("%s", line)
    refs = entries.refs(usable)
    # A longer sample is truncated when it is read, so it is planned with the truncated length.
    if config.truncate is not None:
        refs = replace(refs, length=np.minimum(refs.length, config.truncate))
    lengths = refs.length.astype(np.int64)
    sizes = Sizes(lengths, entries.num_images[usable].astype(np.int64), np.zeros_like(lengths))
    groups = _rows(config, sizes, entries.kind[usable].astype(np.int64), entries.units(), usable)
    # Loaders shuffle each epoch anyway; this mixes the planner's order for samplers that read in order.
    order = np.random.default_rng(config.seed).permutation(len(groups)) if config.shuffle else range(len(groups))
    return PlannedDataset(
        reader,
        config.encoder_loader,
        refs,
        [groups[i] for i in order],
        rejects=report,
        seq_len=config.row_length,
        truncate=config.truncate,
        fingerprint=digest(keys.input, keys.encoder, config.reader_fingerprint()),
    )


def _rows(config: DataflowConfig, sizes: Sizes, kinds: Int64, units: Int64 | None, usable: Int64) -> list[Int64]:
    """Plan the rows of n samples: indices of the samples of each row.

    Args:
        config: has the packer.
        sizes, kinds: of the samples.
        units: key of the group of each entry; None without groups.
        usable: int64 (n,), entries of the samples.

    Raises:
        ConfigError: a maximum of samples in a row is set, and there are groups.
    """
    if units is None:
        return config.packer().groups_of(sizes, kinds)
    if config.max_samples_per_pack is not None:
        raise ConfigError(
            "`max_samples_per_pack` must be None with groups and `streaming: false`, got "
            f"{config.max_samples_per_pack}: a packer counts groups. Pack them with `energon-packed pack`."
        )
    _, first, unit_of = np.unique(units[usable], return_index=True, return_inverse=True)
    joined = [np.zeros(len(first), dtype=np.int64) for _ in range(4)]
    columns = (round_up(sizes.lengths, config.pad_multiple), sizes.images, sizes.patches)
    for column, sums in zip(columns, joined, strict=False):
        np.add.at(sums, unit_of, column)
    np.maximum.at(joined[3], unit_of, kinds)
    members = np.split(np.argsort(unit_of, kind="stable"), np.cumsum(np.bincount(unit_of))[:-1])
    rows = config.packer().groups_of(Sizes(*joined[:3]), joined[3])
    return [np.concatenate([members[unit] for unit in row.tolist()]) for row in rows]


class PackedIterableDataset(DataflowLoader, torch.utils.data.IterableDataset[Any]):
    """DataflowLoader that streams the records of a config as PackedBatches; every iteration is one epoch.

        for batch in PackedIterableDataset(DataflowConfig.from_yaml("pack.yaml"), num_workers=4):
            ...

    Records are read in ranges, sharded over ranks and workers; memory does not grow with the data. It starts its own
    worker processes: iterate it directly, without a DataLoader.

    Args:
        config: the input, and how it is packed.
        collator, batch_size: as for DataflowLoader; the rows of a stream are batches, so it refuses `batch_size`.
        options: the fields of `LoaderOptions`; `seed` and `max_failures` override the config.

    Raises:
        ConfigError, SourceError: as `pack`.

    Examples:
        >>> config = DataflowConfig(inputs=[data], tokenizer=tokenizer, seq_len=2048, max_reject_rate=0.1)
        >>> batch = next(iter(PackedIterableDataset(config)))
        >>> batch.num_tokens <= 2048
        True
    """

    def __init__(
        self,
        config: DataflowConfig,
        *,
        collator: Collator | None = None,
        batch_size: int | None = None,
        **options: Unpack[LoaderKeywords],
    ) -> None:
        reader = open_reader(config, work_folder(config))
        config.check_format(reader)
        # Before the loader forks its workers, which inherit the loaded encoder.
        prepare_workers(config.encoder_loader, sum(len(source.chunks()) for source in reader.sources))
        fingerprint = compute_fingerprints(config, reader.sources, None).input
        super().__init__(
            RecordDistributor(reader, shuffle=config.shuffle, fingerprint=fingerprint),
            config.encoder_loader.load(),
            config.packer(),
            collator,
            batch_size=batch_size,
            **_with_defaults(config, options),
        )
        self.failures.limits = replace(config.limits, max_failures=self._options.max_failures)

    def rest_of_epoch(self) -> Iterator[PackedBatch]:
        """Iterate over the rest of the current epoch, as `DataflowLoader.rest_of_epoch`.

        Raises:
            RejectLimitError: more records are rejected than `strict`, `overlong`, `max_failures` or `max_reject_rate`
                allow.
            ConfigError: as DataflowLoader, or accelerate dispatches the batches.
        """
        refuse_dispatch()
        return super().rest_of_epoch()


def get_raw_loader(
    config: DataflowConfig,
    *,
    collator: Collator | None = None,
    batch_size: int | None = None,
    **options: Unpack[LoaderKeywords],
) -> DataflowLoader:
    """Load raw records: stream them, or measure and plan them in memory, depending on `config.streaming`.

        loader = get_raw_loader(DataflowConfig.from_yaml("train.yaml"), num_workers=4)
        for batch in loader:                            # one epoch of PackedBatch, a row each
            ...

    With `streaming: true` it returns a `PackedIterableDataset`, with `streaming: false` a loader over
    `plan_in_memory(config)`, whose length is known. Rejected records are in `loader.failures` in both cases.

    Args:
        config, collator, batch_size, options: as for `PackedIterableDataset`.

    Raises:
        ConfigError, SourceError, RejectLimitError: as `PackedIterableDataset` and `plan_in_memory`.
    """
    check_type("config", config, DataflowConfig, "Pass DataflowConfig.from_yaml(FILE).")
    if config.streaming:
        return PackedIterableDataset(config, collator=collator, batch_size=batch_size, **options)
    dataset = plan_in_memory(config)
    distributor = MapDistributor(dataset, shuffle=config.shuffle)
    options = _with_defaults(config, options)
    loader = DataflowLoader(distributor, collator=collator, batch_size=batch_size, **options)
    # Planning has rejected its records before the loader exists, so its report is added to the loader's.
    loader.failures.planned = dataset.rejects
    return loader


def _with_defaults(config: DataflowConfig, options: LoaderKeywords) -> LoaderKeywords:
    """Options of a loader, with `seed` and `max_failures` of the config as defaults."""
    return {"seed": config.seed, "max_failures": config.max_failures, **options}
