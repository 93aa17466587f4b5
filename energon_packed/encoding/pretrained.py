"""Load tokenizers and processors from a folder, or by a model name in the Hugging Face cache.

`load_tokenizer` returns the tokenizer of Transformers, `load_processor` the processor. `TokenizerParts.of` extracts
the parts that an encoder needs. `find_pretrained` finds the folder. Nothing is downloaded, and no code of a model
folder is run.
"""

import filecmp
import json
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from energon_packed.errors import ConfigError
from energon_packed.files import of_type
from energon_packed.libraries import installed
from energon_packed.options import short
from energon_packed.system import announced, no_collecting

_SETTINGS = ("tokenizer_config.json", "config.json")
_GENERIC = "PreTrainedTokenizerFast"
_NAMES = {name: _GENERIC for name in ("TokenizersBackend", _GENERIC)} | {
    name: "Qwen2Tokenizer" for name in ("Qwen2Tokenizer", "Qwen2TokenizerFast")
}
"""Tokenizer classes that can be selected without AutoTokenizer, by the names in tokenizer_config.json."""
_TEXT_FILES = (".json", ".jinja", ".txt")
_MODEL_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """The parts of a loaded tokenizer that an encoder needs.

    Attributes:
        backend: `tokenizers.Tokenizer`, without padding and truncation.
        chat_template: Jinja source of the default template, or None.
        special_tokens: special tokens by name, such as `eos_token`.
    """

    backend: Any
    chat_template: str | None
    special_tokens: dict[str, str]

    @classmethod
    def of(cls, tokenizer: Any) -> "TokenizerParts":
        """Extract the parts of a fast Transformers tokenizer.

        Raises:
            ConfigError: a slow tokenizer, or a tokenizer with several chat templates and no default.
        """
        if isinstance(tokenizer, str | Path):
            raise ConfigError(
                f"`tokenizer` must be a tokenizer of Transformers, got {short(tokenizer)}. For a folder, use "
                "ChatEncoder.from_pretrained(DIR)."
            )
        if not getattr(tokenizer, "is_fast", False):
            name = type(tokenizer).__name__
            remedy = (
                ". Write it with `convert_tekken_tokenizer` of Transformers." if name.startswith("Mistral") else ""
            )
            raise ConfigError(f"{name} is a slow tokenizer; a tokenizer.json is needed{remedy}")
        template = None
        if tokenizer.chat_template is not None:
            try:
                template = tokenizer.get_chat_template()
            except ValueError as error:
                raise ConfigError(f"the tokenizer has no default chat template: {error}") from error
        backend = tokenizer.backend_tokenizer
        # tokenizer.json may enable both, which would change lengths and cut samples.
        backend.no_padding()
        backend.no_truncation()
        return cls(backend, template, dict(tokenizer.special_tokens_map))

    @property
    def end_of_document(self) -> str | None:
        """The end-of-text token to append to a document; "" if the tokenizer appends it itself, None without any."""
        eos = self.special_tokens.get("eos_token")
        adds = eos is not None and self.backend.encode("a").ids[-1:] == [self.backend.token_to_id(eos)]
        return "" if adds else eos

    @property
    def vocabulary(self) -> int:
        """Number of tokens, including added tokens."""
        return int(self.backend.get_vocab_size(with_added_tokens=True))

    @property
    def added_tokens(self) -> tuple[str, ...]:
        """Added tokens, the longest first."""
        return self._added(special=False)

    @property
    def special_added_tokens(self) -> tuple[str, ...]:
        """Added tokens that are special, the longest first; `</think>` is added but not special in some tokenizers."""
        return self._added(special=True)

    def _added(self, *, special: bool) -> tuple[str, ...]:
        tokens = {
            token.content for token in self.backend.get_added_tokens_decoder().values() if token.special >= special
        }
        return tuple(sorted(tokens, key=lambda token: (-len(token), token)))


@announced("loading the tokenizer")
@no_collecting()
def load_tokenizer(folder: str | Path) -> Any:
    """Load the Transformers tokenizer of a folder.

    Args:
        folder: a folder, or the name of a model in the local Hugging Face cache.

    Raises:
        ConfigError: neither a folder nor a cached model, or without a tokenizer.
    """
    folder = find_pretrained(folder)
    alone = (folder / "tokenizer.json").is_file() and not any((folder / name).is_file() for name in _SETTINGS)
    try:
        if alone:
            from transformers import PreTrainedTokenizerFast

            tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
        elif name := _class_name(folder):
            import transformers

            tokenizer = getattr(transformers, name).from_pretrained(str(folder))
        else:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except MemoryError:
        raise
    except Exception as error:  # tokenizers raises plain exceptions
        if not (folder / "tokenizer.json").is_file():
            raise ConfigError(f"{folder} has no tokenizer.json. Pass the folder of a tokenizer.") from error
        raise ConfigError(
            f"Transformers cannot load the tokenizer of {folder}: {why(error, 'download or save the tokenizer again')}"
        ) from error
    if tokenizer.chat_template is None:
        tokenizer.chat_template = _template_beside(folder)
    return tokenizer


def _class_name(folder: Path) -> str | None:
    """Name of the class that `AutoTokenizer` selects for a folder; None if only `AutoTokenizer` can decide.

    AutoTokenizer itself imports the configurations of all models and, with them, torch, which costs a second.
    """
    settings = _json_object(folder / "tokenizer_config.json")
    name = _NAMES.get(str(settings.get("tokenizer_class")))
    if name is None or "auto_map" in settings:
        return None
    if not (folder / "config.json").exists():
        return name
    config = _json_object(folder / "config.json")
    model = config.get("model_type")
    if not isinstance(model, str) or "auto_map" in config or "model_name" in config:
        return None
    # AutoTokenizer overrides the class for some models. Its tables are read as text, because importing their module
    # imports torch. The first table contains ("MODEL", "CLASS" ...), the second one the models whose published
    # folders name a wrong class.
    installed = find_spec("transformers")
    module = Path(str(installed and installed.origin)).parent / "models/auto/tokenization_auto.py"
    if not module.is_file():
        return None
    tables = module.read_text(encoding="utf-8")
    registered = re.findall(rf'\("{re.escape(model)}", "(\w+)"', tables)
    if name != _GENERIC:
        return name if [_NAMES.get(other) for other in registered] == [name] else None
    is_exception = tables.count(f'"{model}"') != len(registered) or "MistralCommonBackend" in registered
    return None if is_exception else name


def _json_object(file: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if the file is missing, damaged or contains something else."""
    try:
        value = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def find_pretrained(name: str | Path) -> Path:
    """Find a folder: `name` itself, or the copy of a model of that name in the local Hugging Face cache.

    Raises:
        ConfigError: neither exists; nothing is downloaded.
    """
    if Path(name).is_dir():
        return Path(name)
    if Path(name).exists() or not _MODEL_NAME.fullmatch(str(name)):
        remedy = f"its folder {Path(name).parent}" if Path(name).is_file() else "a tokenizer or processor folder"
        raise ConfigError(f"{name} is not a folder. Pass {remedy}.")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(str(snapshot_download(str(name), local_files_only=True)))
    except (HFValidationError, LocalEntryNotFoundError) as error:
        raise ConfigError(
            f"{name} is neither a folder nor a model in the local Hugging Face cache; pass a folder, or download it "
            f"with: hf download {name} --include '*.json' '*.jinja' '*.txt'"
        ) from error


def load_processor(folder: Path) -> Any:
    """Load the processor of a model folder with Transformers.

    Raises:
        ConfigError: a package that it needs is missing, or Transformers cannot load it here.
    """
    try:
        from transformers import AutoProcessor

        return AutoProcessor.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as error:  # whatever a processor class raises
        if isinstance(error, ImportError) and error.__cause__ is None:
            reason = why(error).split(" but it was not found")[0].split(". ")[0]
            raise ConfigError(f"the processor of {folder} cannot be loaded here: {reason}; install it") from error
        release = f"Transformers {installed('transformers')}"
        raise ConfigError(f"{release} cannot load the processor of {folder} here: {why(error)}") from error


def why(error: BaseException, remedy: str = "") -> str:
    """Return the first cause of an error of Transformers, in a line, and the remedy.

    Transformers hides why it cannot import a class, which is often a torchvision of another torch.
    """
    while error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(error).split())[:200] or type(error).__name__
    if "operator torchvision::" in text:
        remedy = "install the torchvision release that belongs to the installed torch"
    return f"{text}; {remedy}" if remedy else text


def is_same_folder(first: Path, second: Path) -> bool:
    """Whether two tokenizer or processor folders are the same folder, or have the same settings.

    Files of settings are compared by content, and weights are not compared.
    """
    if first.resolve() == second.resolve():
        return True
    names, others = (
        {path.name for path in folder.glob("*") if path.suffix in _TEXT_FILES} for folder in (first, second)
    )
    return names == others != set() and not filecmp.cmpfiles(first, second, names, shallow=False)[1]


def _template_beside(folder: Path) -> str | None:
    """Chat template of the files of a folder that Transformers does not read for a tokenizer."""
    jinja, processor = folder / "chat_template.jinja", folder / "chat_template.json"
    try:
        if jinja.is_file():
            return jinja.read_text(encoding="utf-8")
        if processor.is_file():
            return str(of_type(json.loads(processor.read_text(encoding="utf-8")), dict)["chat_template"])
    except (ValueError, KeyError) as error:
        raise ConfigError(f"{processor} must be a JSON object with `chat_template`") from error
    return None
