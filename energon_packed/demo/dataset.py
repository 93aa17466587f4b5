"""Generate the demo dataset: a folder and a seed in, data.jsonl and its images and videos out.

The conversations are about generated images and videos and simple arithmetic, in several record formats. Some records
are invalid on purpose. The same seed always results in the same records.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from energon_packed.demo.clips import draw_changing, draw_moving

Record = dict[str, Any]
_PLACES = ("library", "harbour", "market", "workshop", "garden", "station", "kitchen", "observatory")
_PEOPLE = ("Ada", "Kofi", "Mei", "Ines", "Omar", "Ravi", "Lena", "Tomas")
_THINGS = ("lantern", "map", "clock", "bicycle", "letter", "kettle", "violin", "telescope")
COLORS = {
    "red": (214, 48, 49),
    "green": (46, 158, 79),
    "blue": (52, 101, 218),
    "yellow": (241, 196, 15),
    "purple": (142, 68, 173),
    "orange": (230, 126, 34),
}
SHAPES = ("circle", "square", "triangle")
FORMATS = ("jpg", "png", "webp", "gif", "bmp")
_EXIF_ORIENTATION = 0x0112  # tag of EXIF


@dataclass(frozen=True, slots=True)
class DemoImage:
    """A generated image.

    Attributes:
        name: file name.
        figures: (color, shape) of each figure, from left to right.
    """

    name: str
    figures: tuple[tuple[str, str], ...]

    def description(self) -> str:
        """Caption that lists the figures from left to right."""
        words = [f"a {color} {shape}" for color, shape in self.figures]
        listed = words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]
        return f"From left to right the picture shows {listed}."

    def count(self, shape: str) -> int:
        """Number of figures of this shape."""
        return sum(kind == shape for _, kind in self.figures)


def draw_image(rng: random.Random, folder: Path, stem: str) -> DemoImage:
    """Draw one to four figures, and save the image with a random size, format and EXIF orientation."""
    width, height = rng.randint(60, 640), rng.randint(60, 480)
    figures = tuple((rng.choice(list(COLORS)), rng.choice(SHAPES)) for _ in range(rng.randint(1, 4)))
    image = Image.new("RGB", (width, height), (250, 249, 245))
    pen = ImageDraw.Draw(image)
    cell = width / len(figures)
    # Each figure is in its own cell, with a margin.
    radius = 0.4 * min(cell, height)
    for position, (color, shape) in enumerate(figures):
        x, y = cell * (position + 0.5), height / 2
        box = (x - radius, y - radius, x + radius, y + radius)
        if shape == "circle":
            pen.ellipse(box, fill=COLORS[color])
        elif shape == "square":
            pen.rectangle(box, fill=COLORS[color])
        else:
            pen.polygon([(x, box[1]), (box[0], box[3]), (box[2], box[3])], fill=COLORS[color])
    extension = rng.choice(FORMATS)
    name = f"{stem}.{extension}"
    if extension == "jpg" and rng.random() < 0.4:
        # Store the image rotated with an EXIF orientation tag, as phone cameras do.
        exif = Image.Exif()
        exif[_EXIF_ORIENTATION] = 6
        image.transpose(Image.Transpose.ROTATE_90).save(folder / name, exif=exif)
    else:
        image.save(folder / name)
    return DemoImage(name, figures)


@dataclass(frozen=True, slots=True)
class DemoDataset:
    """Result of `write_dataset`.

    Attributes:
        jsonl: file with the records.
        records: number of lines.
        broken: number of invalid lines.
        texts: all strings of the valid records, for tokenizer training.
    """

    jsonl: Path
    records: int
    broken: int
    texts: list[str]


def write_dataset(
    folder: Path, *, records: int = 400, broken: int = 6, seed: int = 0, videos: bool = False
) -> DemoDataset:
    """Write `records` lines to `folder/data.jsonl`, their images to `folder/images` and videos to `folder/videos`.

    Args:
        folder: created if missing.
        records: number of lines, including invalid lines.
        broken: number of invalid lines: malformed JSON, missing and truncated images, unknown roles and others.
        seed: the same seed produces the same files.
        videos: three of ten records have videos, and two of eight invalid records.

    Raises:
        ConfigError: `videos` without PyAV.
    """
    rng = random.Random(seed)
    images = folder / "images"
    images.mkdir(parents=True, exist_ok=True)
    # The records cycle through all formats, so that a dataset of any size contains each of them.
    makers = [_text_only, _story, _caption, _compare, _typed_parts, _several_turns, _sharegpt]
    if videos:
        (folder / "videos").mkdir(exist_ok=True)
        makers += [_moving_video, _changing_video, _video_and_image]
    lines, texts = [], []
    for index in range(records - broken):
        record = makers[index % len(makers)](rng, images, index)
        record["id"] = f"demo-{index:05d}"
        lines.append(json.dumps(record))
        texts += _strings(record)
    bad = _broken_lines(images) + (_broken_videos(folder / "videos") if videos else [])
    return write_lines(folder, lines, texts, bad, broken, rng)


def write_lines(
    folder: Path, lines: list[str], texts: list[str], bad: Sequence[str], broken: int, rng: random.Random
) -> DemoDataset:
    """Write valid lines to `folder/data.jsonl`, and `broken` of the lines `bad` among them, as in real data."""
    for index in range(broken):
        lines.insert(rng.randrange(len(lines) + 1), bad[index % len(bad)])
    path = folder / "data.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return DemoDataset(path, len(lines), broken, texts)


def _draw(rng: random.Random, images: Path, index: int, position: int = 0) -> DemoImage:
    return draw_image(rng, images, f"{index:05d}_{position}")


def _text_only(rng: random.Random, images: Path, index: int) -> Record:
    a, b = rng.randint(2, 99), rng.randint(2, 99)
    return {
        "messages": [
            {"role": "user", "content": f"What is {a} plus {b}?"},
            {"role": "assistant", "content": f"{a} plus {b} is {a + b}."},
        ]
    }


def _story(rng: random.Random, images: Path, index: int) -> Record:
    sentences = [
        f"{rng.choice(_PEOPLE)} carried a {rng.choice(list(COLORS))} {rng.choice(_THINGS)} "
        f"from the {rng.choice(_PLACES)} to the {rng.choice(_PLACES)}."
        for _ in range(rng.randint(2, 24))
    ]
    return {
        "prompts": [f"Tell a story of {len(sentences)} sentences."],
        "captions": [" ".join(sentences)],
        "system": "You tell short stories.",
    }


def _caption(rng: random.Random, images: Path, index: int) -> Record:
    image = _draw(rng, images, index)
    return {
        "images": [f"images/{image.name}"],
        "prompts": ["Describe the picture."],
        "captions": [image.description()],
    }


def _compare(rng: random.Random, images: Path, index: int) -> Record:
    generated = [_draw(rng, images, index, position) for position in range(rng.randint(2, 3))]
    best = max(range(len(generated)), key=lambda i: len(generated[i].figures))
    return {
        "images": [[f"images/{image.name}" for image in generated]],
        "prompts": [["Which picture has the most figures?", "What is in it?"]],
        "captions": [
            [f"Picture {best + 1}, with {len(generated[best].figures)} figures.", generated[best].description()]
        ],
    }


def _typed_parts(rng: random.Random, images: Path, index: int) -> Record:
    image, shape = _draw(rng, images, index), rng.choice(SHAPES)
    return {
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": f"How many {shape}s are here? "},
                    {"type": "image", "image": f"images/{image.name}"},
                ],
            },
            {"role": "assistant", "content": [{"type": "text", "text": f"I count {image.count(shape)}."}]},
        ]
    }


def _several_turns(rng: random.Random, images: Path, index: int) -> Record:
    image = _draw(rng, images, index)
    messages = [
        {"role": "user", "content": "<image>\nWhat do you see?"},
        {"role": "assistant", "content": image.description()},
    ]
    for color in rng.sample(list(COLORS), rng.randint(1, 4)):
        count = sum(c == color for c, _ in image.figures)
        messages += [
            {"role": "user", "content": f"Is any figure {color}?"},
            {"role": "assistant", "content": f"Yes, {count} of them." if count else "No, none."},
        ]
    return {"messages": messages, "images": [f"images/{image.name}"]}


def _sharegpt(rng: random.Random, images: Path, index: int) -> Record:
    words = rng.sample(_THINGS, rng.randint(3, len(_THINGS)))
    return {
        "conversations": [
            {"from": "system", "value": "Answer with a list."},
            {"from": "human", "value": f"Sort these words: {', '.join(words)}."},
            {"from": "gpt", "value": ", ".join(sorted(words))},
        ]
    }


def _moving_video(rng: random.Random, images: Path, index: int) -> Record:
    video = draw_moving(rng, images.with_name("videos"), f"{index:05d}", index, COLORS)
    return {
        "messages": [
            {"role": "user", "content": "<video>\nWhat moves, and where?"},
            {"role": "assistant", "content": video.description()},
        ],
        "videos": [f"videos/{video.name}"],
    }


def _changing_video(rng: random.Random, images: Path, index: int) -> Record:
    video = draw_changing(rng, images.with_name("videos"), f"{index:05d}", index, COLORS)
    part: Record = {"type": "video", "video": f"videos/{video.name}"}
    if index % 2:
        part["fps"] = 4.0  # a setting of the record, for this video
    return {
        "messages": [
            {"role": "user", "content": [part, {"type": "text", "text": "When does the color change?"}]},
            {"role": "assistant", "content": [{"type": "text", "text": video.description()}]},
        ]
    }


def _video_and_image(rng: random.Random, images: Path, index: int) -> Record:
    image = _draw(rng, images, index)
    video = draw_moving(rng, images.with_name("videos"), f"{index:05d}", index, COLORS)
    count = image.count(video.shape)
    return {
        "conversations": [
            {"from": "human", "value": "<image>\n<video>\nHow often is the figure of the video in the picture?"},
            {"from": "gpt", "value": f"The figure is a {video.shape}. I count {count} in the picture."},
        ],
        "images": [f"images/{image.name}"],
        "videos": [f"videos/{video.name}"],
    }


def _broken_videos(videos: Path) -> list[str]:
    # A video that was not copied completely, and a video that is not there.
    whole = sorted(videos.glob("*.mkv"))[0].read_bytes()
    (videos / "cut.mkv").write_bytes(whole[: len(whole) // 2])
    turns = [{"role": "user", "content": "<video>Hi"}, {"role": "assistant", "content": "Hello."}]
    return [
        json.dumps({"id": "broken-cut-video", "messages": turns, "videos": ["videos/cut.mkv"]}),
        json.dumps({"id": "broken-missing-video", "messages": turns, "videos": ["videos/none.mp4"]}),
    ]


def _broken_lines(images: Path) -> list[str]:
    # The header of a JPEG, without an image.
    (images / "cut.jpg").write_bytes(b"\xff\xd8\xff\xe0 this file was cut short")
    turns = [{"role": "user", "content": "<image>Hi"}, {"role": "assistant", "content": "Hello."}]
    return [
        '{"id": "broken-json", "messages": [',
        json.dumps({"id": "broken-missing", "messages": turns, "images": ["images/none.png"]}),
        json.dumps({"id": "broken-cut", "messages": turns, "images": ["images/cut.jpg"]}),
        json.dumps({"id": "broken-role", "messages": [{"role": "robot", "content": "Beep."}]}),
        json.dumps({"id": "broken-count", "messages": turns, "images": []}),
        json.dumps({"id": "broken-answer", "messages": [{"role": "user", "content": "Anybody there?"}]}),
    ]


def _strings(value: object) -> list[str]:
    """Collect all strings in a JSON value."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [text for item in value for text in _strings(item)] if isinstance(value, list) else []
