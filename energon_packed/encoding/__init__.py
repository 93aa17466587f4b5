"""Processors: a Conversation becomes one EncodedSample, or just its length.

    Conversation ──rendering──► text + supervised spans ──tokenizer──► TokenBatch ──vision/──► EncodedSample

chat.py: ChatEncoder, the path above, for measuring and encoding alike; settings.py and pretrained.py: what it is
loaded from. template.py, turns.py, rendering.py: text and targets; skeleton.py and purity.py: the same without Jinja,
for templates that are proved to allow it; completeness.py: content that a template drops. tokenizer.py, engines.py:
ids; special_text.py: special tokens that a conversation writes as text. supervision.py: supervised turns, by labels.
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
