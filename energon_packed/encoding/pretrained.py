"""Loading tokenizers from folders or the Hugging Face cache, for `ChatEncoder`."""

import json
import re
from pathlib import Path
from typing import Any

from energon_packed.errors import ConfigError

_SETTINGS = ("tokenizer_config.json", "config.json")
_GENERIC = ("TokenizersBackend", "PreTrainedTokenizerFast")  # two names of one class
_MODEL_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def load_tokenizer(folder: str | Path) -> Any:
    """The Transformers tokenizer of a folder.

    Args:
        folder: as `find_pretrained` takes it.

    Raises:
        ConfigError: the folder does not exist and is no cached model, or holds no tokenizer.
    """
    folder = find_pretrained(folder)
    alone = (folder / "tokenizer.json").is_file() and not any((folder / name).is_file() for name in _SETTINGS)
    try:
        if alone:
            from transformers import PreTrainedTokenizerFast

            tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
        elif _is_generic(folder):
            from transformers import PreTrainedTokenizerFast

            tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder))
        else:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        detail = " ".join(str(error).split())[:200]
        raise ConfigError(f"{folder} holds no tokenizer that Transformers can load: {detail}") from error
    if tokenizer.chat_template is None:
        tokenizer.chat_template = _template_beside(folder)
    return tokenizer


def _is_generic(folder: Path) -> bool:
    """Whether `AutoTokenizer` would choose PreTrainedTokenizerFast: the settings name it and no model can override it.

    AutoTokenizer itself imports the configurations of all models and, with them, torch, which takes a second.
    """
    if (folder / "config.json").exists():
        return False
    try:
        settings = json.loads((folder / "tokenizer_config.json").read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(settings, dict) and settings.get("tokenizer_class") in _GENERIC and "auto_map" not in settings


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
