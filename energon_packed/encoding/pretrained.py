"""Loading tokenizers and image processors from folders, as `ChatEncoder.from_pretrained` does."""

from pathlib import Path
from typing import Any

from energon_packed.encoding.vision import VisionFamily, load_vision
from energon_packed.errors import ConfigError


def load_tokenizer(folder: str | Path) -> Any:
    """The Transformers tokenizer of a folder.

    Raises:
        ConfigError: the folder does not exist, or holds no tokenizer.
    """
    _check_folder(folder)
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder))
    except (OSError, ValueError, KeyError, TypeError) as error:
        detail = " ".join(str(error).split())[:200]
        raise ConfigError(f"{folder} holds no tokenizer that Transformers can load: {detail}") from error


def load_vision_for(
    tokenizer_dir: str | Path, processor_dir: str | Path | None, **image_settings: Any
) -> VisionFamily | None:
    """The vision family of a processor folder, of the tokenizer's folder, or of named settings; None without any.

    Raises:
        ConfigError: a folder without image settings, or settings that contradict each other.
    """
    if processor_dir is not None:
        _check_folder(processor_dir)
    vision = load_vision(processor_dir or tokenizer_dir, **image_settings)
    if vision is None and processor_dir is not None:
        raise ConfigError(f"{processor_dir} has no preprocessor_config.json; pass `image_processor` instead")
    return vision


def _check_folder(folder: str | Path) -> None:
    if not Path(folder).is_dir():
        raise ConfigError(f"{folder} is not a folder; pass the folder of a tokenizer or processor")
