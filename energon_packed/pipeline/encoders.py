"""How every process of a run gets its encoder: loaded from folders, or passed in."""

import logging
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from energon_packed.encoding import ChatEncoder, EncoderSettings, Processor
from energon_packed.encoding.pretrained import find_pretrained
from energon_packed.encoding.settings import settings_in
from energon_packed.options import declared, plain_values

_log = logging.getLogger(__name__)
_WORTH_COMPARING = 48  # chunks from which workers compare tokenizer engines: some thousand records take as long


@dataclass(frozen=True, slots=True)
class PretrainedEncoder:
    """A ChatEncoder that each process loads from its settings.

    Attributes:
        settings: with a tokenizer; options that include them are reduced to them. Names of models become folders.

    Raises:
        ConfigError: when made with a folder that does not exist.
    """

    settings: EncoderSettings

    def __post_init__(self) -> None:
        given = settings_in(self.settings)
        names = {"tokenizer": given.tokenizer, "processor": given.processor}
        folders: dict[str, Any] = {name: find_pretrained(v) for name, v in names.items() if v is not None}
        object.__setattr__(self, "settings", replace(given, **folders))

    def load(self) -> ChatEncoder:
        """The encoder, loaded once in each process; forked workers inherit it."""
        settings = self.settings
        return _load_encoder(settings, tuple(_stamps(settings.tokenizer)), tuple(_stamps(settings.processor)))

    def as_dict(self) -> dict[str, Any]:
        """Plain types, for the manifest: the settings that decide the tokens and are not the default.

        `loss_on` is always there, for readers of the manifest.
        """
        recorded = {one.name: one.default for one in declared(EncoderSettings) if one.decides}
        given = {name: value for name, value in plain_values(self.settings) if name in recorded}
        return {name: value for name, value in given.items() if value != recorded[name] or name == "loss_on"}


@dataclass(frozen=True, slots=True)
class GivenEncoder:
    """A Processor that the caller made. Worker processes inherit it, or get a pickled copy where they cannot fork."""

    encoder: Processor

    def load(self) -> Processor:
        """The encoder."""
        return self.encoder

    def as_dict(self) -> dict[str, Any]:
        """The name of its class, for the manifest."""
        return {"processor_class": f"{type(self.encoder).__module__}.{type(self.encoder).__qualname__}"}


EncoderLoader = PretrainedEncoder | GivenEncoder


def log_notices(loader: EncoderLoader) -> None:
    """Say what loading the encoder has decided, such as image options that win over a folder."""
    for line in getattr(getattr(loader.load(), "vision", None), "warnings", ()):
        _log.warning("%s", line)


def prepare_workers(loader: EncoderLoader, chunks: int) -> None:
    """Load the parts of the encoder that forked workers inherit.

    Args:
        loader: of the encoder.
        chunks: of the input that the workers tokenize; few chunks are not worth a second tokenizer engine.
    """
    encoder = loader.load()
    if isinstance(encoder, ChatEncoder):
        encoder.renderer.template.prepare()
        if chunks >= _WORTH_COMPARING and sys.platform == "linux":
            encoder.text_tokenizer.prepare_fork()


def _stamps(folder: Path | None) -> Iterator[tuple[str, int, int]]:
    """Name, size and time of the files in a folder, so that a changed one is loaded again."""
    if folder is not None and folder.is_dir():
        for path in sorted(folder.iterdir()):
            stat = path.stat()
            yield path.name, stat.st_size, stat.st_mtime_ns


@lru_cache(maxsize=2)
def _load_encoder(settings: EncoderSettings, *stamps: object) -> ChatEncoder:
    return ChatEncoder.from_pretrained(**asdict(settings))
