"""Encoding: items of a distributor, or packs of any flavor, in; encoded samples, or the error of each item, out.

| item | becomes |
|---|---|
| EncodedSample, EncodedRow, list of EncodedSamples | itself |
| features, `{"input_ids", ...}` | one sample |
| record of a known record format, Conversation | one sample, encoded together with the others |
| pack of a dataset (PackSample), or Packs | its samples |
| Reject, Failure, exception | the error of a record or pack that could not be read |
| anything else | `processor.encode(item)`: any sample, for a custom collator |

A Processor that `reads` any items encodes features and records of no known format, too, and with `raw` all items.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from energon_packed.encoding import EncodedRow, EncodedSample, Processor, SampleSource
from energon_packed.errors import EnergonPackedError, FormatError, Reason, RecordError, Reject
from energon_packed.flavors import PackSample
from energon_packed.formats import StoredSample
from energon_packed.loading.collation.features import from_features, is_features
from energon_packed.records import Conversation, normalize
from energon_packed.records.media.reference import in_line
from energon_packed.records.record_formats import find_record_format

_GROUP = (
    "its samples must share a row, and records that are packed while they are read do not stay together; pack them "
    "with `energon-packed pack`, or set `streaming` to false"
)


def encode_pack(
    pack: PackSample,
    encoder: Processor,
    *,
    check_lengths: bool = True,
    on_failure: Callable[[Exception, Any], None] | None = None,
    source: SampleSource | None = None,
) -> Sequence[EncodedSample]:
    """Encode the samples of a pack, in order.

    Args:
        pack: a pack of any flavor.
        encoder: the encoder that the data was packed with.
        check_lengths: refuse a sample whose length differs from the recorded length.
        on_failure: called with the error and the pack if a sample cannot be encoded; if it returns, that sample is
            skipped and the others stay. None raises.
        source: source of all samples; by default `__sources__` of the pack, as Energon sets it.

    Raises:
        RecordError, FormatError: a sample cannot be encoded, and there is no `on_failure`.
    """
    source = source or _source_of(pack)
    if (row := pack.token_row()) is not None:
        # Stored tokens are used as columns, without an object for each sample.
        try:
            input_ids, labels = row.input_ids.astype(np.int64), row.labels.astype(np.int64)
            encoded_row = encoder.encode_row(row.ids, input_ids, labels, row.cu_seqlens, row.loss_weights)
            encoded_row.columns = row.columns
            encoded_row.sources = [source] * len(encoded_row)
            encoded_row.roles, encoded_row.sample_labels = row.roles, row.sample_labels
            if row.groups is not None:
                encoded_row.groups = [f"{pack.__key__}/{group}" for group in row.groups]
            return encoded_row
        except EnergonPackedError:
            pass  # encode sample by sample below: only the bad sample is skipped, and its error names it
    encoded = []
    failed: dict[str, tuple[str | None, EnergonPackedError]] = {}  # key of a group -> id and error of its bad sample
    samples = pack.stored_samples()
    results = encoder.encode_many([sample.conversation for sample in samples])
    for sample, result in zip(samples, results, strict=True):
        try:
            checked = checked_sample(sample, result, pack.__key__, check_lengths=check_lengths).of(source)
            encoded.append(_in_group(checked, sample.conversation, pack.__key__))
        except EnergonPackedError as error:  # a bad sample is skipped, the rest of its pack is kept
            if on_failure is None:
                raise
            if sample.conversation.group is not None:
                failed[f"{pack.__key__}/{sample.conversation.group}"] = sample.conversation.id, error
            on_failure(error, pack)
    return _whole_groups(encoded, failed, lambda error: on_failure(error, pack)) if failed and on_failure else encoded


def _whole_groups(
    samples: Sequence[EncodedSample],
    failed: Mapping[str, tuple[str | None, EnergonPackedError]],
    on_failure: Callable[[Exception], None],
) -> list[EncodedSample]:
    """Leave out the samples of groups with a bad sample, and report each of them with the error of that sample."""
    whole = []
    for sample in samples:
        if sample.group is None or sample.group not in failed:
            whole.append(sample)
            continue
        ident, error = failed[sample.group]
        detail = in_line(f"sample {sample.id} is left out, as sample {ident} of its group cannot be used")
        on_failure(RecordError(error.reason, detail) if isinstance(error, RecordError) else FormatError(detail))
    return whole


def _in_group(sample: EncodedSample, conversation: Conversation, key: str) -> EncodedSample:
    """Return a sample of a pack with the group, role and label of its conversation."""
    group = None if conversation.group is None else f"{key}/{conversation.group}"
    return sample.in_group(group, conversation.role, conversation.label)


def _source_of(pack: PackSample) -> SampleSource | None:
    infos = pack.__sources__
    return SampleSource(str(infos[0].dataset_path), dict(pack.__subflavors__ or {})) if infos else None


def checked_sample(
    stored: StoredSample, result: EncodedSample | Reject, key: str, *, check_lengths: bool = True
) -> EncodedSample:
    """Check the encoded sample of a stored sample, and truncate it as it was packed.

    Args:
        stored: the sample in its pack.
        result: the result of encoding it.
        key: key of the pack, for messages.
        check_lengths: compare the length with the recorded length.

    Raises:
        RecordError: the sample cannot be encoded.
        FormatError: its length differs from the recorded length.
    """
    if isinstance(result, Reject):
        # Ids may have line breaks, and workers send an error as its last line.
        raise RecordError(result.reason, in_line(f"sample {stored.conversation.id} of pack {key}: {result.detail}"))
    sample = result if stored.truncate is None else result.truncated(stored.truncate)
    if check_lengths and stored.length is not None and len(sample) != stored.length:
        raise FormatError(
            f"sample {sample.id} of pack {key} has {len(sample)} tokens, but {stored.length} were recorded: use the "
            "tokenizer, chat template and image settings that it was packed with (see packing.json)"
        )
    return sample


class RecordAt(NamedTuple):
    """The position of a record in the input; the reject report computes its row number only when it is read.

    Attributes:
        path: path of its file.
        source: index of the source in its reader.
        address: address of the record in the source.
        id: id of the record, or None.
    """

    path: str
    source: int
    address: int
    id: str | None


class PackAt(NamedTuple):
    """The place of a pack, for messages.

    Attributes:
        key: of the pack, or the name of an item that is not a pack.
        tars: paths of its tars, joined; "" if they are not known.
    """

    key: str
    tars: str = ""

    @classmethod
    def of(cls, key: object, sources: Iterable[Any] | None) -> "PackAt":
        """Return the place of a sample of Energon with this `__key__` and these `__sources__`."""
        return cls(
            str(key), ", ".join(sorted({f"{source.dataset_path}/{source.shard_name}" for source in sources or ()}))
        )


class Packs(tuple[PackSample, ...]):
    """An item that is a row of several packs, which the distributor chose."""

    __slots__ = ()


class WithSource(NamedTuple):
    """An item with the dataset that it comes from.

    Attributes:
        value: a conversation, or a Reject.
        source: the dataset.
        at: position of the record.
    """

    value: Any
    source: SampleSource
    at: RecordAt


class Failure(NamedTuple):
    """A sample that cannot be used.

    Attributes:
        error: the reason.
        pack: place of the pack that contains it; without a key if it is the item.
        record: position of its record, if it comes from an input file.
    """

    error: Exception
    pack: PackAt = PackAt("")
    record: RecordAt | None = None


class Encoded(NamedTuple):
    """Result of encoding an item.

    Attributes:
        samples: its samples; samples of other types are for custom collators.
        failures: its samples that cannot be used.
    """

    samples: Sequence[EncodedSample] = ()
    failures: Sequence[Failure] = ()

    @classmethod
    def failed(cls, error: Exception) -> "Encoded":
        """Result of an item that cannot be used."""
        return cls((), (Failure(error),))


def encode_items(values: Sequence[Any], processor: Processor, *, check_lengths: bool = True) -> list[Encoded]:
    """Encode items.

    Args:
        values: items of distributors, as in the table of this module, each perhaps in a WithSource.
        processor: encodes the conversations of all items together.
        check_lengths: a sample of a pack whose length differs from the recorded length is a failure.
    """
    # Conversations last and together: `encode_many` tokenizes them in one batch.
    results: list[Encoded] = [Encoded()] * len(values)
    conversations: dict[int, Conversation] = {}
    for i, value in enumerate(values):
        item = value.value if isinstance(value, WithSource) else value
        item = item if _is_for(processor, item) else _without_processor(item)
        if isinstance(item, Failure | Exception):
            results[i] = Encoded((), (item if isinstance(item, Failure) else Failure(item),))
        elif _is_encoded(item):
            results[i] = Encoded(item)
        elif isinstance(item, Conversation) and processor.reads != "raw":
            if item.members or item.group is not None:
                results[i] = Encoded.failed(RecordError(Reason.UNSUPPORTED_FIELD, _GROUP))
                continue
            conversations[i] = item
        elif isinstance(item, PackSample | Packs):
            packs = item if isinstance(item, Packs) else (item,)
            results[i] = _encode_packs(packs, processor, check_lengths=check_lengths)
        else:
            results[i] = _encode_single(item, processor)
    encoded = processor.encode_many(list(conversations.values())) if conversations else []
    for i, sample in zip(conversations, encoded, strict=True):
        if isinstance(sample, Reject):
            results[i] = Encoded.failed(RecordError.of(sample))
            continue
        own = conversations[i]
        is_labeled = not (own.role is None and own.label is None) and isinstance(sample, EncodedSample)
        results[i] = Encoded([sample.in_group(None, own.role, own.label) if is_labeled else sample])
    return [
        Encoded([s.of(value.source) if isinstance(s, EncodedSample) else s for s in result.samples], result.failures)
        if isinstance(value, WithSource)
        else result
        for value, result in zip(values, results, strict=True)
    ]


def _is_encoded(value: Any) -> bool:
    return isinstance(value, EncodedRow) or (
        isinstance(value, list) and all(isinstance(sample, EncodedSample) for sample in value)
    )


def _is_for(processor: Processor, value: Any) -> bool:
    """Return whether a processor gets an item as it is."""
    if isinstance(value, Conversation):
        return True
    if processor.reads == "conversations" or isinstance(
        value, EncodedSample | EncodedRow | Reject | PackSample | Packs
    ):
        return False
    return processor.reads == "raw" or (isinstance(value, Mapping) and not _is_record(value))


def _is_record(value: Mapping[Any, Any]) -> bool:
    """Return whether a mapping is a record of a known format, which consists of plain values."""
    if is_features(value) or any(isinstance(field, torch.Tensor | np.ndarray) for field in value.values()):
        return False
    try:
        find_record_format(value)
    except EnergonPackedError:
        return False
    return True


def _without_processor(value: Any) -> Any:
    """Convert an item as far as possible without a processor.

    Returns:
        A list of samples or an EncodedRow, an error, a Conversation, or the value itself.
    """
    if isinstance(value, EncodedSample):
        return [value]
    if isinstance(value, Reject):
        return RecordError.of(value)
    if _is_encoded(value):
        return value
    try:
        # Features before records: both are dicts, and `normalize` would reject most features.
        if is_features(value):
            return [from_features(value)]
        return normalize(dict(value)) if isinstance(value, Mapping) else value
    except EnergonPackedError as error:
        return error


def is_divisible(value: Any) -> bool:
    """Return whether `overlong='split'` may split the sample of an item: a document or tokens, but not a pack."""
    value = value.value if isinstance(value, WithSource) else value
    if isinstance(value, EncodedSample) or is_features(value):
        return True
    value = normalize(dict(value)) if isinstance(value, Mapping) else value
    return isinstance(value, Conversation) and not value.messages


def _encode_packs(packs: Sequence[PackSample], processor: Processor, *, check_lengths: bool) -> Encoded:
    """Encode one pack, or the packs of a row; a bad sample is left out, and the other samples stay."""
    failures: list[Failure] = []

    def on_failure(error: Exception, pack: PackSample) -> None:
        failures.append(Failure(error, PackAt.of(pack.__key__, pack.__sources__)))

    rows: list[Sequence[EncodedSample]] = []
    for pack in packs:
        try:
            rows.append(encode_pack(pack, processor, check_lengths=check_lengths, on_failure=on_failure))
        except EnergonPackedError as error:
            on_failure(error, pack)
    return Encoded(EncodedRow.joined(rows), failures)


def _encode_single(value: Any, processor: Processor) -> Encoded:
    """Encode a value of another type."""
    try:
        return Encoded([processor.encode(value)])
    except EnergonPackedError as error:
        return Encoded.failed(error)
