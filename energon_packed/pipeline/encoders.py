"""How every process of a run gets its encoder: loaded from folders, or passed in."""

import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from energon_packed.encoding import ChatEncoder, Processor
from energon_packed.encoding.engines import EngineName
from energon_packed.encoding.pretrained import find_pretrained
from energon_packed.encoding.rendering import LOSS_ON, LossOn
from energon_packed.encoding.vision import PatchOrder
from energon_packed.errors import ConfigError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderOptions:
    """The arguments of `ChatEncoder.from_pretrained`."""

    tokenizer: Path
    processor: Path | None = None
    image_processor: str | None = None
    vision_family: str | None = None
    factor: int | None = None
    patch_size: int | None = None
    merge_size: int | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    patch_order: PatchOrder = "auto"
    loss_on: LossOn = "assistant"
    tokenizer_engine: EngineName = "auto"
    allow_special_in_text: bool = False

    def __post_init__(self) -> None:
        for folder in ("tokenizer", "processor"):
            if getattr(self, folder) is not None:
                object.__setattr__(self, folder, find_pretrained(getattr(self, folder)))
        if self.loss_on not in LOSS_ON:
            raise ConfigError(f"`loss_on` is {self.loss_on!r}; use one of {', '.join(LOSS_ON)}")
        for name in ("factor", "patch_size", "merge_size", "min_pixels", "max_pixels"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"`{name}` is {value}; it must be at least 1")

    def load(self) -> ChatEncoder:
        """The encoder, loaded once in each process; forked workers inherit it."""
        return _load_encoder(self, tuple(_stamps(self.tokenizer)), tuple(_stamps(self.processor)))

    def as_dict(self) -> dict[str, Any]:
        """Plain types, for the manifest: what decides the tokens, so not the engine."""
        given = {name: v for name, v in asdict(self).items() if v is not None and name != "tokenizer_engine"}
        silent = (("patch_order", "auto"), ("allow_special_in_text", False))
        given = {name: v for name, v in given.items() if (name, v) not in silent}
        return {name: str(v) if isinstance(v, Path) else v for name, v in given.items()}


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


def log_notices(loader: EncoderOptions | GivenEncoder) -> None:
    """Say what loading the encoder has decided, such as image options that win over a folder."""
    for line in getattr(getattr(loader.load(), "vision", None), "notices", ()):
        _log.warning("%s", line)


def _stamps(folder: Path | None) -> Iterator[tuple[str, int, int]]:
    """Name, size and time of the files in a folder, so that a changed one is loaded again."""
    if folder is not None and folder.is_dir():
        for path in sorted(folder.iterdir()):
            stat = path.stat()
            yield path.name, stat.st_size, stat.st_mtime_ns


@lru_cache(maxsize=2)
def _load_encoder(options: EncoderOptions, *stamps: object) -> ChatEncoder:
    return ChatEncoder.from_pretrained(
        options.tokenizer,
        options.processor,
        loss_on=options.loss_on,
        tokenizer_engine=options.tokenizer_engine,
        allow_special_in_text=options.allow_special_in_text,
        image_processor=options.image_processor,
        vision_family=options.vision_family,
        factor=options.factor,
        patch_size=options.patch_size,
        merge_size=options.merge_size,
        min_pixels=options.min_pixels,
        max_pixels=options.max_pixels,
        patch_order=options.patch_order,
    )
