"""Generated images of coloured shapes with matching captions."""

import random
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw

COLOURS = {
    "red": (214, 48, 49),
    "green": (46, 158, 79),
    "blue": (52, 101, 218),
    "yellow": (241, 196, 15),
    "purple": (142, 68, 173),
    "orange": (230, 126, 34),
}
SHAPES = ("circle", "square", "triangle")
FORMATS = ("jpg", "png", "webp", "gif", "bmp")
_EXIF_ORIENTATION = 0x0112


@dataclass(frozen=True, slots=True)
class Picture:
    """A generated image.

    Attributes:
        name: file name.
        figures: (colour, shape) of each figure, from left to right.
    """

    name: str
    figures: tuple[tuple[str, str], ...]

    def description(self) -> str:
        """Caption that lists the figures from left to right."""
        words = [f"a {colour} {shape}" for colour, shape in self.figures]
        listed = words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]
        return f"From left to right the picture shows {listed}."

    def count(self, shape: str) -> int:
        """Number of figures of this shape."""
        return sum(kind == shape for _, kind in self.figures)


def draw_picture(rng: random.Random, folder: Path, stem: str) -> Picture:
    """Draw one to four figures into a file of random size, format and EXIF orientation."""
    width, height = rng.randint(60, 640), rng.randint(60, 480)
    figures = tuple((rng.choice(list(COLOURS)), rng.choice(SHAPES)) for _ in range(rng.randint(1, 4)))
    image = Image.new("RGB", (width, height), (250, 249, 245))
    pen = ImageDraw.Draw(image)
    cell = width / len(figures)
    radius = 0.4 * min(cell, height)
    for place, (colour, shape) in enumerate(figures):
        x, y = cell * (place + 0.5), height / 2
        box = (x - radius, y - radius, x + radius, y + radius)
        if shape == "circle":
            pen.ellipse(box, fill=COLOURS[colour])
        elif shape == "square":
            pen.rectangle(box, fill=COLOURS[colour])
        else:
            pen.polygon([(x, box[1]), (box[0], box[3]), (box[2], box[3])], fill=COLOURS[colour])
    extension = rng.choice(FORMATS)
    name = f"{stem}.{extension}"
    if extension == "jpg" and rng.random() < 0.4:
        # Store the image rotated with an EXIF orientation tag, as phone cameras do.
        exif = Image.Exif()
        exif[_EXIF_ORIENTATION] = 6
        image.transpose(Image.Transpose.ROTATE_90).save(folder / name, exif=exif)
    else:
        image.save(folder / name)
    return Picture(name, figures)
