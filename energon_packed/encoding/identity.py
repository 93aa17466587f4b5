"""What decides the tokens that a ChatEncoder gives, as one digest."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from energon_packed.encoding.tokenizer_parts import TokenizerParts
from energon_packed.encoding.vision import VisionFamily

_VERSION = 7  # raise it when the same input gives other tokens
_DATE_NOTE = "{# energon-packed: always the same date #}"  # in the digest since version 4
_SPECIAL_IN_TEXT = 6
"""The version before special tokens in texts stayed text: an encoder that allows them gives the tokens of that one."""


def encoder_digests(
    tokenizer: TokenizerParts,
    vision: VisionFamily | None,
    *,
    serialized: str,
    allow_special_in_text: bool,
    options: Mapping[str, Any],
) -> Iterator[str]:
    """Yield the hex digests of the data that an encoder reads: first its own.

    It also reads data that was packed knowing nothing of images but how many tokens they take, and data of the version
    before, whose texts hold special tokens rarely; lengths are checked sample by sample.

    Args:
        tokenizer, vision: of the encoder.
        serialized: tokenizer.json as text.
        allow_special_in_text: special tokens written in a text are control tokens.
        options: others that decide tokens, as JSON types.
    """
    source = tokenizer.chat_template
    parts = {
        "tokenizer": serialized,
        "special": tokenizer.special_tokens,
        "template": None if source is None else source + _DATE_NOTE,
        **options,
    }
    images = [vision.config(), vision.length_config()] if vision else [None]
    versions = [_SPECIAL_IN_TEXT] if allow_special_in_text else [_VERSION, _SPECIAL_IN_TEXT]
    for version, image in product(versions, images):
        text = json.dumps({**parts, "version": version, "vision": image}, sort_keys=True, default=str)
        yield hashlib.sha256(text.encode()).hexdigest()
