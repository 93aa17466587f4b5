"""TokenizerParts: what encoding needs of a Transformers tokenizer, without importing Transformers.

Importing Transformers takes 0.7 s, and `AutoTokenizer` two seconds more, for what is a tokenizer.json, a chat template
and a few names. What Transformers made of a folder is kept in the cache folder of the user, by the contents of the
folder and the versions of Transformers and tokenizers.
"""

import hashlib
import json
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from energon_packed.encoding.user_cache import cache_file, keep, recall
from energon_packed.errors import ConfigError

_READ = (".json", ".jinja", ".txt", ".model")
_LARGEST = 1 << 26  # bytes; larger files hold weights
_SERIALIZED = "tokenizer.json"


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """A loaded tokenizer.

    Attributes:
        backend: `tokenizers.Tokenizer`, without padding and truncation.
        chat_template: Jinja source of the default template, or None.
        special_tokens: by name, such as `eos_token`.
    """

    backend: Any
    chat_template: str | None
    special_tokens: dict[str, str]

    @classmethod
    def of(cls, tokenizer: Any) -> "TokenizerParts":
        """The parts of a fast Transformers tokenizer.

        Raises:
            ConfigError: a slow tokenizer, or one with several chat templates and no default.
        """
        if not getattr(tokenizer, "is_fast", False):
            raise ConfigError(f"{type(tokenizer).__name__} is a slow tokenizer; a tokenizer.json is needed")
        template = None
        if tokenizer.chat_template is not None:
            try:
                template = tokenizer.get_chat_template()
            except ValueError as error:
                raise ConfigError(f"the tokenizer has no default chat template: {error}") from error
        return cls(_plain(tokenizer.backend_tokenizer), template, dict(tokenizer.special_tokens_map))

    @property
    def eos_token(self) -> str | None:
        """The token that ends a text, or None."""
        return self.special_tokens.get("eos_token")

    @property
    def end_of_document(self) -> str | None:
        """The end-of-text token, which a text needs; "" where the tokenizer appends it itself, None without one."""
        eos = self.eos_token
        adds = eos is not None and self.backend.encode("a").ids[-1:] == [self.backend.token_to_id(eos)]
        return "" if adds else eos

    @property
    def vocabulary(self) -> int:
        """Number of tokens, added ones included."""
        return int(self.backend.get_vocab_size(with_added_tokens=True))

    @property
    def added_tokens(self) -> tuple[str, ...]:
        """Added tokens, the longest first."""
        return self._added(special=False)

    @property
    def special_added_tokens(self) -> tuple[str, ...]:
        """The special ones of them: `</think>` is none in some tokenizers."""
        return self._added(special=True)

    def _added(self, *, special: bool) -> tuple[str, ...]:
        found = {
            token.content for token in self.backend.get_added_tokens_decoder().values() if token.special >= special
        }
        return tuple(sorted(found, key=lambda token: (-len(token), token)))


def recall_parts(folder: Path) -> TokenizerParts | None:
    """The parts of a tokenizer folder that an earlier run has loaded; None otherwise."""
    from tokenizers import Tokenizer

    value = recall(_cache_file(folder))
    try:
        source = value["backend"]
        backend = Tokenizer.from_file(str(folder / _SERIALIZED)) if source is None else Tokenizer.from_str(source)
        return TokenizerParts(_plain(backend), value["chat_template"], value["special_tokens"])
    except Exception:  # tokenizers raises no narrower class; a damaged or older file is as none
        return None


def keep_parts(folder: Path, parts: TokenizerParts) -> None:
    """Keep the parts of a tokenizer folder for later runs."""
    from tokenizers import Tokenizer

    file, wanted = folder / _SERIALIZED, parts.backend.to_str()
    is_file = file.is_file() and _plain(Tokenizer.from_file(str(file))).to_str() == wanted
    if is_file or Tokenizer.from_str(wanted).to_str() == wanted:
        value = {"chat_template": parts.chat_template, "special_tokens": parts.special_tokens}
        keep(_cache_file(folder), {**value, "backend": None if is_file else wanted})


def _plain(backend: Any) -> Any:
    backend.no_padding()
    backend.no_truncation()
    return backend


def _cache_file(folder: Path) -> Path:
    """By all that Transformers reads: the contents of the small files, the names of all, the name of the folder."""
    digest = hashlib.sha256(f"{version('transformers')} {version('tokenizers')} {folder.resolve()}".encode())
    for path in [*sorted(folder.iterdir()), *sorted((folder / "additional_chat_templates").glob("*.jinja"))]:
        digest.update(json.dumps(path.name).encode())
        if path.suffix in _READ and path.is_file() and path.stat().st_size <= _LARGEST:
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return cache_file("tokenizers", digest.hexdigest())
