"""StoredTokens: the processor of data that is tokenized already and has no images: tokens pass through."""

from energon_packed.encoding.processor import Processor
from energon_packed.encoding.sample import EncodedSample
from energon_packed.errors import ConfigError
from energon_packed.records import Conversation


class StoredTokens(Processor):
    """Returns `input_ids` and `labels` as they are stored; needs no tokenizer."""

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
                "tokens and pixels: pass ChatEncoder.from_pretrained(...)"
            )
        return self.encode_row([conversation.id], ids, ids if labels is None else labels, [0, len(ids)])[0]
