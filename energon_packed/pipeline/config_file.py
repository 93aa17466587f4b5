"""Config files: options by name or flag, for `pack --config` and for training from the same file.

Names that a config file for training uses for what `pack` has options for: one file serves both.

dataset_path       inputs, or sources where an item has settings of its own
packing_length     seq_len
packing_strategy   algorithm: first_fit is ffd, best_fit is bfd, pool_N is window_N
packing            false is max_samples_per_pack 1
filter_overlong    overlong: true drops, false raises
processor_config   tokenizer, or a mapping of encoder settings
"""

import difflib
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from energon_packed.encoding import EncoderSettings
from energon_packed.errors import ConfigError
from energon_packed.files import read_yaml
from energon_packed.options import Declaration, declared, short

_log = logging.getLogger(__name__)
TRAINING_ONLY = ("dataset_format", "shuffle", "streaming", "max_images", "max_patches", "work_dir")
"""Names that only loaders read."""
_TRANSLATED = (
    "dataset_path", "packing_length", "packing_strategy", "packing", "filter_overlong", "processor_config",
)  # fmt: skip
TRAINING_NAMES = (*_TRANSLATED, *TRAINING_ONLY)
_STRATEGIES = {"first_fit": "ffd", "best_fit": "bfd", "sequential": "sequential"}
_SIZED = re.compile(r"(window|pool)_([1-9][0-9]*)")


def translated(values: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `pack` that training names stand for.

    Args:
        values: of some `TRAINING_NAMES`; None stands for not given.

    Raises:
        ConfigError: an invalid value.
    """
    given = {name: values[name] for name in _TRANSLATED if values.get(name) is not None}
    found: dict[str, Any] = {}
    if "dataset_path" in given:
        found |= _inputs(given["dataset_path"])
    if "packing_length" in given:
        found["seq_len"] = given["packing_length"]
    if "packing_strategy" in given:
        found["algorithm"] = algorithm_of(given["packing_strategy"])
    if given.get("packing") is False:
        found["max_samples_per_pack"] = 1
    if "filter_overlong" in given:
        found["overlong"] = "drop" if given["filter_overlong"] else "error"
    if "processor_config" in given:
        found |= _processor(given["processor_config"])
    return found


def algorithm_of(strategy: Any) -> str:
    """The planner that a `packing_strategy` names.

    Raises:
        ConfigError: there is none.
    """
    if isinstance(strategy, str) and strategy in _STRATEGIES:
        return _STRATEGIES[strategy]
    if isinstance(strategy, str) and (sized := _SIZED.fullmatch(strategy)):
        return f"window_{sized[2]}"
    raise ConfigError(
        f"unknown `packing_strategy` {short(strategy)}; use one of {', '.join(_STRATEGIES)}, window_N, pool_N"
    )


def _inputs(path: Any) -> dict[str, Any]:
    """`inputs` or `sources` of a dataset_path: a path, a list of paths or sources, or a YAML file of sources."""
    if isinstance(path, str | Path) and Path(path).suffix.lower() in (".yaml", ".yml"):
        try:
            content = read_yaml(Path(path), unique_keys=True)
        except (OSError, yaml.YAMLError) as error:
            raise ConfigError(f"`dataset_path` {path} cannot be read: {' '.join(str(error).split())}") from error
        listed = content.get("sources") if isinstance(content, dict) else content
        if isinstance(listed, list):
            return {"sources": tuple(listed)}
        if not isinstance(content, dict) or not {"splits", "__class__"} & set(content):
            raise ConfigError(
                f"`dataset_path` {path} is no Metadataset; it must hold a list of sources, or `sources:` with one"
            )
    items = list(path) if isinstance(path, list | tuple) else [path]
    if all(isinstance(one, str | Path) for one in items):
        return {"inputs": tuple(map(str, items))}
    return {"sources": tuple(items)}


def _processor(config: Any) -> dict[str, Any]:
    if isinstance(config, str | Path):
        return {"tokenizer": config}
    if not isinstance(config, Mapping):
        raise ConfigError(f"`processor_config` is {config!r}; use the folder of a tokenizer, or a mapping of options")
    names = [one.name for one in declared(EncoderSettings)]
    if unknown := [name for name in config if name not in names]:
        raise ConfigError(f"unknown option {unknown[0]!r} in `processor_config`; use {', '.join(names)}")
    return dict(config)


def read_config(file: Path, cls: type[Any], others: type[Any] | None = None) -> dict[str, Any]:
    """The options in a YAML file, by name.

    Args:
        file: the file.
        cls: the option class; training names (`dataset_path`, `packing_length`, ...) are translated where it has no
            such option, and those that only loaders read are left out.
        others: an option class whose other names are allowed, and left out: they are not for this use of the file.

    Raises:
        ConfigError: it cannot be read, is not a mapping of option names, or has an option twice.
    """
    try:
        values = read_yaml(file, unique_keys=True)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{file} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{file} must be a mapping of option names to values, such as `seq_len`: 4096")
    known, ignored = _by_name(cls), {} if others is None else _by_name(others)
    out: dict[str, Any] = {}
    for_training: dict[str, Any] = {}
    for key, value in values.items():
        name = str(key).replace("-", "_")
        one = known.get(name)
        if one is not None:
            if one.name in out:
                raise ConfigError(f"{file} gives `{one.name}` twice, under two names; remove one")
            out[one.name] = _value(file, key, value, one)
        elif name in TRAINING_NAMES:
            for_training[name] = value
        elif name in ignored:
            _log.info("%s: %s is for packing to disk, and not used here", file, key)
        else:
            close = difflib.get_close_matches(name, [*known, *TRAINING_NAMES], 1)
            hint = f"did you mean {close[0]}?" if close else "energon-packed pack --help lists the options"
            raise ConfigError(f"{file}: unknown option {key!r}; {hint}")
    if left := [name for name in for_training if name in TRAINING_ONLY]:
        _log.info("%s: %s: only for training, and not used here", file, ", ".join(left))
    found = translated(for_training)
    if twice := sorted(set(found) & set(out)):
        raise ConfigError(f"{file} gives `{twice[0]}` twice, under two names; remove one")
    return out | found


def _by_name(cls: type[Any]) -> dict[str, Declaration]:
    """Declarations by name and by every flag, with underscores."""
    found = {one.name: one for one in declared(cls)}
    by_flag = {
        flag.lstrip("-").replace("-", "_"): one
        for one in found.values()
        for part in one.flags
        for flag in part.split("/")
    }
    return by_flag | found


def _value(file: Path, key: Any, value: Any, one: Declaration) -> Any:
    if one.is_flag and not isinstance(value, bool):
        raise ConfigError(f"{file}: {key} is {short(value)}; it must be true or false")
    if one.is_flag and one.name != str(key).replace("-", "_") and str(key).startswith(("no-", "no_")):
        value = not value
    return one.parse(value) if one.parse and isinstance(value, str) else value
