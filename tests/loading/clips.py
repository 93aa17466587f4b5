"""Samples with text, images and videos for tiny Qwen-VL models: random pixels, tokens as the processors write them.

Positions come from `get_rope_index` of the model, and from nothing of this package.
"""

from typing import Any

import numpy as np
import torch

from energon_packed import EncodedSample

MODELS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
ROW = ("text", "video", "image", "image video image", "text", "video video", "video image")


class Clips:
    """Makes samples for a model.

    Args:
        name: one of `MODELS`.
        model: a tiny model.
        seed: seed of tokens, sizes and pixels.
    """

    def __init__(self, name: str, model: Any, seed: int = 0) -> None:
        self._has_seconds, self._has_timestamps = name == "qwen2_5_vl", name == "qwen3_vl"
        self.model, self.config = model, model.config
        self._rng = np.random.default_rng(seed)
        special = [
            getattr(self.config, f"{token}_token_id") for token in ("image", "video", "vision_start", "vision_end")
        ]
        self._text_tokens = np.setdiff1d(np.arange(self.config.get_text_config().vocab_size), special)
        self._number = 0

    def samples(self, kinds: tuple[str, ...] = ROW) -> list[EncodedSample]:
        """A sample for each list of media, such as "image video"; "text" is a sample without media."""
        return [self.sample(kind) for kind in kinds]

    def sample(self, kind: str) -> EncodedSample:
        """A sample of some text and these media, in their order."""
        self._number += 1
        media = [] if kind == "text" else kind.split()
        parts, grids = [self._text(12)], {"image": list[list[int]](), "video": list[list[int]]()}
        for medium in media:
            grid = [self._between(2, 4) if medium == "video" else 1, 2 * self._between(1, 3), 2 * self._between(1, 4)]
            grids[medium].append(grid)
            parts += [*self._run(medium, grid), self._text(9)]
        ids = np.concatenate(parts)
        seconds = self._rng.uniform(0.3, 3.0, len(grids["video"])) if grids["video"] and self._has_seconds else None
        labels = np.where((self._rng.random(len(ids)) < 0.6) & np.isin(ids, self._text_tokens), ids, -100)
        labels[-1] = ids[-1]
        image, video = (self._grids(grids[medium]) for medium in ("image", "video"))
        return EncodedSample(
            id=f"{self._number} {kind}",
            input_ids=ids,
            labels=labels,
            image_token_id=self.config.image_token_id,
            video_token_id=self.config.video_token_id,
            image_grid_thw=image,
            video_grid_thw=video,
            pixel_values=self._pixels(image),
            pixel_values_videos=self._pixels(video),
            second_per_grid_ts=seconds,
            position_ids=self.positions(ids, image, video, seconds),
        )

    def positions(self, ids: Any, image: Any, video: Any, seconds: Any) -> Any:
        """Positions of a sample by the model, int64 (3, L)."""
        optional = {} if seconds is None else {"second_per_grid_ts": torch.tensor(seconds, dtype=torch.float32)}
        positions, _ = self.model.model.get_rope_index(
            input_ids=torch.from_numpy(ids)[None],
            mm_token_type_ids=self.types(ids),
            image_grid_thw=image,
            video_grid_thw=None if video is None else video.clone(),  # Qwen3-VL changes it
            **optional,
        )
        return positions[:, 0].numpy()

    def alone(self, sample: EncodedSample) -> Any:
        """Output of the model for one sample, called with the arguments that the processor returns."""
        arguments: dict[str, Any] = {
            "input_ids": torch.from_numpy(sample.input_ids)[None],
            "labels": torch.from_numpy(sample.labels)[None],
            "mm_token_type_ids": self.types(sample.input_ids),
            "use_cache": False,
        }
        for name in ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw"):
            if (value := getattr(sample, name)) is not None:
                arguments[name] = value
        if sample.second_per_grid_ts is not None:
            arguments["second_per_grid_ts"] = torch.tensor(sample.second_per_grid_ts, dtype=torch.float32)
        return self.model(**arguments)

    def types(self, ids: Any) -> torch.Tensor:
        """`mm_token_type_ids` of a sample: 0 text, 1 image, 2 video."""
        tokens = torch.from_numpy(ids)[None]
        return (tokens == self.config.image_token_id).int() + 2 * (tokens == self.config.video_token_id).int()

    def _run(self, medium: str, grid: list[int]) -> list[Any]:
        """Tokens of an image or a video between its start and end tokens."""
        token = self.config.image_token_id if medium == "image" else self.config.video_token_id
        start, end = self.config.vision_start_token_id, self.config.vision_end_token_id
        steps, height, width = grid
        frame = height * width // 4
        if medium == "video" and self._has_timestamps:  # a timestamp before each step of the grid
            return [part for _ in range(steps) for part in (self._text(4), [start, *[token] * frame, end])]
        return [[start, *[token] * (steps * frame), end]]

    def _between(self, low: int, high: int) -> int:
        return int(self._rng.integers(low, high + 1))

    def _text(self, most: int) -> Any:
        return self._rng.choice(self._text_tokens, self._between(2, most))

    @staticmethod
    def _grids(grids: list[list[int]]) -> torch.Tensor | None:
        return torch.tensor(grids) if grids else None

    def _pixels(self, grids: torch.Tensor | None) -> torch.Tensor | None:
        if grids is None:
            return None
        vision = self.config.vision_config
        columns = 3 * vision.temporal_patch_size * vision.patch_size**2
        return torch.from_numpy(self._rng.standard_normal((int(grids.prod(dim=1).sum()), columns)).astype(np.float32))
