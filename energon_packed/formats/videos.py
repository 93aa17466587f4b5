"""Selected frames of videos as JSON, and back; names of the parts of videos.

    vid{i}_{j}.{ext}       video file j of sample i, as it is, or
    vid{i}_{j}_{k}.{ext}   its selected frame k as an image, of `pack --extract-frames`

`video_files` lists the videos of a sample, in order. Each has

    part, or parts      name of the file, or names of the images of the frames
    frames              indices of the selected frames in order of presentation, from 0; not decreasing
    timestamps          time of each of them in seconds after frame 0
    fps, num_frames     average frames per second, and frames, of the file
    size                [height, width] of an upright frame
    resized             [height, width] that frames are resized to; null if they are resized as images are
    settings            settings that selected the frames, by the names of the processors
    images_before       of tokenized samples with images: number of their images before the video

The restart state of `pack` has the same fields without the parts (`frames_as_dict`, `frames_from_dict`).
"""

import math
import re
from collections.abc import Mapping
from typing import Any

from energon_packed.files import of_type
from energon_packed.options import short
from energon_packed.records import FrameSelection

_LARGEST_FRAME = 178_956_970  # pixels, of a frame as it is and resized, as of the largest image
_PART = re.compile(r"vid\d+_\d+(_\d+)?\.\w+")


def is_video_part(name: str) -> bool:
    """Return whether a part is a video file or a frame of a video."""
    return _PART.fullmatch(name) is not None


def frames_as_dict(frames: FrameSelection) -> dict[str, Any]:
    """Return selected frames as JSON."""
    return {
        "frames": frames.indices,
        "timestamps": frames.timestamps,
        "fps": frames.fps,
        "num_frames": frames.num_frames,
        "size": [frames.height, frames.width],
        "resized": frames.resized,
        "settings": frames.settings,
    }


def frames_from_dict(value: Mapping[str, Any]) -> FrameSelection:
    """Return the frames of `frames_as_dict`, from untrusted JSON.

    Raises:
        ValueError, KeyError: the frames are not frames of a video; the message has the value.
    """
    num_frames, fps = _integer(of_type(value, dict, "an entry of videos")["num_frames"]), _number(value["fps"])
    indices = tuple([_integer(index) for index in of_type(value["frames"], list, "frames")])
    timestamps = tuple([_number(time) for time in of_type(value["timestamps"], list, "timestamps")])
    if not indices or list(indices) != sorted(indices) or not 0 <= indices[0] <= indices[-1] < num_frames:
        raise ValueError(f"frames are {short(value['frames'])}, of a video with {num_frames}")
    if len(timestamps) != len(indices) or not all(map(math.isfinite, timestamps)):
        raise ValueError(f"timestamps of {len(indices)} frames are {short(value['timestamps'])}")
    if not math.isfinite(fps) or fps <= 0:
        raise ValueError(f"fps is {fps}")
    if not isinstance(value["settings"], dict):
        raise ValueError(f"settings are {short(value['settings'])}")
    height, width = _size(value["size"])
    return FrameSelection(
        indices=indices,
        timestamps=timestamps,
        fps=fps,
        num_frames=num_frames,
        height=height,
        width=width,
        resized=None if value["resized"] is None else _size(value["resized"]),
        settings=value["settings"],
    )


def _integer(value: Any) -> int:
    if type(value) is not int:  # True is an int of Python
        raise ValueError(f"{short(value)} is not an integer")
    return value


def _number(value: Any) -> float:
    return float(value if isinstance(value, int) else of_type(value, float, "a number"))


def _size(value: Any) -> tuple[int, int]:
    height, width = [_integer(side) for side in of_type(value, list, "a size")]
    # Before memory is allocated for it: a resized frame has this size, whatever the file is.
    if height < 1 or width < 1 or height * width > _LARGEST_FRAME:
        raise ValueError(f"a frame has {height} x {width} pixels")
    return height, width
