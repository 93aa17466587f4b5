"""Loading of the encoder in every process of a run.

Input: `EncoderSettings` with the folders of a tokenizer and a processor, or a Processor that the caller made. Output:
an `EncoderLoader`, which is pickled into tasks; its `load()` returns the encoder, loaded once in each process.
"""

import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from energon_packed.encoding import ChatEncoder, EncoderSettings, Processor
from energon_packed.encoding.pretrained import find_pretrained
from energon_packed.encoding.vision.families import VisionFamily
from energon_packed.options import declared, plain_values, values_of

_log = logging.getLogger(__name__)
# Chunks from which workers compare two tokenizer engines: loading a second engine costs about as much time as
# tokenizing some thousand records.
_MIN_CHUNKS_TO_COMPARE = 48


@dataclass(frozen=True, slots=True)
class PretrainedEncoder:
    """A ChatEncoder that each process loads from its settings.

    Attributes:
        settings: encoder settings with a tokenizer. Of options that include encoder settings, such as `PackOptions`,
            only these are kept; model names become folders.

    Raises:
        ConfigError: when made with a folder that does not exist.
    """

    settings: EncoderSettings

    def __post_init__(self) -> None:
        settings = EncoderSettings(**values_of(EncoderSettings, self.settings))
        names = {"tokenizer": settings.tokenizer, "processor": settings.processor}
        folders: dict[str, Any] = {name: find_pretrained(path) for name, path in names.items() if path is not None}
        object.__setattr__(self, "settings", replace(settings, **folders))

    def load(self) -> ChatEncoder:
        """Load the encoder, once in each process; forked workers inherit it."""
        settings = self.settings
        # The stamps are part of the cache key: two runs in one process may read a folder that changed in between.
        return _load_encoder(settings, tuple(_stamps(settings.tokenizer)), tuple(_stamps(settings.processor)))

    def as_dict(self) -> dict[str, Any]:
        """Settings for the manifest, in plain types: those that change the tokens and differ from the default.

        `loss_on` is always included, for readers of the manifest.
        """
        defaults = {setting.name: setting.default for setting in declared(EncoderSettings) if setting.decides}
        settings = {name: value for name, value in plain_values(self.settings) if name in defaults}
        return {name: value for name, value in settings.items() if value != defaults[name] or name == "loss_on"}


@dataclass(frozen=True, slots=True)
class GivenEncoder:
    """A Processor that the caller made; forked workers inherit it, spawned workers get a pickled copy."""

    encoder: Processor

    def load(self) -> Processor:
        """Return the encoder."""
        return self.encoder

    def as_dict(self) -> dict[str, Any]:
        """The name of its class, for the manifest."""
        return {"processor_class": f"{type(self.encoder).__module__}.{type(self.encoder).__qualname__}"}


EncoderLoader = PretrainedEncoder | GivenEncoder


def log_notices(loader: EncoderLoader) -> None:
    """Log the decisions of the families, such as image options that override the processor folder."""
    encoder = loader.load()
    if isinstance(encoder, ChatEncoder) and encoder.audio is not None:
        for warning in encoder.audio.warnings:
            _log.warning("%s", warning)
    vision = encoder.vision
    if isinstance(vision, VisionFamily):
        for line in vision.infos:
            _log.info("%s", line)
        for line in vision.warnings:
            _log.warning("%s", line)


def prepare_workers(loader: EncoderLoader, chunks: int) -> None:
    """Load the parts of the encoder that forked workers inherit.

    Args:
        loader: loads the encoder.
        chunks: number of chunks to tokenize; a second tokenizer engine is loaded only for many chunks.
    """
    encoder = loader.load()
    if isinstance(encoder, ChatEncoder):
        encoder.renderer.template.prepare()
        if chunks >= _MIN_CHUNKS_TO_COMPARE and sys.platform == "linux":  # other systems spawn workers
            encoder.text_tokenizer.prepare_fork()


def _stamps(folder: Path | None) -> Iterator[tuple[str, int, int]]:
    """Name, size and time of the files in a folder, so that a changed folder is loaded again."""
    if folder is not None and folder.is_dir():
        for path in sorted(folder.iterdir()):
            stat = path.stat()
            yield path.name, stat.st_size, stat.st_mtime_ns


@lru_cache(maxsize=2)
def _load_encoder(settings: EncoderSettings, *stamps: object) -> ChatEncoder:
    return ChatEncoder.of(settings)
