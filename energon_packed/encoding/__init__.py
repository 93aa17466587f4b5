"""Encoders: turn a Conversation into an EncodedSample (tokens, labels, pixels), or only compute its length.

    Conversation ──rendering──► text + supervised spans ──tokenizer──► TokenBatch ──vision/──► EncodedSample

processor.py has the base class, chat.py the ChatEncoder (settings.py, pretrained.py: what it is loaded from),
sample.py the result. Text: template.py and turns.py (through Jinja), skeleton.py and tracer.py (without Jinja, if that
is proved), rendering.py (selects one of them), completeness.py (rejects what a template drops), special_text.py
(special tokens as text). Tokens: tokenizer.py, with engines.py, and pieces.py for long documents.
Media: vision/ and audio/; av_file.py opens video and audio files.
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
