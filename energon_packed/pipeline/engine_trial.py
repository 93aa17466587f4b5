"""EngineTrial: whether the fast tokenizer engine agrees with tokenizers on the first records of the input."""

from dataclasses import dataclass
from itertools import islice

from energon_packed.encoding import ChatEncoder
from energon_packed.errors import EnergonPackedError, RecordError
from energon_packed.pipeline.chunks import Chunk
from energon_packed.pipeline.encoders import EncoderLoader
from energon_packed.pipeline.reader import RecordReader

_RECORDS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTrial:
    """Compares the engines on the first records of a chunk: a function for an engine of the pipeline.

    It runs where the records are measured, because fastokens must not be used by a process that forks.

    Attributes:
        reader, encoder: as in the other stages.
    """

    reader: RecordReader
    encoder: EncoderLoader

    def __call__(self, chunk: Chunk) -> str:
        """Why fastokens may not be used; "" where the engines agree.

        Raises:
            EngineMismatch: they differ, and fastokens was asked for by name.
        """
        encoder = self.encoder.load()
        if not isinstance(encoder, ChatEncoder):
            return ""
        texts = []
        for row in islice(self.reader.sources[chunk.source].scan(chunk.start, chunk.stop), _RECORDS):
            try:
                conversation = self.reader.conversation(chunk.source, row)
                if conversation.input_ids is None:
                    texts.append(encoder.renderer.render(conversation).text)
            except RecordError:  # measuring says so
                continue
            except EnergonPackedError:  # measuring says so, and stops
                break
        return encoder.text_tokenizer.differs_on(texts)
