"""VideoSettings: how many frames of a video a sample has, and their size; the functions that select and resize them.

    VideoInfo (frames, rate, size)  ─►  indices of frames (arange_indices, linspace_indices, uniform_indices)
                                    ─►  size of a resized frame (resized_size)
    decoded frames, one at a time   ─►  patches of the vision tower (FramePatches)

Settings have the names of the processors of Transformers and of qwen_vl_utils. Each of the three functions selects the
frames of one of them; tests compare the results with the installed processors. Nothing here opens a file.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from energon_packed.errors import ConfigError
from energon_packed.records.fields import is_number

if TYPE_CHECKING:
    import torch

Int64 = npt.NDArray[np.int64]
UInt8 = npt.NDArray[np.uint8]
FRAME_SETTINGS = ("fps", "num_frames", "min_frames", "max_frames")
PIXEL_SETTINGS = ("min_pixels", "max_pixels", "total_pixels")
_INTEGERS = (*FRAME_SETTINGS[1:], *PIXEL_SETTINGS, "min_total_pixels", "max_total_pixels")
_MOST_REPEATED = 1 << 16  # frames that `num_frames` selects from a shorter file
_MAX_RATIO = 200  # of the sides of a frame; from the Qwen processors
_BY_SECONDS = ((10, 8), (30, 16))  # (duration in seconds, frames of shorter videos), of LLaVA-OneVision-2
_FLOOR = 1.05  # a share of `total_pixels` is at least this multiple of `min_pixels`; from qwen_vl_utils


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoSettings:
    """Which frames of a video are selected, and how large they become.

    `num_frames` replaces `fps`: a video has either this many frames, or `fps` frames per second between `min_frames`
    and `max_frames`. Without both, its duration determines the number (`duration_indices`).

    Attributes:
        fps: selected frames per second of video.
        num_frames: number of selected frames.
        min_frames, max_frames: limits of the number of frames that `fps` selects.
        min_pixels, max_pixels: limits of a resized frame in pixels; None for no limit.
        total_pixels: limit of all resized frames of a video together; the frames of a temporal patch count as
            one frame, as in qwen_vl_utils; None for no limit.
        min_total_pixels, max_total_pixels: limits of all resized frames of a video together; every frame counts:
            `size` of Qwen3VLVideoProcessor.

    Raises:
        ConfigError: when made with an invalid value.
    """

    fps: float | None = None
    num_frames: int | None = None
    min_frames: int = 1
    max_frames: int = 768
    min_pixels: int | None = None
    max_pixels: int | None = None
    total_pixels: int | None = None
    min_total_pixels: int | None = None
    max_total_pixels: int | None = None

    def __post_init__(self) -> None:
        if self.fps is not None and not (is_number(self.fps) and 0 < self.fps < math.inf):
            raise ConfigError(f"`fps` must be a number above 0, got {self.fps!r}.")
        for name in _INTEGERS:
            value = getattr(self, name)
            if value is not None and not (is_number(value) and 1 <= value < math.inf and value == int(value)):
                raise ConfigError(f"`{name}` must be an integer of at least 1, got {value!r}.")
        if self.fps is not None and self.num_frames is not None:
            raise ConfigError(f"Set either `fps` or `num_frames`, got {self.fps!r} and {self.num_frames!r}.")

    def updated(self, values: Mapping[str, Any]) -> "VideoSettings":
        """Return the settings with other values.

        `fps` removes `num_frames`, and `num_frames` removes `fps`. A minimum above the present maximum raises the
        maximum, and a maximum below the present minimum lowers the minimum.

        Raises:
            ConfigError: an unknown name or invalid value.
        """
        values = {name: value for name, value in values.items() if value is not None}
        known = [field.name for field in fields(self)]
        if unknown := [name for name in values if name not in known]:
            raise ConfigError(f"unknown video setting {unknown[0]!r}. Valid names are {', '.join(known)}.")
        if "fps" in values and "num_frames" in values:
            got = f"{values['fps']!r} and {values['num_frames']!r}"
            raise ConfigError(f"Set either `fps` or `num_frames`, got {got}.")
        if "fps" in values:
            values["num_frames"] = None
        elif "num_frames" in values:
            values["fps"] = None
        result = replace(self, **values)
        for low, high in (("min_frames", "max_frames"), ("min_pixels", "max_pixels")):
            least, most = getattr(result, low), getattr(result, high)
            if least is None or most is None or least <= most:
                continue
            if low in values and high in values:
                raise ConfigError(f"`{low}` must be at most `{high}` {most}, got {least}.")
            result = replace(result, **({high: least} if low in values else {low: most}))
        return result

    def plain(self) -> dict[str, Any]:
        """Return the settings that are set, as plain values; limits of `fps` only with `fps`."""
        unused = () if self.num_frames is None else ("min_frames", "max_frames")
        return {name: value for name, value in asdict(self).items() if value is not None and name not in unused}


def arange_indices(num_frames: int, fps: float, settings: VideoSettings, temporal_patch_size: int) -> Int64:
    """Select frames as Qwen2VLVideoProcessor.sample_frames: equal steps from frame 0, whole temporal patches.

    Args:
        num_frames: frames of the file.
        fps: its frames per second.
        settings: settings of the video.
        temporal_patch_size: frames of a temporal patch.

    Returns:
        int64 (frames,), increasing.

    Raises:
        ValueError: the file has too few frames.
    """
    size = temporal_patch_size
    if settings.num_frames is not None:
        selected = round(settings.num_frames / size) * size
    else:
        assert settings.fps is not None
        most = math.floor(min(settings.max_frames, num_frames) / size) * size
        wanted = min(max(num_frames / fps * settings.fps, settings.min_frames), most, num_frames)
        selected = math.floor(wanted / size) * size
    if selected > num_frames:
        raise ValueError(
            f"`num_frames` must be at most the {num_frames} frames of the file, got {settings.num_frames}. "
            "Use `fps` and `max_frames` for videos of different lengths"
        )
    _check_count(selected, num_frames, size)
    # As torch.arange computes it: in float64, stored as float32. Its last value may be the number of frames itself,
    # for which the processor fails; it is dropped.
    steps = np.arange(0, num_frames, num_frames / selected)[:selected]
    return steps.astype(np.float32).astype(np.int64)


def linspace_indices(num_frames: int, fps: float, settings: VideoSettings, temporal_patch_size: int) -> Int64:
    """Select frames as Qwen3VLVideoProcessor.sample_frames: from the first to the last frame.

    More frames than the file has repeat some of them. Arguments as above.
    """
    if settings.num_frames is not None:
        selected = settings.num_frames
        if selected > (most := max(num_frames, _MOST_REPEATED)):
            raise ValueError(f"`num_frames` must be at most {most:,}, got {selected:,}. Use `fps` and `max_frames`")
    else:
        assert settings.fps is not None
        selected = int(num_frames / fps * settings.fps)
        selected = min(max(selected, settings.min_frames), settings.max_frames, num_frames)
    _check_count(selected, num_frames, temporal_patch_size)
    return np.linspace(0, num_frames - 1, selected).round().astype(np.int64)


def uniform_indices(num_frames: int, fps: float, settings: VideoSettings) -> Int64:
    """Select frames as `default_sample_indices_fn` of Transformers, at most all frames. Arguments as above."""
    if settings.num_frames is not None:
        selected = settings.num_frames
    else:
        assert settings.fps is not None
        selected = min(max(int(num_frames / fps * settings.fps), settings.min_frames), settings.max_frames)
    selected = min(selected, num_frames)
    return np.arange(selected, dtype=np.int64) * num_frames // selected


def duration_indices(num_frames: int, fps: float, settings: VideoSettings) -> Int64:
    """Select frames as LLaVA-OneVision-2: 8 frames below 10 seconds, 16 below 30, else `max_frames`, equally spaced.

    Args:
        num_frames: frames of the file.
        fps: its frames per second.
        settings: settings of the video; `num_frames` or `fps` replaces the number by duration.

    Returns:
        int64 (frames,), increasing: the first and the last frame and frames between them, or all frames of a file
        that has fewer.

    Source: `choose_target_frames` and `select_frame_indices` of EvolvingLMMs-Lab/LLaVA-OneVision-2.
    """
    seconds = num_frames / fps
    if settings.fps is not None:
        selected = min(max(settings.min_frames, int(seconds * settings.fps)), settings.max_frames)
    elif settings.num_frames is not None:
        selected = settings.num_frames
    else:
        selected = next((count for limit, count in _BY_SECONDS if seconds < limit), settings.max_frames)
    if num_frames <= selected:
        return np.arange(num_frames, dtype=np.int64)
    if selected == 1:
        return np.zeros(1, dtype=np.int64)
    # The values of torch.linspace in float32: up from the first frame, then down from the last in a single rounding.
    step = float(np.float32(num_frames - 1) / np.float32(selected - 1))
    up = np.arange(selected)
    values = np.where(up < selected // 2, step * up, num_frames - 1 - step * (selected - 1 - up))
    return np.rint(values.astype(np.float32)).astype(np.int64)


def _check_count(selected: int, num_frames: int, temporal_patch_size: int) -> None:
    if selected >= temporal_patch_size:
        return
    if num_frames < temporal_patch_size:
        frames = "1 frame" if num_frames == 1 else f"{num_frames} frames"
        raise ValueError(f"the file has {frames}, and a temporal patch {temporal_patch_size}. Use an image instead")
    raise ValueError(
        f"the settings select fewer of the {num_frames} frames of the file than the {temporal_patch_size} of a "
        "temporal patch. Raise `num_frames` or `max_frames`"
    )


def resized_size(
    height: int,
    width: int,
    factor: int,
    *,
    min_pixels: int,
    max_pixels: int,
    frames: int = 1,
    temporal_patch_size: int = 1,
) -> tuple[int, int]:
    """Size of a resized frame, as `smart_resize` of the video processors of Qwen2-VL and Qwen3-VL.

    Args:
        height, width: pixels of a frame.
        factor: pixels of a token side; both sides become multiples of it.
        min_pixels, max_pixels: limits of all `frames` together.
        frames: number of frames that share the limits: 1 for limits of a frame, as Qwen2-VL has.
        temporal_patch_size: frames of a temporal patch; the number of frames is rounded to a multiple of it.

    Returns:
        (height, width) in pixels.

    Raises:
        ValueError: one side is more than 200 times the other.
    """
    if max(height, width) / min(height, width) > _MAX_RATIO:
        raise ValueError(f"{width}x{height} pixels: a side must be at most {_MAX_RATIO} times the other. Crop it")
    high, wide = round(height / factor) * factor, round(width / factor) * factor
    rounded = round(frames / temporal_patch_size) * temporal_patch_size
    if rounded * high * wide > max_pixels:
        scale = math.sqrt((frames * height * width) / max_pixels)
        high = max(factor, math.floor(height / scale / factor) * factor)
        wide = max(factor, math.floor(width / scale / factor) * factor)
    elif rounded * high * wide < min_pixels:
        scale = math.sqrt(min_pixels / (frames * height * width))
        high = math.ceil(height * scale / factor) * factor
        wide = math.ceil(width * scale / factor) * factor
    return high, wide


def rounded_size(height: int, width: int, factor: int, *, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Size of a resized frame, as `smart_resize` in the video processor of LLaVA-OneVision-2. Arguments as above.

    Unlike Qwen's, it first makes a side at least `factor`, and does not keep it so when it reduces the frame.

    Raises:
        ValueError: a side of the resized frame has no pixels.
    """
    high, wide = (max(factor, round(side / factor) * factor) for side in (height, width))
    if high * wide > max_pixels:
        scale = math.sqrt((height * width) / max_pixels)
        high, wide = (math.floor(side / scale / factor) * factor for side in (height, width))
    elif high * wide < min_pixels:
        scale = math.sqrt(min_pixels / (height * width))
        high, wide = (math.ceil(side * scale / factor) * factor for side in (height, width))
    if high == 0 or wide == 0:
        raise ValueError(f"{width}x{height} pixels: too narrow for {max_pixels} pixels in steps of {factor}. Crop it")
    return high, wide


def resized_pixels(frame: UInt8, size: tuple[int, int]) -> UInt8:
    """Resize a frame, RGB, uint8 (height, width, 3), as `resize` of torchvision.transforms.functional: bicubic.

    It resizes in float32 and rounds, unlike `FramePatches`, whose processors resize uint8.
    """
    import torch
    from torch.nn.functional import interpolate

    if frame.shape[:2] == size:
        return frame
    image = torch.from_numpy(frame.astype(np.float32)).permute(2, 0, 1)[None]
    image = interpolate(image, size=size, mode="bicubic", align_corners=False, antialias=True)
    return image[0].clamp_(0, 255).round_().to(torch.uint8).permute(1, 2, 0).contiguous().numpy()


def enlarged(height: int, width: int, factor: int) -> tuple[int, int]:
    """Size of a frame whose shorter side is at least `factor`, as `smart_resize` of Qwen3-VL makes it first."""
    if height >= factor and width >= factor:
        return height, width
    scale = max(factor / height, factor / width)
    return int(height * scale), int(width * scale)


def frame_limit(share: int, min_pixels: int, max_pixels: int | None) -> int:
    """Limit of a frame in pixels: its share of the pixels of a video, at most `max_pixels`, not below `min_pixels`.

    Source: `cap_pixels_per_frame` of the Qwen video processors, and `fetch_video` of qwen_vl_utils.
    """
    return max(share if max_pixels is None else min(max_pixels, share), int(min_pixels * _FLOOR))


class FramePatches:
    """Patches of a video, filled frame by frame, so that memory has only the patches and a single frame.

    The values equal the video processors of Qwen2-VL and Qwen3-VL: bicubic resizing of uint8 with antialiasing,
    rescaling fused with normalization, and merged blocks of patches in row-major order.

    Args:
        frames: number of frames that will be added.
        size: (height, width) of a resized frame in pixels.
        patch_size, merge_size, temporal_patch_size: of the vision tower.
        mean, std: of each channel, for values of 0 to 1.
        rescale_factor: factor from 0..255 to 0..1.
    """

    def __init__(
        self,
        frames: int,
        size: tuple[int, int],
        *,
        patch_size: int,
        merge_size: int,
        temporal_patch_size: int,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        rescale_factor: float,
    ) -> None:
        import torch

        (high, wide), t, p, m = (side // patch_size for side in size), temporal_patch_size, patch_size, merge_size
        self.size, self.frames, self._temporal = size, frames, t
        self.grid = (-(-frames // t), high, wide)
        # In steps of time, block rows and columns, rows and columns in a block, channels, frames, rows and columns.
        self._patches = torch.empty((self.grid[0], high // m, wide // m, m, m, 3, t, p, p), dtype=torch.float32)
        # In float32, in the order of operations of `rescale_and_normalize` in Transformers.
        self._mean = (torch.tensor(mean) * (1.0 / rescale_factor)).view(3, 1, 1)
        self._std = (torch.tensor(std) * (1.0 / rescale_factor)).view(3, 1, 1)
        self._added = 0

    def add(self, frame: UInt8) -> None:
        """Add the next frame, RGB, uint8 (height, width, 3), of any size."""
        import torch
        from torch.nn.functional import interpolate

        if self._added >= self.frames:
            raise ValueError(f"`frames` must yield {self.frames} frames, got more.")
        image = torch.from_numpy(np.ascontiguousarray(frame)).permute(2, 0, 1).contiguous()
        if image.shape[1:] != self.size:
            # As torchvision resizes uint8 on a CPU.
            image = interpolate(image[None], size=self.size, mode="bicubic", align_corners=False, antialias=True)[0]
        values = image.to(torch.float32).sub_(self._mean).div_(self._std)
        _, rows, columns, m, _, _, t, p, _ = self._patches.shape
        blocks = values.view(3, rows, m, p, columns, m, p).permute(1, 4, 2, 5, 0, 3, 6)
        step, slot = divmod(self._added, t)
        self._added += 1
        last = t if self._added == self.frames else slot + 1  # the last frame is repeated to fill a temporal patch
        self._patches[step, :, :, :, :, :, slot:last] = blocks.unsqueeze(5)

    def values(self) -> "torch.Tensor":
        """Return the patches, float32 (patches, patch_dim).

        Raises:
            ValueError: frames are missing.
        """
        if self._added != self.frames:
            raise ValueError(f"`frames` must yield {self.frames} frames, got {self._added}.")
        return self._patches.view(math.prod(self.grid), -1)
