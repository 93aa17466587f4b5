"""Names that a config file for training uses for what `pack` has options for: one file serves both.

dataset_path       inputs, or sources where an item has settings of its own
packing_length     seq_len
packing_strategy   algorithm: first_fit is ffd, best_fit is bfd, pool_N is window_N
packing            false is max_samples_per_pack 1
filter_overlong    overlong: true drops, false raises
processor_config   tokenizer, or a mapping of encoder settings
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from energon_packed.encoding import EncoderSettings
from energon_packed.errors import ConfigError
from energon_packed.foreign import read_yaml
from energon_packed.options import declared, short

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
