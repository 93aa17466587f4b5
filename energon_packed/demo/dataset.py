"""Demo dataset: conversations about generated images and simple arithmetic in all record formats, some invalid."""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from energon_packed.demo.drawing import COLOURS, SHAPES, Picture, draw_picture

Record = dict[str, Any]
_PLACES = ("library", "harbour", "market", "workshop", "garden", "station", "kitchen", "observatory")
_PEOPLE = ("Ada", "Kofi", "Mei", "Ines", "Omar", "Ravi", "Lena", "Tomas")
_THINGS = ("lantern", "map", "clock", "bicycle", "letter", "kettle", "violin", "telescope")


@dataclass(frozen=True, slots=True)
class DemoDataset:
    """Result of `write_dataset`.

    Attributes:
        jsonl: file with the records.
        records: number of lines.
        broken: number of invalid lines.
        texts: all texts of the valid records, for tokenizer training.
    """

    jsonl: Path
    records: int
    broken: int
    texts: list[str]


def write_dataset(folder: Path, *, records: int = 400, broken: int = 6, seed: int = 0) -> DemoDataset:
    """Write `records` lines to `folder/data.jsonl` and their images to `folder/images`.

    Args:
        folder: created if missing.
        records: number of lines, including the invalid ones.
        broken: number of invalid lines: malformed JSON, a missing and a truncated image, an unknown role and others.
        seed: the same seed produces the same files.
    """
    rng = random.Random(seed)
    images = folder / "images"
    images.mkdir(parents=True, exist_ok=True)
    makers = (_text_only, _story, _caption, _compare, _typed_parts, _several_turns, _sharegpt)
    lines, texts = [], []
    for number in range(records - broken):
        record = makers[number % len(makers)](rng, images, number)
        record["id"] = f"demo-{number:05d}"
        lines.append(json.dumps(record))
        texts += _strings(record)
    bad = _broken_lines(images)
    for number in range(broken):
        lines.insert(rng.randrange(len(lines) + 1), bad[number % len(bad)])
    path = folder / "data.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return DemoDataset(path, len(lines), broken, texts)


def _picture(rng: random.Random, images: Path, number: int, place: int = 0) -> Picture:
    return draw_picture(rng, images, f"{number:05d}_{place}")


def _text_only(rng: random.Random, images: Path, number: int) -> Record:
    a, b = rng.randint(2, 99), rng.randint(2, 99)
    return {
        "messages": [
            {"role": "user", "content": f"What is {a} plus {b}?"},
            {"role": "assistant", "content": f"{a} plus {b} is {a + b}."},
        ]
    }


def _story(rng: random.Random, images: Path, number: int) -> Record:
    sentences = [
        f"{rng.choice(_PEOPLE)} carried a {rng.choice(list(COLOURS))} {rng.choice(_THINGS)} "
        f"from the {rng.choice(_PLACES)} to the {rng.choice(_PLACES)}."
        for _ in range(rng.randint(2, 24))
    ]
    return {
        "prompts": [f"Tell a story of {len(sentences)} sentences."],
        "captions": [" ".join(sentences)],
        "system": "You tell short stories.",
    }


def _caption(rng: random.Random, images: Path, number: int) -> Record:
    picture = _picture(rng, images, number)
    return {
        "images": [f"images/{picture.name}"],
        "prompts": ["Describe the picture."],
        "captions": [picture.description()],
    }


def _compare(rng: random.Random, images: Path, number: int) -> Record:
    pictures = [_picture(rng, images, number, place) for place in range(rng.randint(2, 3))]
    most = max(range(len(pictures)), key=lambda i: len(pictures[i].figures))
    return {
        "images": [[f"images/{picture.name}" for picture in pictures]],
        "prompts": [["Which picture has the most figures?", "What is in it?"]],
        "captions": [
            [f"Picture {most + 1}, with {len(pictures[most].figures)} figures.", pictures[most].description()]
        ],
    }


def _typed_parts(rng: random.Random, images: Path, number: int) -> Record:
    picture, shape = _picture(rng, images, number), rng.choice(SHAPES)
    return {
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": f"How many {shape}s are here? "},
                    {"type": "image", "image": f"images/{picture.name}"},
                ],
            },
            {"role": "assistant", "content": [{"type": "text", "text": f"I count {picture.count(shape)}."}]},
        ]
    }


def _several_turns(rng: random.Random, images: Path, number: int) -> Record:
    picture = _picture(rng, images, number)
    messages = [
        {"role": "user", "content": "<image>\nWhat do you see?"},
        {"role": "assistant", "content": picture.description()},
    ]
    for colour in rng.sample(list(COLOURS), rng.randint(1, 4)):
        found = sum(c == colour for c, _ in picture.figures)
        messages += [
            {"role": "user", "content": f"Is any figure {colour}?"},
            {"role": "assistant", "content": f"Yes, {found} of them." if found else "No, none."},
        ]
    return {"messages": messages, "images": [f"images/{picture.name}"]}


def _sharegpt(rng: random.Random, images: Path, number: int) -> Record:
    words = rng.sample(_THINGS, rng.randint(3, len(_THINGS)))
    return {
        "conversations": [
            {"from": "system", "value": "Answer with a list."},
            {"from": "human", "value": f"Sort these words: {', '.join(words)}."},
            {"from": "gpt", "value": ", ".join(sorted(words))},
        ]
    }


def _broken_lines(images: Path) -> list[str]:
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
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [text for item in value for text in _strings(item)] if isinstance(value, list) else []
