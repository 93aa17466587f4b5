"""Processors: a Conversation becomes one EncodedSample, or just its length.

    Conversation ──rendering──► text + supervised spans ──tokenizer──► TokenBatch ──vision──► EncodedSample

chat.py           ChatEncoder: the path above, for measuring and encoding alike
settings.py       EncoderSettings: what it is loaded from, declared once; vision_settings.py: the family they describe
template.py       the chat template; turns.py: where its turns stand; completeness.py: what it drops
rendering.py      text and targets; skeleton.py and purity.py: without Jinja where that is proved
tokenizer.py      ids and supervised tokens of texts
engines.py        what tokenizes; engine_corpus.py: texts on which two engines are compared
special_text.py   special tokens that a conversation writes stay text, with the ids of such texts
pretrained.py     tokenizers and image processors of folders, and the parts of a tokenizer in use
images.py         headers and decoding; mrope.py
vision.py         vision families, with the image processors of Transformers
processor_vision.py  families that a Transformers processor serves
image_runs.py     tokens and pixels of images, and the tensors of other vision towers, joined for a row
"""

from energon_packed.encoding.chat import ChatEncoder
from energon_packed.encoding.processor import Measurement, Processor, StoredTokens
from energon_packed.encoding.sample import IGNORE_INDEX, EncodedRow, EncodedSample, SampleSource
from energon_packed.encoding.settings import EncoderSettings
from energon_packed.encoding.vision import VisionFamily, register_vision
from energon_packed.encoding.vision_settings import load_vision

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
