"""Encoders: turn a Conversation into an EncodedSample (tokens, labels, pixels), or only compute its length.

Conversation ──rendering──► text + supervised spans ──tokenizer──► TokenBatch ──vision/──► EncodedSample

processor.py      Processor, the base class; checks of token batches; StoredTokens
chat.py           ChatEncoder, the path above, for measuring and encoding
settings.py       EncoderSettings: the options of ChatEncoder, declared once
pretrained.py     loads tokenizers from folders or the Hugging Face cache
sample.py         EncodedSample and EncodedRow
rendering.py      text and supervised characters of a conversation
template.py       runs the chat template; turns.py locates the assistant turns in its output
skeleton.py       renders without Jinja; purity.py proves which templates allow that
completeness.py   rejects conversations of which a template drops something
tokenizer.py      token ids and supervised tokens; engines.py compares two tokenizer implementations
special_text.py   keeps special tokens that a conversation contains as text
supervision.py    supervised turns of a sample, computed from its labels, for reports
vision/           image headers, token counts, pixels and positions
"""

from energon_packed.encoding.chat import ChatEncoder
from energon_packed.encoding.processor import Measurement, Processor, StoredTokens
from energon_packed.encoding.sample import IGNORE_INDEX, EncodedRow, EncodedSample, SampleSource
from energon_packed.encoding.settings import EncoderSettings
from energon_packed.encoding.vision.families import VisionFamily, register_vision
from energon_packed.encoding.vision.settings import load_vision

__all__ = [
    "IGNORE_INDEX",
    "ChatEncoder",
    "EncodedRow",
    "EncodedSample",
    "EncoderSettings",
    "Measurement",
    "Processor",
    "SampleSource",
    "StoredTokens",
    "VisionFamily",
    "load_vision",
    "register_vision",
]
