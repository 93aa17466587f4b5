"""load_vision: the vision family that a processor folder and explicit image settings describe; the settings win."""

import json
from pathlib import Path
from typing import Any

from energon_packed.encoding.pretrained import find_pretrained
from energon_packed.encoding.settings import EncoderSettings
from energon_packed.encoding.vision.families import VisionFamily, ambiguous, vision_families
from energon_packed.encoding.vision.processors import ProcessorVision
from energon_packed.errors import ConfigError
from energon_packed.options import declared

NEXT_STEP = (
    "use the processor folder of the model, or register a VisionFamily of your own (see 'Vision families' in the docs)"
)
_MERGES = (3, 2)  # merge sizes of published models
_NUMBERS = [one.name for one in declared(EncoderSettings) if one.kind is int]  # sizes and limits of images
_NAMES = ("model_type", "processor_class", "image_processor_type")


_Layouts = tuple[tuple[int, int], ...]
"""(patch size, merge size); or several such pairs that give the same lengths, of which nothing chooses one."""


def load_vision(settings: EncoderSettings) -> VisionFamily | None:
    """Load the vision family from a processor folder, from names and sizes, or from both: then the latter win.

    The folder is `processor`, or else that of the `tokenizer`.

    A `factor` of several meanings, such as 48 (16 x 3 or 24 x 2), gives a family that is `ambiguous_layouts`.

    Args:
        settings: of the encoder.

    Returns:
        The family, or None if no image processor is configured.

    Raises:
        ConfigError: an unknown family, conflicting settings, or a `processor` folder without image settings.
    """
    given = settings.processor or settings.tokenizer
    folder = None if given is None else find_pretrained(given)
    named = settings.vision_family or settings.image_processor
    numbers = {name: getattr(settings, name) for name in _NUMBERS if getattr(settings, name) is not None}
    of_folder = _processor_settings(folder) if folder is not None else {}
    if not of_folder and named is None:
        if numbers:
            names = ", ".join(f"`{name}`" for name in numbers)
            raise ConfigError(f"{names} require `image_processor`, `vision_family` or `processor`")
        if settings.processor is not None:
            raise ConfigError(f"{settings.processor} has no preprocessor_config.json; pass `image_processor` instead")
        return None
    family, notices = _family(settings, of_folder)
    if folder is not None and of_folder:
        try:
            vision, overruled = _of_folder(folder, family, numbers, named=named)
        except ConfigError as error:
            if family is ProcessorVision and not (numbers or isinstance(error.__cause__, ImportError)):
                raise _unknown(_names(of_folder), str(error)) from error
            raise
        if overruled := [*notices, *overruled]:
            notices = [f"image options win over {folder}: {', '.join(overruled)}"]
    else:
        vision = _of_family(family, numbers)
    if vision.ambiguous_layouts:
        notices.append(
            f"`factor` {ambiguous(vision.ambiguous_layouts)}: lengths are the same, pixels are not, so training needs "
            "the processor folder of the model, `patch_size`, `merge_size` or `vision_family`"
        )
    vision.warnings, vision.patch_order = (*vision.warnings, *notices), settings.patch_order
    return vision


def _of_family(family: type[VisionFamily], given: dict[str, int]) -> VisionFamily:
    """By the settings of the published models."""
    layouts = _layouts(family, given, (family.patch_size, family.default_merge))
    limits = {name: given.get(name, getattr(family, name)) for name in ("min_pixels", "max_pixels")}
    _check_limits(limits["min_pixels"], limits["max_pixels"])
    processor = _qwen_image_processor()(
        **_sizes(layouts),
        temporal_patch_size=family.temporal_patch_size,
        image_mean=list(family.image_mean),
        image_std=list(family.image_std),
        **limits,
    )
    return _made(family, processor, layouts)


def _of_folder(
    folder: Path, family: type[VisionFamily], given: dict[str, int], *, named: str | None
) -> tuple[VisionFamily, list[str]]:
    """By the settings of a folder, and what was given instead of them."""
    if (vision := family.from_folder(folder)) is not None:
        if given:
            names = ", ".join(f"`{name}`" for name in given)
            raise ConfigError(f"{family.__name__} takes its image settings from {folder} alone; remove {names}")
        return vision, []
    processor = _installed(folder, {}, named)
    _check_like_qwen(folder, family, processor)
    own = {"patch_size": int(processor.patch_size), "merge_size": int(processor.merge_size)}
    own |= {"min_pixels": int(processor.size["shortest_edge"]), "max_pixels": int(processor.size["longest_edge"])}
    own["factor"] = own["patch_size"] * own["merge_size"]
    layouts = _layouts(family, given, (own["patch_size"], own["merge_size"]))
    sizes = _sizes(layouts) | {name: given[name] for name in ("min_pixels", "max_pixels") if name in given}
    _check_limits(sizes.get("min_pixels", own["min_pixels"]), sizes.get("max_pixels", own["max_pixels"]))
    overruled = [f"`{name}` {value} ({own[name]})" for name, value in given.items() if value != own[name]]
    if any(value != own[name] for name, value in sizes.items()):
        processor = _installed(folder, sizes, named)
    return _made(family, processor, layouts), overruled


def _check_like_qwen(folder: Path, family: type[VisionFamily], processor: Any) -> None:
    """Refuse an image processor without patches to merge, or whose `size` is not a range of pixels.

    Raises:
        ConfigError: the message has its size.
    """
    size = processor.size or {}
    limits = [getattr(size, name, None) or dict(size).get(name) for name in ("shortest_edge", "longest_edge")]
    missing = [name for name in ("patch_size", "merge_size") if not isinstance(getattr(processor, name, None), int)]
    if not missing and None not in limits:
        return
    sizes = ", ".join(f"{name} {value}" for name, value in dict(size).items() if value is not None) or "no value"
    lacks = f" and no {' or '.join(missing)}" if missing else ""
    raise ConfigError(
        f"the {type(processor).__name__} of {folder} has a `size` of {sizes}{lacks}, but {family.__name__} needs "
        f"shortest_edge and longest_edge (minimum and maximum pixels), patch_size and merge_size; {NEXT_STEP}"
    )


def _made(family: type[VisionFamily], processor: Any, layouts: _Layouts) -> VisionFamily:
    vision = family(processor)
    vision.ambiguous_layouts = layouts if len(layouts) > 1 else ()
    return vision


def _check_limits(min_pixels: int, max_pixels: int) -> None:
    if min_pixels > max_pixels:
        raise ConfigError(f"`min_pixels` is {min_pixels}; it must be at most `max_pixels` {max_pixels}")


def _layouts(family: type[VisionFamily], given: dict[str, int], default: tuple[int, int]) -> _Layouts:
    """What `factor`, `patch_size` and `merge_size` mean; what they leave open is as in `default`.

    Raises:
        ConfigError: they contradict each other, or no patch and merge size make the factor.
    """
    factor, patch, merge = (given.get(name) for name in ("factor", "patch_size", "merge_size"))
    if factor is None:
        return ((patch or default[0], merge or default[1]),)
    if patch is not None or merge is not None:
        candidates = [(patch or factor // (merge or 1), merge or factor // (patch or 1))]
    elif default[0] * default[1] == factor:
        candidates = [default]
    else:
        candidates = [one for one in family.layouts if one[0] * one[1] == factor]
        candidates = candidates or [(factor // m, m) for m in _MERGES]
    fitting = [(p, m) for p, m in candidates if p * m == factor]
    if not fitting:
        sizes = "; ".join(f"`{name}` is {value}" for name, value in given.items() if not name.endswith("pixels"))
        raise ConfigError(f"{sizes}; `factor` must be patch size times merge size, which is 2 or 3 unless given")
    return tuple(fitting)


def _sizes(layouts: _Layouts) -> dict[str, int]:
    """Arguments of an image processor; of several layouts, one that merges nothing has the same lengths."""
    patch, merge = layouts[0]
    if len(layouts) > 1:
        patch, merge = patch * merge, 1
    return {"patch_size": patch, "merge_size": merge}


def _installed(folder: Path, values: dict[str, int], named: str | None) -> Any:
    """The image processor of a folder with other values; Qwen2-VL's where its own is not installed and one is named.

    Raises:
        ConfigError: Transformers cannot load it.
    """
    # Transformers before 5.12 exports the name only where torchvision is installed.
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    try:
        return AutoImageProcessor.from_pretrained(str(folder), trust_remote_code=False, **values)
    except (OSError, ValueError, KeyError, TypeError, ImportError, AttributeError) as error:
        if named is not None:
            return _qwen_image_processor().from_pretrained(str(folder), **values)
        detail = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"{folder} holds an image processor that Transformers cannot load ({detail}); set `vision_family`"
        ) from error


def _qwen_image_processor() -> Any:
    """Image processor class: the torchvision one if torchvision is installed, else the Pillow one."""
    import transformers
    from transformers.utils import is_torchvision_available

    if is_torchvision_available() or not hasattr(transformers, "Qwen2VLImageProcessorPil"):
        return transformers.Qwen2VLImageProcessor
    return transformers.Qwen2VLImageProcessorPil


def _processor_settings(folder: Path) -> dict[str, Any]:
    """JSON files of a processor folder by name; {} if it has no image processor."""
    found: dict[str, Any] = {}
    for name in ("config.json", "processor_config.json", "preprocessor_config.json"):
        path = folder / name
        if path.is_file():
            try:
                found[name] = json.loads(path.read_text(encoding="utf-8"))
            except ValueError as error:
                raise ConfigError(f"{path} is not valid JSON: {error}; fix or remove it") from error
    nested = "image_processor" in found.get("processor_config.json", {})
    return found if "preprocessor_config.json" in found or nested else {}


def _family(settings: EncoderSettings, of_folder: dict[str, Any]) -> tuple[type[VisionFamily], list[str]]:
    """The family by explicit name, else by the names in the folder, most specific first; and what was overruled.

    The image processor of LLaVA-OneVision-2 bears the name of Qwen2.5-VL's: where a folder has that name itself, its
    `model_type` says which family it is.
    """
    own_names = _names(of_folder)
    own = next((found for name in own_names if (found := _registered(name)) is not None), None)
    explicit = settings.vision_family or settings.image_processor
    if explicit is None:
        return own or ProcessorVision, []
    if settings.vision_family is None and own is not None and _plain(explicit) in map(_plain, own_names):
        return own, []
    family = _registered(explicit)
    if family is None and own is None and _plain(explicit) in map(_plain, own_names):
        return ProcessorVision, []
    if family is None:
        raise _unknown([explicit])
    if own is None or own is family:
        return family, []
    option = "vision_family" if settings.vision_family is not None else "image_processor"
    return family, [f"`{option}` {explicit} ({own_names[0]})"]


def _names(of_folder: dict[str, Any]) -> list[Any]:
    return [part[key] for key in _NAMES for part in of_folder.values() if part.get(key)]


def _registered(name: object) -> type[VisionFamily] | None:
    return next((one for one in vision_families() if _plain(name).startswith(one.names)), None)


def _plain(name: object) -> str:
    return "".join(c for c in str(name).lower() if c.isalnum())


def _unknown(names: list[Any], why: str = "") -> ConfigError:
    valid = ", ".join(sorted(name for family in vision_families() for name in family.names))
    return ConfigError(
        f"unknown image processor {', '.join(map(repr, names)) or 'without a name'}{why and f' ({why})'}; "
        f"set `vision_family` or `image_processor` to one of {valid}, if the model is one of "
        f"these; otherwise {NEXT_STEP}"
    )
