"""`encode_pack`: a pack of any flavor becomes encoded samples, one by one."""

from collections.abc import Callable
from typing import Any

import numpy as np

from energon_packed.encoding import EncodedSample, Processor
from energon_packed.errors import EnergonPackedError, FormatError
from energon_packed.flavors import PackedTokensSample, PackSample


def encode_pack(
    pack: PackSample,
    encoder: Processor,
    *,
    check_lengths: bool = True,
    on_failure: Callable[[Exception, Any], None] | None = None,
) -> list[EncodedSample]:
    """The encoded sub-samples of a pack, in order.

    Args:
        pack: of any flavor.
        encoder: the Processor that the data was packed with.
        check_lengths: refuse a sample whose length differs from the recorded one.
        on_failure: called with the error and the pack when a sample cannot be encoded; when it returns, that sample
            is left out and the others stay. None raises.

    Raises:
        RecordError, FormatError: a sample that cannot be encoded, without `on_failure`.
    """
    if isinstance(pack, PackedTokensSample) and not any(pack.images):
        try:
            input_ids, labels = pack.input_ids.astype(np.int64), pack.labels.astype(np.int64)
            return encoder.adopt_tokens(pack.ids, input_ids, labels, pack.cu_seqlens.tolist())
        except EnergonPackedError:  # find the sample, one by one
            pass
    limit = pack.truncate_to()
    encoded = []
    for conversation, length in zip(pack.conversations(), pack.expected_lengths(), strict=True):
        try:
            one = encoder.encode(conversation)
            one = one if limit is None else one.truncated(limit)
            if check_lengths and length is not None and len(one) != length:
                raise FormatError(
                    f"sample {one.id} of pack {pack.__key__} has {len(one)} tokens, but {length} were recorded: use "
                    "the tokenizer, chat template and image settings that it was packed with (see packing.json)"
                )
            encoded.append(one)
        except EnergonPackedError as error:  # one bad sample costs one sample, not its pack
            if on_failure is None:
                raise
            on_failure(error, pack)
    return encoded
