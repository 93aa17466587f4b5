"""Config files for `pack --config` and for training, one file for both.

Input: a YAML mapping of option names (or flags) to values. Output: values of an option class by name. The names of
training configs are translated to options of `pack`:

dataset_path       inputs, or sources if an item is a mapping of per-source settings
datasets           sources, with the settings of other tools under the names of per-source settings
dataset            a mapping of options, as if they were not nested; also dataset_config. Options of the trainer
                   and the model beside it are left out
dataset_type       checked: whether the kind of dataset can be packed
packing_length     seq_len
packing_strategy   algorithm: first_fit is ffd, best_fit is bfd, pool_N is window_N
packing            false is max_samples_per_pack 1
filter_overlong    overlong: true drops, false raises
processor_config   tokenizer, or a mapping of encoder settings; processor_name is tokenizer
video_max_frames   max_frames
frame_num          num_frames, if video_sampling_strategy is frame_num

`datasets` is the list of LLaVA-NeXT (`json_path`, `sampling_strategy`), lmms-engine (`path`, `data_folder`,
`data_type`) and axolotl (`path`, `type`, `ds_type`, `split`), or InternVL's mapping of names to datasets (`root`,
`annotation`, `repeat_time`, `data_augment`, `length`), which may also be the whole file.
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
"""Names that only the loaders use."""
_TRANSLATED = (
    "dataset_path", "datasets", "dataset_type", "packing_length", "packing_strategy", "packing", "filter_overlong",
    "processor_config", "video_max_frames", "video_sampling_strategy", "frame_num",
)  # fmt: skip
TRAINING_NAMES = (*_TRANSLATED, *TRAINING_ONLY)
DATASET_TYPES = {
    **dict.fromkeys(("vision", "llava_video", "qwen3_vl", "qwen3_5"), False),
    **dict.fromkeys(("fineweb_edu", "vision_iterable", "qwen3_vl_iterable", "qwen3_5_iterable"), True),
}
"""Values of `dataset_type` in lmms-engine, and whether that dataset streams."""
_AUDIO = "it has audio, which is not supported yet. Use vision for records without audio."
_GENERATION = "it trains on noised images or tokens, and a row here is trained to predict its next tokens."
_REFUSED_TYPES = {
    **dict.fromkeys(("vision_audio", "qwen_omni", "qwen_omni_iterable", "aero_realtime_iterable"), _AUDIO),
    **dict.fromkeys(("rae", "sit", "bagel", "nit", "wanvideo", "blip3o", "fineweb_edu_dllm"), _GENERATION),
}
_NESTED = ("dataset", "dataset_config")  # options of lmms-engine
_SETTINGS = {
    **dict.fromkeys(("json_path", "annotation"), "path"),
    **dict.fromkeys(("root", "data_folder"), "image_root"),
    "repeat_time": "weight",
    "split": "source_split",
}
_BLEND = (
    "To pack a share of the records, set weight. To blend datasets while training, pack each into its own folder and "
    "use energon-packed metadataset."
)
_DETECTED = "Remove it: the format is detected by the name of the file and the fields of its records."
_FORMATS = (("json", "jsonl", "parquet", "arrow", "csv"), _DETECTED)
# Settings without an effect if they have one of these values; other values are refused with the remedy.
_WITHOUT_EFFECT: dict[str, tuple[tuple[Any, ...], str]] = {
    "sampling_strategy": (("all",), _BLEND),
    **dict.fromkeys(("ratio", "sampling_ratio", "probability", "proportion"), ((), _BLEND)),
    "data_augment": ((False,), "Images are stored as they are."),
    "type": (("alpaca", "sharegpt", "chat_template", "completion"), f"{_DETECTED} For other fields, set map."),
    "data_type": _FORMATS,
    "ds_type": _FORMATS,
}
_ANY = object()  # in place of the values: every value is without an effect
_OF_LMMS_ENGINE: dict[str, tuple[Any, str]] = {
    **dict.fromkeys(
        ("trainer_type", "trainer_args", "model_config", "video_backend", "filter_overlong_workers"), (_ANY, "")
    ),
    "extra_kwargs": (({},), "Use the options of pack."),
    "kwargs": (({},), "Use the encoder settings, such as max_pixels."),
    "processor_type": (_ANY, ""),
    "object_storage": (("none",), "Write the paths with their scheme, such as s3://BUCKET/data.jsonl."),
    "bucket_name": ((), "Write the paths with their scheme, such as s3://BUCKET/data.jsonl."),
    "eval_dataset_path": ((), "Make a second config with this dataset_path."),
    "max_length": ((), "Samples longer than packing_length are dropped (filter_overlong). Set packing_length."),
}
_STRATEGIES = {"first_fit": "ffd", "best_fit": "bfd", "sequential": "sequential"}
_SIZED = re.compile(r"(window|pool)_([1-9][0-9]*)")


def translated(values: Mapping[str, Any]) -> dict[str, Any]:
    """Translate training names to options of `pack`.

    Args:
        values: values of some `TRAINING_NAMES`; None means that the name is not set.

    Raises:
        ConfigError: a value is invalid.
    """
    present = {name: values[name] for name in _TRANSLATED if values.get(name) is not None}
    options: dict[str, Any] = {}
    if "dataset_path" in present:
        options |= _inputs(present["dataset_path"])
    if "datasets" in present:
        if options:
            raise ConfigError("`dataset_path` and `datasets` are both set. Remove one of them")
        sources = _sources({"datasets": present["datasets"]})
        if sources is None:
            raise ConfigError(f"`datasets` must be a list of datasets, got {short(present['datasets'])}")
        options["sources"] = tuple(sources)
    if "packing_length" in present:
        options["seq_len"] = present["packing_length"]
    if "packing_strategy" in present:
        options["algorithm"] = algorithm_of(present["packing_strategy"])
    if present.get("packing") is False:
        options["max_samples_per_pack"] = 1
    if "filter_overlong" in present:
        options["overlong"] = "drop" if present["filter_overlong"] else "error"
    if "dataset_type" in present:
        _check_dataset_type(present["dataset_type"])
    by_number = present.get("video_sampling_strategy", "fps")
    if by_number not in ("fps", "frame_num"):
        raise ConfigError(f"`video_sampling_strategy` must be fps or frame_num, got {short(by_number)}")
    if by_number == "frame_num" and "frame_num" in present:
        options["num_frames"] = present["frame_num"]
    elif "video_max_frames" in present:
        options["max_frames"] = present["video_max_frames"]
    if "processor_config" in present:
        options |= _processor(present["processor_config"])
    return options


def algorithm_of(strategy: Any) -> str:
    """Return the planner for a `packing_strategy`.

    Raises:
        ConfigError: the strategy is unknown.
    """
    if isinstance(strategy, str) and strategy in _STRATEGIES:
        return _STRATEGIES[strategy]
    if isinstance(strategy, str) and (sized := _SIZED.fullmatch(strategy)):
        return f"window_{sized[2]}"
    raise ConfigError(
        f"`packing_strategy` must be one of {', '.join(_STRATEGIES)}, window_N, pool_N, got {short(strategy)}"
    )


def _check_dataset_type(value: Any) -> None:
    """Refuse a `dataset_type` of lmms-engine whose records cannot be packed."""
    if isinstance(value, str) and value in DATASET_TYPES:
        return
    reason = _REFUSED_TYPES.get(value) if isinstance(value, str) else None
    raise ConfigError(
        f"`dataset_type` must be one of {', '.join(DATASET_TYPES)}, got {short(value)}"
        + (f": {reason}" if reason else ". Records are recognized by their content, so it may be left out.")
    )


def _check_without_effect(where: str, key: str, value: Any, values: Any, remedy: str) -> None:
    """Refuse a value other than None, "" and `values` of a setting that has no effect.

    Raises:
        ConfigError: the message has the remedy.
    """
    if values is _ANY or value in (None, "", *values):
        return
    limit = " or ".join(str(each).lower() for each in values) or "left out"
    raise ConfigError(f"{where}: {key} must be {limit}, got {short(value)}. {remedy}")


def _inputs(path: Any) -> dict[str, Any]:
    """Translate a dataset_path (a path, a list of paths or sources, or a YAML file of sources)."""
    if isinstance(path, str | Path) and Path(path).suffix.lower() in (".yaml", ".yml"):
        try:
            content = read_yaml(Path(path), unique_keys=True)
        except (OSError, yaml.YAMLError) as error:
            raise ConfigError(f"`dataset_path` {path} cannot be read: {' '.join(str(error).split())}") from error
        if (sources := _sources(content)) is not None:
            return {"sources": tuple(sources)}
        # A Metadataset is an input like any other file: the reader of Energon datasets opens it.
        if not isinstance(content, dict) or not {"splits", "__class__"} & set(content):
            raise ConfigError(f"`dataset_path` {path} must be a Metadataset or contain a list of sources")
    items = list(path) if isinstance(path, list | tuple) else [path]
    if all(isinstance(item, str | Path) for item in items):
        return {"inputs": tuple(map(str, items))}
    return {"sources": tuple(items)}


def _sources(content: Any) -> list[Any] | None:
    """Read a list of sources, alone or under `sources`, or `datasets`; None if the content is something else.

    Raises:
        ConfigError: there are other keys beside the list, or a dataset has a setting that `pack` does not support.
    """
    if isinstance(content, list):
        return content
    if not isinstance(content, dict):
        return None
    if _is_internvl(content):
        content = {"datasets": content}
    name = "datasets" if "datasets" in content else "sources"
    if not isinstance(content.get(name), list | dict):
        return None
    if others := content.keys() - {name}:
        raise ConfigError(f"a list of {name} must be alone in its file, got also {short(min(map(str, others)))}")
    listed = content[name] if isinstance(content[name], list) else list(content[name].values())
    return listed if name == "sources" else [_source(entry, index) for index, entry in enumerate(listed)]


def _is_internvl(content: Any) -> bool:
    """Whether the content of a file is a mapping of names to datasets, each with an `annotation` file."""
    return (
        isinstance(content, dict)
        and bool(content)
        and all(isinstance(value, dict) and "annotation" in value for value in content.values())
    )


def _source(entry: Any, index: int) -> Any:
    """Translate an item of `datasets` to per-source settings."""
    if not isinstance(entry, Mapping):
        return entry
    settings: dict[str, Any] = {}
    for key, value in entry.items():
        if value in (None, "") or key == "length":  # InternVL: number of records
            continue
        if str(key) in _WITHOUT_EFFECT:
            _check_without_effect(f"datasets[{index}]", str(key), value, *_WITHOUT_EFFECT[str(key)])
            continue
        name = _SETTINGS.get(str(key), str(key))
        if name in settings:
            raise ConfigError(f"datasets[{index}] sets {name} twice, under two names. Remove one of them")
        settings[name] = value
    return settings


def _processor(config: Any) -> dict[str, Any]:
    if isinstance(config, str | Path):
        return {"tokenizer": config}
    if not isinstance(config, Mapping):
        raise ConfigError(
            f"`processor_config` must be the folder of a tokenizer, or a mapping of options, got {short(config)}"
        )
    names = [declaration.name for declaration in declared(EncoderSettings)]
    settings: dict[str, Any] = {}
    for key, value in config.items():
        if key in _OF_LMMS_ENGINE:
            _check_without_effect("processor_config", key, value, *_OF_LMMS_ENGINE[key])
            continue
        name = "tokenizer" if key == "processor_name" else key
        if name not in names:
            raise ConfigError(f"unknown option {key!r} in `processor_config`; use {', '.join(names)}")
        if name in settings:
            raise ConfigError("`processor_config` sets tokenizer and processor_name. Remove one of them")
        if key != "processor_name" or value:  # "" in examples of lmms-engine
            settings[name] = value
    return settings


def read_config(file: Path, cls: type[Any], others: type[Any] | None = None) -> dict[str, Any]:
    """Read the options in a YAML file, by name.

    Args:
        file: the file.
        cls: the option class. Training names (`dataset_path`, `packing_length`, ...) that are not options of the class
            are translated, and names that only the loaders use are left out.
        others: an option class whose names are allowed and left out, because this use of the file does not need them.

    Raises:
        ConfigError: the file cannot be read, is not a mapping of option names, or sets an option twice.
    """
    try:
        values = read_yaml(file, unique_keys=True)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{file} is not YAML: {' '.join(str(error).split())}") from error
    if isinstance(values, list) and len(values) == 1 and _is_trainer(values[0]):
        values = {name: values[0]["config"][name] for name in _NESTED if name in values[0]["config"]}
    if not isinstance(values, dict):
        raise ConfigError(f"{file} must be a mapping of option names to values, such as seq_len: 4096")
    if _is_internvl(values):
        values = {"datasets": values}
    for nested in [name for name in _NESTED if isinstance(values.get(name), dict)]:
        inner = values.pop(nested)
        if twice := sorted(map(str, inner.keys() & values.keys() - _OF_LMMS_ENGINE.keys())):
            raise ConfigError(f"{file} sets `{twice[0]}` twice, also under {nested}. Remove one of them")
        values |= inner
    known, ignored = _by_name(cls), {} if others is None else _by_name(others)
    out: dict[str, Any] = {}
    for_training: dict[str, Any] = {}
    for key, value in values.items():
        name = str(key).replace("-", "_")
        declaration = known.get(name)
        if declaration is not None:
            if declaration.name in out:
                raise ConfigError(f"{file} sets `{declaration.name}` twice, under two names. Remove one of them")
            out[declaration.name] = _value(file, key, value, declaration)
        elif name in TRAINING_NAMES:
            for_training[name] = value
        elif name in _OF_LMMS_ENGINE:
            _check_without_effect(str(file), name, value, *_OF_LMMS_ENGINE[name])
            _log.info("%s: %s is for the trainer or lmms-engine, and not used here", file, key)
        elif name in ignored:
            _log.info("%s: %s is for packing to disk, and not used here", file, key)
        else:
            close = difflib.get_close_matches(name, [*known, *TRAINING_NAMES], 1)
            hint = f"did you mean {close[0]}?" if close else "energon-packed pack --help lists the options"
            raise ConfigError(f"{file}: unknown option {key!r}; {hint}")
    if left := [name for name in for_training if name in TRAINING_ONLY]:
        _log.info("%s: %s: only for training, and not used here", file, ", ".join(left))
    translations = translated(for_training)
    if twice := sorted(set(translations) & set(out)):
        raise ConfigError(f"{file} sets `{twice[0]}` twice, under two names. Remove one of them")
    return out | translations


def _is_trainer(item: Any) -> bool:
    """Whether an item of a list is the configuration of a training run of lmms-engine."""
    return isinstance(item, dict) and item.get("type") == "trainer" and isinstance(item.get("config"), dict)


def _by_name(cls: type[Any]) -> dict[str, Declaration]:
    """Declarations by name and by every flag, with underscores."""
    by_name = {declaration.name: declaration for declaration in declared(cls)}
    by_flag = {
        flag.lstrip("-").replace("-", "_"): declaration
        for declaration in by_name.values()
        for flags in declaration.flags
        for flag in flags.split("/")  # --resume/--no-resume
    }
    return by_flag | by_name  # the name of an option wins over the flag of another


def _value(file: Path, key: Any, value: Any, declaration: Declaration) -> Any:
    if declaration.is_flag and not isinstance(value, bool):
        raise ConfigError(f"{file}: {key} must be true or false, got {short(value)}")
    # `no_npy: true` is `use_patch_positions: false`
    if declaration.is_flag and declaration.name != str(key).replace("-", "_") and str(key).startswith(("no-", "no_")):
        value = not value
    return value
