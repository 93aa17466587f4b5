"""Loading tokenizers from folders or the Hugging Face cache, for `ChatEncoder`."""

import json
import re
from functools import cached_property
from pathlib import Path
from typing import Any

from energon_packed.encoding.tokenizer_class import load_by_class
from energon_packed.encoding.tokenizer_parts import TokenizerParts, keep_parts, recall_parts
from energon_packed.errors import ConfigError

_SETTINGS = ("tokenizer_config.json", "config.json")
_MODEL_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


class PretrainedTokenizer:
    """The tokenizer of a folder, of which Transformers loads only what no earlier run has kept.

    Args:
        folder: as `find_pretrained` takes it.

    Raises:
        ConfigError: as `load_tokenizer`.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = find_pretrained(folder)
        parts = recall_parts(self.folder)
        if parts is None:
            parts = TokenizerParts.of(self.loaded)
            keep_parts(self.folder, parts)
        self.parts = parts

    @cached_property
    def loaded(self) -> Any:
        """The Transformers tokenizer."""
        return load_tokenizer(self.folder)


def load_tokenizer(folder: str | Path) -> Any:
    """The Transformers tokenizer of a folder.

    Raises:
        ConfigError: the folder does not exist and is no cached model, or holds no tokenizer.
    """
    folder = find_pretrained(folder)
    alone = (folder / "tokenizer.json").is_file() and not any((folder / name).is_file() for name in _SETTINGS)
    try:
        if alone:
            from transformers import PreTrainedTokenizerFast

            tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
        else:
            tokenizer = load_by_class(folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        detail = " ".join(str(error).split())[:200]
        raise ConfigError(f"{folder} holds no tokenizer that Transformers can load: {detail}") from error
    if tokenizer.chat_template is None:
        tokenizer.chat_template = _template_beside(folder)
    return tokenizer


def find_pretrained(name: str | Path) -> Path:
    """A folder: `name` itself, or the copy of a model of that name in the local Hugging Face cache.

    Raises:
        ConfigError: there is neither; nothing is downloaded.
    """
    if Path(name).is_dir():
        return Path(name)
    if not _MODEL_NAME.fullmatch(str(name)):
        raise ConfigError(f"{name} is not a folder; pass the folder of a tokenizer or processor")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(str(snapshot_download(str(name), local_files_only=True)))
    except (HFValidationError, LocalEntryNotFoundError) as error:
        raise ConfigError(
            f"{name} is neither a folder nor a model in the local Hugging Face cache; pass a folder, or download it "
            f"with: hf download {name} --include '*.json' '*.jinja' '*.txt'"
        ) from error


def _template_beside(folder: Path) -> str | None:
    """The chat template of a file that Transformers does not read for a tokenizer."""
    jinja, processor = folder / "chat_template.jinja", folder / "chat_template.json"
    try:
        if jinja.is_file():
            return jinja.read_text(encoding="utf-8")
        if processor.is_file():
            return str(json.loads(processor.read_text(encoding="utf-8"))["chat_template"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{processor} holds no chat template; it must be an object with `chat_template`") from error
    return None
