"""ModelClass: what the class of a model needs besides its processor's tensors: argument names and M-RoPE positions.

The class is found by the config.json of a model folder. Weights are neither read nor created: positions come from the
class's own `get_rope_index`, which reads the configuration only.
"""

import inspect
from pathlib import Path
from typing import Any

import numpy as np

from energon_packed.encoding.vision.positions import Int64, MediaTokens
from energon_packed.errors import ConfigError, Reason, RecordError

# Grids of the images, or of the images and their slices (MiniCPM-V 4.7).
_GRIDS = ("image_grid_thw", "target_sizes")
_SECONDS = "second_per_grids"  # of each video, argument of Omni models


class ModelClass:
    """The Transformers class of a vision-language model.

    Attributes:
        model_type: its name in config.json.
        arguments: names of the arguments of its forward pass.
        position_axes: number of axes of its M-RoPE positions; 0 if positions are 0..L-1.
        places_audio: whether it has M-RoPE positions for audio.
        grids: tensor of the processor from which M-RoPE positions follow; "" if positions are 0..L-1.
    """

    def __init__(self, config: Any, model: type[Any]) -> None:
        import torch

        self.model_type = str(config.model_type)
        self.arguments = frozenset(inspect.signature(model.forward).parameters)
        self._positions: Any = None
        self.position_axes, self.grids, self.places_audio = 0, "", False
        if (owner := _owner(config, model)) is None:
            return
        taken = inspect.signature(owner.get_rope_index).parameters
        self.grids = next((name for name in _GRIDS if name in taken), "")
        self.places_audio = "audio_seqlens" in taken
        if not self.grids:
            raise ConfigError(f"{owner.__name__} computes positions without {' or '.join(_GRIDS)}")
        token = np.zeros(1, dtype=np.int64)
        # An instance without its parts: the function of most classes reads `config` alone.
        self._positions = object.__new__(owner)
        torch.nn.Module.__init__(self._positions)
        self._positions.config = config
        try:
            self.position_axes = len(self._rope_index(token, MediaTokens(-1)))
        except AttributeError:
            with torch.device("meta"):  # without memory for weights
                self._positions = owner(config)
            self.position_axes = len(self._rope_index(token, MediaTokens(-1)))

    @classmethod
    def of(cls, folder: Path) -> "ModelClass | None":
        """Find the class of a model folder; None if its config.json is missing or of no vision-language model."""
        if not (folder / "config.json").is_file():
            return None
        from transformers import CONFIG_MAPPING, AutoConfig
        from transformers.models.auto import modeling_auto as auto

        try:
            config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
        except Exception as error:  # whatever a configuration class raises
            detail = " ".join(str(error).split())[:200]
            raise ConfigError(f"Transformers cannot read {folder / 'config.json'}: {detail}") from error
        config = getattr(config, "thinker_config", config)  # the part of an Omni model that is trained on text
        for mapping in (auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, auto.MODEL_FOR_MULTIMODAL_LM_MAPPING):
            if config.model_type in CONFIG_MAPPING and type(config) in mapping:
                found = mapping[type(config)]
                return cls(config, found[0] if isinstance(found, tuple) else found)
        return None

    @property
    def video_problem(self) -> str:
        """Reason why positions of videos cannot be computed, or ""."""
        if not self.position_axes:
            return ""
        taken = inspect.signature(self._positions.get_rope_index).parameters
        name = type(self._positions).__name__
        if "video_grid_thw" not in taken:
            return f"{name} computes positions without video_grid_thw"
        seconds = [argument for argument in taken if "second" in argument and argument != _SECONDS]
        return f"{name} computes positions with {seconds[0]}" if seconds else ""

    def position_ids(self, input_ids: Int64, media: MediaTokens, types: Int64 | None = None) -> Int64 | None:
        """Positions of a sample by the model's `get_rope_index`, int64 (axes, L); None for positions 0..L-1.

        Args:
            input_ids: int64 (L,).
            media: images, videos and audio of the sample.
            types: int64 (L,), 1 for tokens of images and 2 for tokens of videos; None without videos.

        Raises:
            RecordError: `unsupported_media`, if the function cannot separate the images, such as images without any
                token between them, or if positions are not whole numbers.
        """
        if self._positions is None:
            return None
        try:
            return self._rope_index(input_ids, media, types)
        except (ValueError, RuntimeError, StopIteration, IndexError, TypeError) as error:
            detail = f"{type(self._positions).__name__} has no positions for this sample: {error}"
            raise RecordError(Reason.UNSUPPORTED_MEDIA, " ".join(detail.split())[:300]) from error

    def _rope_index(self, input_ids: Int64, media: MediaTokens, types: Int64 | None = None) -> Int64:
        import torch

        taken = inspect.signature(self._positions.get_rope_index).parameters
        arguments: dict[str, Any] = {self.grids: torch.from_numpy(media.grids) if len(media.grids) else None}
        if len(media.video_grids):
            arguments["video_grid_thw"] = torch.from_numpy(media.video_grids)
        if "mm_token_type_ids" in taken:
            types = input_ids == media.image_token_id if types is None else types
            arguments["mm_token_type_ids"] = torch.from_numpy(types.astype(np.int32))[None]
        if "attention_mask" in taken:
            arguments["attention_mask"] = torch.ones((1, len(input_ids)), dtype=torch.int64)
        if _SECONDS in taken and media.second_per_grid_ts is not None:
            arguments[_SECONDS] = torch.from_numpy(media.second_per_grid_ts)
        if self.places_audio and media.audio_frames is not None:
            arguments["audio_seqlens"] = torch.from_numpy(media.audio_frames)
            if media.has_tracks:
                arguments["use_audio_in_video"] = True
        positions, _ = self._positions.get_rope_index(torch.from_numpy(input_ids)[None], **arguments)
        found = positions[:, 0].numpy()
        whole = found.astype(np.int64)
        if not (whole == found).all():  # of Qwen3-Omni, which computes them in float32
            raise ValueError("positions in time are not whole numbers. Set another `fps`, such as 1 or 2")
        return np.asarray(whole)


def _owner(config: Any, model: type[Any]) -> type[Any] | None:
    """The class with `get_rope_index`: the model with a head, or the base model of the same configuration."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    candidates = [model, *([MODEL_MAPPING[type(config)]] if type(config) in MODEL_MAPPING else [])]
    return next((owner for owner in candidates if hasattr(owner, "get_rope_index")), None)
