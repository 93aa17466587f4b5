"""`encode_pack`: a pack of any flavor becomes encoded samples, one by one."""

from collections.abc import Callable, Sequence
from typing import Any

from energon_packed.encoding import EncodedSample, Processor, SampleSource
from energon_packed.errors import EnergonPackedError, FormatError, RecordError, Reject
from energon_packed.flavors import PackSample
from energon_packed.formats import StoredSample


def encode_pack(
    pack: PackSample,
    encoder: Processor,
    *,
    check_lengths: bool = True,
    on_failure: Callable[[Exception, Any], None] | None = None,
    source: SampleSource | None = None,
) -> Sequence[EncodedSample]:
    """The encoded sub-samples of a pack, in order.

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
