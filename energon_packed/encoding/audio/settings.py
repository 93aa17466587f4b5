"""load_audio: EncoderSettings (a processor folder) -> AudioFamily."""

import json
from pathlib import Path
from typing import Any

from energon_packed.encoding.audio.families import AudioFamily
from energon_packed.encoding.pretrained import find_pretrained, load_processor
from energon_packed.encoding.settings import EncoderSettings
from energon_packed.errors import ConfigError
from energon_packed.system import announced, no_collecting

_PROCESSOR, _PREPROCESSOR, _CONFIG = "processor_config.json", "preprocessor_config.json", "config.json"
_PARTS = ("feature_extractor", "audio_processor")


@announced("loading the audio processor")
@no_collecting()
def load_audio(settings: EncoderSettings) -> AudioFamily | None:
    """Load the audio family of a processor folder.

    The folder is `processor`, or else `tokenizer`.

    Returns:
        The family; None if the folder has no feature extractor, or if its processor is not supported: its text and
        its images can be used without audio. `audio_problem` says why.

    Raises:
        ConfigError: `load_audio_from_video` is set, and the processor is not supported, or does not write the tokens
            of audio tracks.
    """
    folder, model_type = _audio_folder(settings)
    truncates, tracks = settings.long_audio == "truncate", settings.load_audio_from_video
    family = None
    if folder is not None:
        try:
            processor = load_processor(folder)
            family = AudioFamily(processor, truncates=truncates, uses_tracks=tracks, model_type=model_type)
        except ConfigError:
            if tracks:
                raise
    if tracks and (family is None or not family.rules.has_tracks):
        name = family.name if family else settings.processor or settings.tokenizer
        raise ConfigError(
            f"`load_audio_from_video` must be False for {name}, which does not write the tokens of an audio track "
            "into a video. Remove it."
        )
    return family


def audio_problem(settings: EncoderSettings) -> str:
    """Why `load_audio` returns None for a folder with a feature extractor; "" without such a folder."""
    folder, model_type = _audio_folder(settings)
    if folder is None:
        return ""
    try:
        AudioFamily(load_processor(folder), model_type=model_type)
    except ConfigError as error:
        return str(error)
    return ""


def _audio_folder(settings: EncoderSettings) -> tuple[Path | None, str]:
    """(folder with a feature extractor or None, model type of its config.json or "")."""
    source = settings.processor or settings.tokenizer
    if source is None:
        return None, ""
    folder = find_pretrained(source)
    files: dict[str, Any] = {}
    for path in (folder / name for name in (_PROCESSOR, _PREPROCESSOR, "tokenizer_config.json", _CONFIG)):
        try:
            value = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        except ValueError as error:
            raise ConfigError(f"{path} is not valid JSON: {error}; fix or remove it") from error
        files[path.name] = value if isinstance(value, dict) else {}
    has_audio = any(part in files[_PROCESSOR] for part in _PARTS) or "feature_extractor_type" in files[_PREPROCESSOR]
    has_class = any(file.get("processor_class") for file in files.values())
    return (folder, str(files[_CONFIG].get("model_type", ""))) if has_audio and has_class else (None, "")
