"""StoredTokens: the processor of data that is tokenized already and has no images: tokens pass through."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from energon_packed.conversation import Conversation
from energon_packed.encoding.processor import Processor
from energon_packed.encoding.sample import IGNORE_INDEX, EncodedSample
from energon_packed.errors import ConfigError, Reason, RecordError

Int64 = npt.NDArray[np.int64]


class StoredTokens(Processor):
    """Gives `input_ids` and `labels` as they are stored; needs no tokenizer."""

    def encode(self, conversation: Conversation) -> EncodedSample:
        """The tokens of a conversation that has them.

        Raises:
            ConfigError: it is text or has images, which a ChatEncoder must encode.
            RecordError: no token after the first is a target.
        """
        ids, labels = conversation.input_ids, conversation.labels
        if ids is None or conversation.images:
            raise ConfigError(
                f"sample {conversation.id} has {'text' if ids is None else 'images'}, which an encoder must turn into "
                "tokens and pixels: give ChatEncoder.from_pretrained(...)"
            )
        labels = ids if labels is None else labels
        if not (labels[1:] != IGNORE_INDEX).any():
            raise RecordError(Reason.NO_SUPERVISED_TOKENS, "no label after the first is a target")
        return EncodedSample(id=conversation.id, input_ids=ids, labels=labels)

    def adopt_tokens(
        self, ids: Sequence[str | None], input_ids: Int64, labels: Int64, cu_seqlens: Sequence[int]
    ) -> list[EncodedSample]:
        """The samples of a row."""
        return [
            EncodedSample(id=ident, input_ids=input_ids[start:end], labels=labels[start:end])
            for ident, (start, end) in zip(ids, pairwise(cu_seqlens), strict=True)
        ]
