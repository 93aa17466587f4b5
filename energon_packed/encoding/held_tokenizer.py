"""HeldTokenizer: ids of texts in which the conversation's own special tokens are text.

It is the same tokenizer with other names for its control tokens: one private-use character each, under the same id.
The template's tokens are written as these characters, and a special token in the conversation is written out; no name
is equal to it any more, so it is split as any text, with the rest of the text around it.

    held        "<|im_start|>user\\nis \\U000f0002 one?<|im_end|>"
    renamed     "\\U000f8001user\\nis <|im_end|> one?\\U000f8002"
"""

import json
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from energon_packed.encoding.skeleton import Span
from energon_packed.encoding.special_text import HELD, token_pattern
from energon_packed.errors import ConfigError

Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]
_NAMES = 0xF8000  # character that names the first control token


class HeldTokenizer:
    """A copy of a tokenizer with renamed control tokens.

    Args:
        serialized: tokenizer.json as text.
        tokens: control tokens, in the order in which they are held.

    Raises:
        ConfigError: a control token cannot be renamed.
    """

    def __init__(self, serialized: str, tokens: Sequence[str]) -> None:
        from tokenizers import Tokenizer

        self._tokens = tuple(tokens)
        names = {token: chr(_NAMES + number) for number, token in enumerate(tokens)}
        settings = json.loads(serialized)
        added = settings.get("added_tokens") or []
        self._pattern = token_pattern([*tokens, *(one["content"] for one in added), *_held(tokens)])
        self._names = names
        self._backend = Tokenizer.from_str(json.dumps(_renamed(settings, names)))
        for one in added:
            name = names.get(one["content"], one["content"])
            if self._backend.token_to_id(name) != one["id"]:
                raise ConfigError(
                    f"special tokens in texts cannot be kept as text with this tokenizer: {one['content']} would get "
                    f"another id than {one['id']}; set `allow_special_in_text=True`"
                )

    def encode(self, text: str, spans: Sequence[Span] | None, *, special: bool) -> tuple[Int64, Bool]:
        """(input_ids int64 (L,), covered bool (L,)) of a text with held characters; as `TextTokenizer.encode`."""
        written, edges = self._written(text)
        encoding = self._backend.encode(written, add_special_tokens=special)
        ids = np.array(encoding.ids, dtype=np.int64)
        if spans is None:
            return ids, np.ones(len(ids), dtype=bool)
        return ids, covered_by_offsets(encoding, [(edges[start], edges[end]) for start, end in spans])

    def _written(self, text: str) -> tuple[str, list[int]]:
        """The text that is tokenized, and where each character of `text` begins in it, and its end."""
        parts: list[str] = []
        sizes: list[int] = []
        end = 0
        for match in self._pattern.finditer(text):
            before, found = text[end : match.start()], match[0]
            parts.append(before)
            sizes += [1] * len(before)
            number = ord(found) - HELD if len(found) == 1 else -1
            part = self._tokens[number] if 0 <= number < len(self._tokens) else self._names.get(found, found)
            parts.append(part)
            sizes += [len(part), *([0] * (len(found) - 1))]
            end = match.end()
        parts.append(text[end:])
        sizes += [1] * (len(text) - end)
        return "".join(parts), list(accumulate(sizes, initial=0))


def covered_by_offsets(encoding: Any, spans: Sequence[Span]) -> Bool:
    """Tokens of a `tokenizers.Encoding` that hold at least one character of a span, bool (L,)."""
    starts, ends = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2).T
    covered = np.zeros(len(starts), dtype=bool)
    for start, end in spans:
        covered |= (starts < end) & (ends > start)
    return covered


def _held(tokens: Sequence[str]) -> list[str]:
    return [chr(HELD + number) for number in range(len(tokens))]


def _renamed(settings: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """tokenizer.json with other names for some tokens, in its list of added ones and in the vocabulary."""
    added = [
        {**one, "content": names.get(one["content"], one["content"])} for one in settings.get("added_tokens") or []
    ]
    model = dict(settings["model"])
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(token, token): number for token, number in vocabulary.items()}
    elif vocabulary:
        model["vocab"] = [[names.get(token, token), score] for token, score in vocabulary]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    return {**settings, "added_tokens": added, "model": model}
