"""Draw the videos of the demo dataset: a random generator and a folder in, a short video and its description out.

A figure moves, or changes its color at a full second. Containers and codecs differ, and so do rotation, frame rate and
audio, as in real data.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from energon_packed.demo.videos import ROTATIONS, set_matrix, write_video

DIRECTIONS = {
    "from left to right": (1, 0),
    "from right to left": (-1, 0),
    "from top to bottom": (0, 1),
    "from bottom to top": (0, -1),
}
_BACKGROUND = (250, 249, 245)
_VP9 = {"codec": "libvpx-vp9", "options": {"deadline": "realtime", "cpu-used": "8"}}
# (extension, settings of the writer, clockwise rotation stored in the header); videos cycle through them.
_KINDS: tuple[tuple[str, dict[str, Any], int], ...] = (
    ("mp4", {"codec": "libx264"}, 0),
    ("webm", _VP9, 0),
    ("mov", {"codec": "libx264"}, 90),
    ("mkv", {"codec": "libx264", "audio": True}, 0),
    ("avi", {"codec": "mpeg4"}, 0),
    ("mp4", {"codec": "libx264", "muxer_options": {"movflags": "frag_keyframe+empty_moov+default_base_moof"}}, 0),
)
_VARIABLE = 3  # every third video has a variable frame rate
_LEFT_OUT = 0.3  # share of its frames that are not stored


@dataclass(frozen=True, slots=True)
class DemoVideo:
    """A generated video.

    Attributes:
        name: file name.
        shape: its figure.
        colors: colors of the figure, in order.
        seconds: time of each change of the color.
        direction: direction of the figure's movement, a key of `DIRECTIONS`; None if it does not move.
    """

    name: str
    shape: str
    colors: tuple[str, ...]
    seconds: tuple[int, ...] = ()
    direction: str | None = None

    def description(self) -> str:
        """Caption of the video."""
        if self.direction is not None:
            return f"A {self.colors[0]} {self.shape} moves {self.direction}."
        changes = [f"{color} after {second} s" for color, second in zip(self.colors[1:], self.seconds, strict=True)]
        return f"A {self.shape} is {self.colors[0]} at first, and {' and '.join(changes)}."


def draw_moving(rng: random.Random, folder: Path, stem: str, index: int, colors: dict[str, Any]) -> DemoVideo:
    """Draw a figure that moves across the video.

    Args:
        rng: source of the values of the video.
        folder: folder of the file.
        stem: name of the file without its extension.
        index: index of the video, which selects container, codec, rotation, frame rate and audio.
        colors: RGB values by name.
    """
    direction = rng.choice(list(DIRECTIONS))
    shape, color = rng.choice(("circle", "square")), rng.choice(list(colors))
    across, down = DIRECTIONS[direction]
    seconds = rng.randint(2, 4)

    def figure(time: float, width: int, height: int) -> tuple[float, float, str]:
        way = 0.8 * (time / seconds - 0.5)  # from -0.4 to 0.4 of the side
        return width * (0.5 + across * way), height * (0.5 + down * way), color

    name = _write(rng, folder, stem, index, seconds, shape, colors, figure)
    return DemoVideo(name, shape, (color,), direction=direction)


def draw_changing(rng: random.Random, folder: Path, stem: str, index: int, colors: dict[str, Any]) -> DemoVideo:
    """Draw a figure that changes its color one or two times. Arguments as of `draw_moving`."""
    shape, seconds = rng.choice(("circle", "square")), rng.randint(3, 6)
    changes = tuple(sorted(rng.sample(range(1, seconds), rng.randint(1, 2))))
    names = tuple(rng.sample(list(colors), len(changes) + 1))

    def figure(time: float, width: int, height: int) -> tuple[float, float, str]:
        return width / 2, height / 2, names[sum(time >= change for change in changes)]

    name = _write(rng, folder, stem, index, seconds, shape, colors, figure)
    return DemoVideo(name, shape, names, changes)


def _write(
    rng: random.Random, folder: Path, stem: str, index: int, seconds: int, shape: str, colors: Any, figure: Any
) -> str:
    """Write a video of `figure(time, width, height)` (x, y, color), and return its name."""
    extension, settings, rotation = _KINDS[index % len(_KINDS)]
    width, height = (16 * rng.randint(5, 12) for _ in range(2))
    fps = rng.choice((8, 10, 12))
    times = list(range(fps * seconds))
    is_variable = index % _VARIABLE == 1
    if is_variable:  # the first frame stays, so that the conversation has the times of the video
        times = [time for time in times if time == 0 or rng.random() >= _LEFT_OUT]

    def frames() -> Iterator[NDArray[np.uint8]]:
        for time in times:
            image = Image.new("RGB", (width, height), _BACKGROUND)
            x, y, color = figure(time / fps, width, height)
            radius = 0.12 * min(width, height)
            draw = ImageDraw.Draw(image)
            (draw.ellipse if shape == "circle" else draw.rectangle)(
                (x - radius, y - radius, x + radius, y + radius), fill=colors[color]
            )
            # Phones store frames as the sensor has them, and the rotation for players in the header.
            yield np.ascontiguousarray(np.rot90(np.asarray(image), rotation // 90))

    path = folder / f"{stem}.{extension}"
    write_video(path, frames(), fps=fps, times=times if is_variable else None, **settings)
    if rotation:
        stored = (height, width) if rotation in (90, 270) else (width, height)
        set_matrix(path, *ROTATIONS[rotation], *stored)
    return path.name
