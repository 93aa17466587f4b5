"""load_vision: EncoderSettings (a processor folder, names, sizes) -> VisionFamily.

Names and sizes override the folder. The steps: select the family class by name (`_family`), compute patch and merge
size (`_layouts`), load the image processor of the folder or of the published models with these sizes (`_of_folder`,
`_of_family`).
"""

import json
import re
from pathlib import Path
from typing import Any

from energon_packed.encoding.pretrained import find_pretrained, why
from energon_packed.encoding.settings import IMAGES, VIDEOS, EncoderSettings
from energon_packed.encoding.vision.families import VisionFamily, ambiguous, vision_families
from energon_packed.encoding.vision.processor_videos import ProcessorVision
from energon_packed.errors import ConfigError
from energon_packed.libraries import installed
from energon_packed.options import declared
from energon_packed.system import announced, no_collecting

_NEXT_STEP = "use the processor folder of the model, or register a VisionFamily (see 'Vision families' in the docs)"
_PROCESSOR = "processor_config.json"  # in which newer versions of Transformers save all processors
_MERGES = (3, 2)  # merge sizes of published models
# Sizes and limits of images.
_NUMBERS = [option.name for option in declared(EncoderSettings) if option.kind is int and option.group == IMAGES]
_VIDEO_NUMBERS = [option.name for option in declared(EncoderSettings) if option.group == VIDEOS]
_NAMES = ("model_type", "processor_class", "image_processor_type")  # most specific first
_NO_FAMILY = "none"  # `vision_family` of text without images, whatever the folder contains
_Layouts = tuple[tuple[int, int], ...]
"""(patch size, merge size); several such pairs if the settings allow all of them, with the same lengths."""


@announced("loading the image processor")
@no_collecting()
def load_vision(settings: EncoderSettings) -> VisionFamily | None:
    """Load the vision family from a processor folder, from names and sizes, or from both.

    The folder is `processor`, or else `tokenizer`. Names and sizes override the folder. A `factor` of several
    meanings, such as 48 (16 x 3 or 24 x 2), returns a family with `ambiguous_layouts`.

    Args:
        settings: settings of the encoder.

    Returns:
        The family; None if no image processor is configured, or if `vision_family` is `none`.

    Raises:
        ConfigError: an unknown family, conflicting settings, or a `processor` folder without image settings.
    """
    source = settings.processor or settings.tokenizer
    folder = None if source is None else find_pretrained(source)
    named = settings.vision_family or settings.image_processor
    numbers = {name: getattr(settings, name) for name in _NUMBERS if getattr(settings, name) is not None}
    videos = {name: getattr(settings, name) for name in _VIDEO_NUMBERS if getattr(settings, name) is not None}
    of_folder = _processor_settings(folder) if folder is not None else {}
    if settings.vision_family is not None and _plain(settings.vision_family) == _NO_FAMILY:
        for name in (*numbers, *videos, *(["image_processor"] if settings.image_processor else [])):
            raise ConfigError(f"`{name}` must not be set with `vision_family` {_NO_FAMILY}. Remove one of them.")
        return None
    if not of_folder and named is None:
        if numbers or videos:
            names = ", ".join(f"`{name}`" for name in (*numbers, *videos))
            raise ConfigError(
                f"{names} need an image processor. Set `image_processor`, `vision_family` or `processor`."
            )
        if settings.processor is not None:
            raise ConfigError(f"{settings.processor} has no preprocessor_config.json; pass `image_processor` instead")
        return None
    family, notices = _family(settings, of_folder)
    infos: list[str] = []
    if folder is not None and of_folder:
        try:
            vision, overruled = _of_folder(folder, family, numbers, named=named)
        except ConfigError as error:
            # No family has the folder's name, and its processor cannot be used either: list the known names, unless
            # the user can help with other options, or by installing a package for a processor of no known family.
            own_names = [name for _, name in _names(of_folder)]
            shared = [name for name in own_names if _registered(name) is not None]  # does not decide the family
            if family is ProcessorVision and (shared or not (numbers or isinstance(error.__cause__, ImportError))):
                reason = f"other models have {shared[0]}, too" if shared else str(error)
                raise _unknown(own_names[0], f" of {folder} ({reason})") from error
            raise
        if notices:
            notices = [f"image options win over {folder}: {', '.join(notices)}"]
        if overruled:
            infos.append(f"image options win over {folder}: {', '.join(overruled)}")
        key, name = _names(of_folder)[0]
        if named is None and key == _NAMES[-1]:
            notices.append(
                f"{folder} names no model, only {name}, which several models have: images and positions are those of "
                f"{family.__name__}. Set `vision_family` if the model is another one, or use its complete folder"
            )
    else:
        vision = _of_family(family, numbers)
    if vision.ambiguous_layouts:
        infos.append(
            f"`factor` {ambiguous(vision.ambiguous_layouts)}: lengths are the same, pixels are not, so training needs "
            "the processor folder of the model, `patch_size`, `merge_size` or `vision_family`"
        )
    vision.warnings, vision.infos = (*vision.warnings, *notices), tuple(infos)
    vision.patch_order = settings.patch_order
    if settings.video_min_pixels is not None and settings.video_max_pixels is not None:
        _check_limits(settings.video_min_pixels, settings.video_max_pixels, "video_")
    folder_videos = _video_settings(folder) if folder is not None and of_folder else None
    vision.set_videos(folder_videos, {name.removeprefix("video_"): value for name, value in videos.items()})
    if vision_config := of_folder.get("config.json", {}).get("vision_config"):
        vision.set_model(vision_config)
    return vision


def _of_family(family: type[VisionFamily], numbers: dict[str, int]) -> VisionFamily:
    """Create a family from the settings of the published models and explicit sizes and limits."""
    layouts = _layouts(family, numbers, (family.patch_size, family.default_merge))
    limits = {name: numbers.get(name, getattr(family, name)) for name in ("min_pixels", "max_pixels")}
    _check_limits(limits["min_pixels"], limits["max_pixels"])
    processor = _qwen_image_processor()(
        **_sizes(layouts),
        temporal_patch_size=family.temporal_patch_size,
        image_mean=list(family.image_mean),
        image_std=list(family.image_std),
        **limits,
    )
    return _with_layouts(family, processor, layouts)


def _of_folder(
    folder: Path, family: type[VisionFamily], numbers: dict[str, int], *, named: str | None
) -> tuple[VisionFamily, list[str]]:
    """Create a family from the settings of a folder and explicit sizes and limits.

    Returns:
        (family, a text for each setting of the folder that was overridden).
    """
    if (vision := family.from_folder(folder)) is not None:
        if numbers:
            names = ", ".join(f"`{name}`" for name in numbers)
            raise ConfigError(f"{family.__name__} reads its image settings only from {folder}. Remove {names}.")
        return vision, []
    processor = _installed(folder, {}, named)
    _check_like_qwen(folder, family, processor)
    own = {"patch_size": int(processor.patch_size), "merge_size": int(processor.merge_size)}
    own |= {"min_pixels": int(processor.size["shortest_edge"]), "max_pixels": int(processor.size["longest_edge"])}
    own["factor"] = own["patch_size"] * own["merge_size"]
    layouts = _layouts(family, numbers, (own["patch_size"], own["merge_size"]))
    sizes = _sizes(layouts) | {name: numbers[name] for name in ("min_pixels", "max_pixels") if name in numbers}
    _check_limits(sizes.get("min_pixels", own["min_pixels"]), sizes.get("max_pixels", own["max_pixels"]))
    overruled = [f"`{name}` {value} ({own[name]})" for name, value in numbers.items() if value != own[name]]
    if any(value != own[name] for name, value in sizes.items()):  # load it again: its constructor derives other sizes
        processor = _installed(folder, sizes, named)
    return _with_layouts(family, processor, layouts), overruled


def _check_like_qwen(folder: Path, family: type[VisionFamily], processor: Any) -> None:
    """Check that an image processor merges patches and that its `size` is a range of pixels.

    Raises:
        ConfigError: it does not; the message shows its size.
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
        f"shortest_edge and longest_edge (minimum and maximum pixels), patch_size and merge_size; {_NEXT_STEP}"
    )


def _with_layouts(family: type[VisionFamily], processor: Any, layouts: _Layouts) -> VisionFamily:
    vision = family(processor)
    vision.ambiguous_layouts = layouts if len(layouts) > 1 else ()
    return vision


def _check_limits(min_pixels: int, max_pixels: int, prefix: str = "") -> None:
    if min_pixels > max_pixels:
        raise ConfigError(f"`{prefix}min_pixels` must be at most `{prefix}max_pixels` {max_pixels}, got {min_pixels}.")


def _layouts(family: type[VisionFamily], numbers: dict[str, int], default: tuple[int, int]) -> _Layouts:
    """Compute (patch size, merge size) from `factor`, `patch_size` and `merge_size`, else from `default`.

    Raises:
        ConfigError: they contradict each other, or no patch and merge size make the factor.
    """
    factor, patch, merge = (numbers.get(name) for name in ("factor", "patch_size", "merge_size"))
    if factor is None:
        return ((patch or default[0], merge or default[1]),)
    # Candidates, most certain first: the missing size, the default, published layouts, published merge sizes.
    if patch is not None or merge is not None:
        candidates = [(patch or factor // (merge or 1), merge or factor // (patch or 1))]
    elif default[0] * default[1] == factor:
        candidates = [default]
    else:
        candidates = [layout for layout in family.layouts if layout[0] * layout[1] == factor]
        candidates = candidates or [(factor // m, m) for m in _MERGES]
    fitting = [(p, m) for p, m in candidates if p * m == factor]
    if not fitting:
        sizes = ", ".join(f"`{name}` {value}" for name, value in numbers.items() if not name.endswith("pixels"))
        raise ConfigError(f"`factor` must be patch size times merge size (2 or 3 unless it is set), got {sizes}.")
    return tuple(fitting)


def _sizes(layouts: _Layouts) -> dict[str, int]:
    """Arguments of an image processor. Several layouts become one without merging, which has the same lengths."""
    patch, merge = layouts[0]
    if len(layouts) > 1:
        patch, merge = patch * merge, 1
    return {"patch_size": patch, "merge_size": merge}


def _installed(folder: Path, values: dict[str, int], named: str | None) -> Any:
    """Load the image processor of a folder with other values; Qwen2-VL's if it is not installed but `named`.

    Raises:
        ConfigError: Transformers cannot load it.
    """
    try:
        # Transformers before 5.12 exports the name only if torchvision is installed.
        from transformers.models.auto.image_processing_auto import AutoImageProcessor

        return AutoImageProcessor.from_pretrained(str(folder), trust_remote_code=False, **values)
    except (OSError, ValueError, KeyError, TypeError, ImportError, AttributeError, RuntimeError) as error:
        if named is not None and not isinstance(error, RuntimeError):
            return _qwen_image_processor().from_pretrained(str(folder), **values)
        raise ConfigError(
            f"Transformers {installed('transformers')} cannot load the image processor of {folder}: "
            f"{why(error, 'set `vision_family`')}"
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
    # The processor class of tokenizer_config.json is the last that AutoProcessor reads.
    files = _json_files(folder, "config.json", _PROCESSOR, "preprocessor_config.json", "tokenizer_config.json")
    nested = "image_processor" in files.get(_PROCESSOR, {})
    preprocessor = files.get("preprocessor_config.json")
    # The settings of audio models are in the same file.
    is_audio = preprocessor is not None and "feature_extractor_type" in preprocessor
    has_images = preprocessor is not None and not (is_audio and "image_processor_type" not in preprocessor)
    return files if has_images or nested else {}


def _video_settings(folder: Path) -> dict[str, Any] | None:
    """Settings of the video processor of a folder, or None.

    Without a file for videos, AutoVideoProcessor reads the limits of images: 16,384 tokens for each frame of the
    published Qwen2-VL and Qwen2.5-VL, which no trainer uses.
    """
    files = _json_files(folder, _PROCESSOR, "video_preprocessor_config.json")
    nested = files.get(_PROCESSOR, {}).get("video_processor")
    return nested if nested is not None else files.get("video_preprocessor_config.json")


def _json_files(folder: Path, *names: str) -> dict[str, Any]:
    """JSON files of a folder by name, without those that it does not have."""
    files: dict[str, Any] = {}
    for path in (folder / name for name in names):
        if path.is_file():
            try:
                files[path.name] = json.loads(path.read_text(encoding="utf-8"))
            except ValueError as error:
                raise ConfigError(f"{path} is not valid JSON: {error}; fix or remove it") from error
    return files


def _family(settings: EncoderSettings, of_folder: dict[str, Any]) -> tuple[type[VisionFamily], list[str]]:
    """Select the family by explicit name, else by the most specific name in the folder.

    Less specific names never decide: 14 model types have the image processor of Qwen2-VL, and some of them the
    processor of Qwen3-VL, with other positions. For the same reason an `image_processor` that the folder names itself
    decides nothing.

    Returns:
        (family, texts for the user: the explicit name overrides the folder, or an image processor names the family).
    """
    own_names = _names(of_folder)
    own = _registered(own_names[0][1])
    explicit = settings.vision_family or settings.image_processor
    is_own = settings.vision_family is None and _plain(explicit) in [_plain(name) for _, name in own_names]
    if explicit is None or is_own:
        return own or ProcessorVision, []
    family = _registered(explicit)
    if family is None:
        raise _unknown(explicit)
    if family is own or not of_folder:
        return family, []
    option = "vision_family" if settings.vision_family is not None else "image_processor"
    return family, [f"`{option}` {explicit} ({own_names[0][1]})"]


def _names(of_folder: dict[str, Any]) -> list[tuple[str, Any]]:
    """(key, value) of each name of a model in the files of a folder, most specific first; at least one."""
    names = [(key, file[key]) for key in _NAMES for file in of_folder.values() if file.get(key)]
    return names or [("", "")]


def _registered(name: object) -> type[VisionFamily] | None:
    """Return the family of a model type, or of a processor or image processor."""
    base = re.sub("(image)?processor(fast|pil)?$", "", _plain(name))
    return next((family for family in vision_families() if base in family.names), None)


def _plain(name: object) -> str:
    return "".join(c for c in str(name).lower() if c.isalnum())


def _unknown(name: str, found: str = "") -> ConfigError:
    valid = ", ".join(sorted(family.names[0] for family in vision_families()))
    return ConfigError(
        f"unknown vision family {repr(name) if name else 'without a name'}{found}. Set `vision_family` to one of "
        f"{valid} if the model has the tokens and positions of that family, to {_NO_FAMILY} for text without images; "
        f"otherwise {_NEXT_STEP}."
    )
