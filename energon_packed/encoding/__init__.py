"""Processors: a Conversation becomes one EncodedSample, or just its length.

Conversation ──template──► text + supervised spans ──tokenizer──► ids ──vision──► EncodedSample
"""

from energon_packed.encoding.chat import ChatEncoder
from energon_packed.encoding.processor import Measured, Processor
from energon_packed.encoding.sample import IGNORE_INDEX, EncodedSample
from energon_packed.encoding.stored_tokens import StoredTokens
from energon_packed.encoding.vision import VisionFamily, load_vision

__all__ = [
    "IGNORE_INDEX",
    "ChatEncoder",
    "EncodedSample",
    "Measured",
    "Processor",
    "StoredTokens",
    "VisionFamily",
    "load_vision",
]
