"""From the items of a distributor to encoded samples: the Processor's place in a dataflow."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from energon_packed.encoding import EncodedRow, EncodedSample, Processor, SampleSource
from energon_packed.errors import EnergonPackedError, FormatError, RecordError, Reject
from energon_packed.flavors import PackSample
from energon_packed.formats import StoredSample
from energon_packed.loading.features import from_features, is_features
from energon_packed.records import Conversation, normalize


def encode_pack(
    pack: PackSample,
    encoder: Processor,
    *,
    check_lengths: bool = True,
    on_failure: Callable[[Exception, Any], None] | None = None,
    source: SampleSource | None = None,
) -> Sequence[EncodedSample]:
    """The encoded samples of a pack, in order.

    Args:
        pack: of any flavor.
        encoder: the Processor that the data was packed with.
        check_lengths: refuse a sample whose length differs from the recorded one.
        on_failure: called with the error and the pack when a sample cannot be encoded; when it returns, that sample
            is skipped and the others stay. None raises.
        source: of all samples; by default what Energon says of the pack.

    Raises:
        RecordError, FormatError: a sample that cannot be encoded, without `on_failure`.
    """
    source = source or _source_of(pack)
    if (row := pack.token_row()) is not None:
        try:
            encoded_row = encoder.encode_row(row.ids, row.input_ids, row.labels, row.cu_seqlens)
            encoded_row.source = source
            return encoded_row
        except EnergonPackedError:  # find the sample, one by one
            pass
    encoded = []
    samples = pack.stored_samples()
    for sample, found in zip(samples, encoder.encode_many([one.conversation for one in samples]), strict=True):
        try:
            one = checked_sample(sample, found, pack.__key__, check_lengths=check_lengths)
            encoded.append(one.of(source))
        except EnergonPackedError as error:  # one bad sample costs one sample, not its pack
            if on_failure is None:
                raise
            on_failure(error, pack)
    return encoded


def _source_of(pack: PackSample) -> SampleSource | None:
    infos = pack.__sources__
    return SampleSource(str(infos[0].dataset_path), dict(pack.__subflavors__ or {})) if infos else None


def checked_sample(
    sample: StoredSample, found: EncodedSample | Reject, key: str, *, check_lengths: bool = True
) -> EncodedSample:
    """What encoding a sample of a pack gave, truncated as it was packed.

    Raises:
        RecordError: it cannot be encoded.
        FormatError: its length differs from the recorded one.
    """
    if isinstance(found, Reject):
        raise RecordError.of(found)
    one = found if sample.truncate is None else found.truncated(sample.truncate)
    if check_lengths and sample.length is not None and len(one) != sample.length:
        raise FormatError(
            f"sample {one.id} of pack {key} has {len(one)} tokens, but {sample.length} were recorded: use the "
            "tokenizer, chat template and image settings that it was packed with (see packing.json)"
        )
    return one


class RecordAt(NamedTuple):
    """Where the record of an item is; by this the reject report finds its row number when it is asked for.

    Attributes:
        source: number of the source in its reader.
        address: of the record in the source.
        id: of the record, or None.
    """

    source: int
    address: int
    id: str | None


class WithSource(NamedTuple):
    """A value with the dataset that it comes from.

    Attributes:
        value: a conversation, or a Reject.
        source: the dataset.
        at: where the record is, if it is one of an input file.
    """

    value: Any
    source: SampleSource
    at: RecordAt | None = None


Encoded = Sequence[EncodedSample] | EnergonPackedError


def encode_items(values: Sequence[Any], processor: Processor) -> list[Encoded]:
    """The encoded samples of each value, or why it cannot be used.

    EncodedSamples, lists of them and features (`{"input_ids", ...}`) pass through; packs of any flavor are encoded
    sample by sample; records of a known shape become conversations; everything else goes to `processor.encode`.

    Args:
        values: what distributors give; a Reject stands for a record that could not be read.
        processor: encodes conversations, all of these together.
    """
    found: list[Any] = [one.value if isinstance(one, WithSource) else one for one in values]
    found = [one if isinstance(one, Conversation) else _without_processor(one) for one in found]
    talks = [place for place, one in enumerate(found) if isinstance(one, Conversation)]
    encoded = processor.encode_many([found[place] for place in talks]) if talks else []
    for place, one in zip(talks, encoded, strict=True):
        found[place] = RecordError.of(one) if isinstance(one, Reject) else [one]
    done = [one if isinstance(one, (list, EncodedRow)) else _rest(one, processor) for one in found]
    return [
        [sample.of(value.source) for sample in one]
        if isinstance(value, WithSource) and not isinstance(one, EnergonPackedError)
        else one
        for value, one in zip(values, done, strict=True)
    ]


def _without_processor(value: Any) -> Any:
    """What needs no processor, a Conversation, or the value itself."""
    if isinstance(value, EncodedSample):
        return [value]
    if isinstance(value, Reject):
        return RecordError.of(value)
    if isinstance(value, EncodedRow) or (
        isinstance(value, list) and all(isinstance(one, EncodedSample) for one in value)
    ):
        return value
    try:
        if is_features(value):
            return [from_features(value)]
        return normalize(dict(value)) if isinstance(value, Mapping) else value
    except EnergonPackedError as error:
        return error


def _rest(value: Any, processor: Processor) -> Encoded:
    if isinstance(value, EnergonPackedError):
        return value
    try:
        return encode_pack(value, processor) if isinstance(value, PackSample) else [processor.encode(value)]
    except EnergonPackedError as error:
        return error
