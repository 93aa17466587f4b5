"""load_audio: EncoderSettings (a processor folder) -> AudioFamily."""

import json
from pathlib import Path
from typing import Any

from energon_packed.encoding.audio.families import RULES, AudioFamily
from energon_packed.encoding.pretrained import find_pretrained, load_processor
from energon_packed.encoding.settings import EncoderSettings
from energon_packed.errors import ConfigError
from energon_packed.system import announced, no_collecting

_PROCESSOR, _PREPROCESSOR = "processor_config.json", "preprocessor_config.json"


@announced("loading the audio processor")
@no_collecting()
def load_audio(settings: EncoderSettings) -> AudioFamily | None:
    """Load the audio family of a processor folder.

    The folder is `processor`, or else `tokenizer`.

    Returns:
        The family; None if the folder has no feature extractor, or its processor is not in `RULES`.

    Raises:
        ConfigError: Transformers cannot load the processor, or it does not follow its rules, or it does not write the
            tokens of audio tracks and `load_audio_from_video` is set.
    """
    source = settings.processor or settings.tokenizer
    if source is None:
        return None
    folder = find_pretrained(source)
    name = _processor_name(folder)
    tracks = settings.load_audio_from_video
    if tracks and (name not in RULES or not RULES[name].has_tracks):
        raise ConfigError(
            f"`load_audio_from_video` must be False for {name or folder}, which does not write the tokens of an audio "
            "track into a video. Remove it."
        )
    if name not in RULES:
        return None
    truncates = settings.long_audio == "truncate"
    return AudioFamily(load_processor(folder), RULES[name], truncates=truncates, uses_tracks=tracks)


def _processor_name(folder: Path) -> str:
    """Class of the processor in a folder with a feature extractor; "" without."""
    files: dict[str, Any] = {}
    for path in (folder / _PROCESSOR, folder / _PREPROCESSOR):
        try:
            value = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        except ValueError as error:
            raise ConfigError(f"{path} is not valid JSON: {error}; fix or remove it") from error
        files[path.name] = value if isinstance(value, dict) else {}
    has_audio = "feature_extractor" in files[_PROCESSOR] or "feature_extractor_type" in files[_PREPROCESSOR]
    names = [str(file["processor_class"]) for file in files.values() if file.get("processor_class")]
    return names[0] if has_audio and names else ""
