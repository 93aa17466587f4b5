"""TokenizerParts: the parts of a Transformers tokenizer that encoding uses."""

from dataclasses import dataclass
from typing import Any

from energon_packed.errors import ConfigError


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


def _plain(backend: Any) -> Any:
    backend.no_padding()
    backend.no_truncation()
    return backend
