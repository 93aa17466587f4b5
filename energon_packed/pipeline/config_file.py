"""Config files: options by name or flag, for `pack --config` and for training from the same file."""

import difflib
import logging
from pathlib import Path
from typing import Any

import yaml

from energon_packed.errors import ConfigError
from energon_packed.foreign import read_yaml
from energon_packed.options import Declaration, declared, short
from energon_packed.pipeline.training_names import TRAINING_NAMES, TRAINING_ONLY, translated

_log = logging.getLogger(__name__)


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
