"""Mutated records: lines of JSON of every shape with values, keys, numbers and bytes that no one should send."""

import base64
import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

from tests.internals import RECORD_FORMATS
from tests.pipeline.test_adversity import png

PICTURE = "data:image/png;base64," + base64.b64encode(png(40, 40)).decode()
USER = {"role": "user", "content": "What is in the harbour?"}
ANSWER = {"role": "assistant", "content": "A red kettle."}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [2.5]}}}
RECORDS: tuple[dict[str, Any], ...] = (
    {"id": "m", "messages": [USER, ANSWER]},
    {"messages": [{**USER, "content": "<image>" + USER["content"]}, ANSWER], "images": [PICTURE]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "Look."}, {"type": "image"}]}, ANSWER],
     "images": ["a.png"]},
    {"messages": [USER, {**ANSWER, "tool_calls": [CALL]}, {"role": "tool", "content": "3"}, ANSWER], "tools": [TOOL]},
    {"messages": [{"role": "system", "content": "Be short."}, USER, {**ANSWER, "weight": 0}, USER, ANSWER]},
    {"messages": [USER, {**ANSWER, "reasoning_content": "Think."}], "system": "Be short."},
    {"conversations": [{"from": "human", "value": "<image>\nWhere?"}, {"from": "gpt", "value": "There."}],
     "image": "a.png"},
    {"contents": [{"role": "user", "parts": [{"text": "Hi"}]}, {"role": "model", "parts": [{"text": "Hello."}]}]},
    {"images": [PICTURE, "a.png"], "prompts": ["Both?", "And?"], "captions": ["Yes.", "No."], "fps": 2},
    {"input_ids": [50, 51, 52, 53], "labels": [-100, 51, 52, 53]},
    {"input_ids": [50, 51, 52, 53], "loss_mask": [0, 1, 1, 0], "attention_mask": [1, 1, 1, 0]},
    {"instruction": "Say it.", "input": "quietly", "output": "It."},
    {"problem": "1 + 1", "solution": "2"},
    {"query": "Add them.", "tools": json.dumps([{"name": "add"}]),
     "answers": json.dumps([{"name": "add", "arguments": {"a": 1}}])},
    {"question": "Which?", "choices": ["one", "two"], "answer": 1},
    {"prompt": "Go", "completion": " on.", "id": 7},
    {"query": "Go", "response": "on", "history": [["Before", "After"]]},
    {"query": "How many?", "label": ["3"], "image": PICTURE},
    {"images": ["a.png"], "texts": [{"user": "What?", "assistant": "A square."}]},
    {"data": ["Question one", "Answer one", "Question two", "Answer two"]},
    {"texts": ["Before", None, "after"], "images": [None, "a.png", None]},
    {"text_list": ["One", "Two"], "image_info": [{"image_name": "a.png", "matched_text_index": 1}]},
    {"image": "a.png", "caption": "A square."},
    {"system": "SYSTEM: Be kind.", "chat": "USER: Hi\n\n\nASSISTANT: Hello. <|endoftext|>"},
    {"text": "Once upon a time there was a kettle."},
    {"videos": [["a.png", "a.png"]], "messages": [{**USER, "content": "<video>What moves?"}, ANSWER], "fps": 1.5},
)  # fmt: skip
"""One of each shape, at least. `a.png` is beside the file."""


class Raw:
    """JSON text that is written as it is."""

    def __init__(self, text: str) -> None:
        self.text = text


VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**53 + 1, 2**63, 2**64 - 1, 2**64, -(2**63) - 1, 0.5, -0.0, 1e308, 5e-324),
    *(Raw("1e400"), Raw("-1e999"), Raw("9" * 400), Raw("NaN"), Raw("-Infinity"), Raw("01"), Raw("1e-400"), Raw("'x'")),
    *("", " ", "\n", "\x00", "a\x00b", "\x1b[31m", "\x7f\x85\u2028", "\ufeff", "\ufffe\U0010ffff",),
    *("\u202eabc", "x" * 3000),
    *(Raw('"\\ud800"'), Raw('"\\udfff x"'), Raw('"\\ud83d\\ude00"'), Raw('"\\ud83d"')),
    *(Raw('"\\u0000"'), Raw('"\\x41"')),
    *("<image>", "<image>" * 40, "<video>", "<audio>", "<|im_end|>", "<|im_start|>user", "<|endoftext|>",),
    *("{{ 7 }}", "{%", "[[]]", "nan"),
    *("<tool_call>{}</tool_call>", "<tool_call>[</tool_call>", "<think>", "</think>", "user", "assistant", "system"),
    *("../a.png", "/etc/passwd", "/dev/zero", "a.png\x00", "data:image/png;base64,", "data:image/png;base64,%%%", "."),
    *("9" * 5000, "\u00b2", "\u0661", "-1", "1.5", "1e999", "x" * 5000 + ".png", "file://[x", "a.png/b", "\\", "~"),
    *("data:,x", "http://example.org/a.png", "file:///a.png", "[]", "{}", "[1,", '{"a":1}', "null", "1"),
    *([], {}, [[]], [{}], [None], [0], [""], [True], {"": ""}, {"a": None}, [[["a"]]], [1, "a"], [1, [2]], [0.5]),
    *({"role": "user"}, {"content": "x"}, [USER], [ANSWER, ANSWER], USER, {"name": "add"}, [CALL], CALL, [TOOL]),
    *({"bytes": "aGk=", "path": None}, {"bytes": None, "path": "a.png"}, {"type": "image"}, {"url": "a.png"}),
    ["a.png"],
    *([2**70], [-(2**70)], [50] * 3000, [PICTURE], PICTURE, PICTURE[:90], [["a.png"], ["a.png"]], {"text": "x"}),
)  # fmt: skip
KEYS = (
    *sorted({name for shape in RECORD_FORMATS for name in shape.fields or ()}),
    *("content", "role", "weight", "loss", "train", "tool_calls", "tool_call_id", "name", "reasoning",),
    *("value", "from", "language"),
    *("chosen", "type", "path", "bytes", "arguments", "parameters", "function", "user", "", "\x00", "\u00e9", "1"),
)  # fmt: skip


def dumped(value: Any) -> str:
    """JSON text with the `Raw` parts in it."""
    if isinstance(value, Raw):
        return value.text
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(key)}:{dumped(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(dumped, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of everything in it."""
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from places(value[key])


def _replace(rng: random.Random, record: Any, holder: Any, key: Any) -> None:
    holder[key] = copy.deepcopy(rng.choice(VALUES))


def _remove(rng: random.Random, record: Any, holder: Any, key: Any) -> None:
    del holder[key]


def _wrap(rng: random.Random, record: Any, holder: Any, key: Any) -> None:
    holder[key] = [holder[key]] if rng.random() < 0.5 else {rng.choice(KEYS): holder[key]}


def _as_text(rng: random.Random, record: Any, holder: Any, key: Any) -> None:
    holder[key] = dumped(holder[key])


def _repeat(rng: random.Random, record: Any, holder: Any, key: Any) -> None:
    if isinstance(holder[key], list | str):
        holder[key] = holder[key] * rng.choice((0, 2, 9))


def _add(rng: random.Random, record: Any, holder: Any, key: Any) -> None:
    target = holder if isinstance(holder, dict) else record
    target[rng.choice(KEYS)] = copy.deepcopy(rng.choice(VALUES))


def _swap(rng: random.Random, record: Any, holder: Any, key: Any) -> None:
    other, place = rng.choice(list(places(record)))
    holder[key], other[place] = copy.deepcopy(other[place]), copy.deepcopy(holder[key])


def _nest(rng: random.Random, record: Any, holder: Any, key: Any) -> None:
    levels, inner = rng.choice((3, 60, 120, 260, 1100, 5000)), dumped(holder[key])
    is_list = rng.random() < 0.5
    holder[key] = Raw(("[" if is_list else '{"a":') * levels + inner + ("]" if is_list else "}") * levels)


_VALUE_MUTATIONS: tuple[Callable[..., None], ...] = (
    *(_replace,) * 6, _remove, _wrap, _as_text, _repeat, _add, _add, _swap, _nest,
)  # fmt: skip


_ODD_BYTES = (b"\xff", b"\xc3", b"\xed\xa0\x80", b"\x00", b"\xef\xbb\xbf", b"\r", b"\x0b")


def _bytes(rng: random.Random, line: bytes) -> bytes:
    """Damage to the text of a line."""
    at = rng.randrange(len(line) + 1)
    kind = rng.randrange(9)
    if kind == 0:
        return line[:at]
    if kind == 1 and line:
        flipped = bytearray(line)
        flipped[at % len(line)] ^= 1 << rng.randrange(8)
        return bytes(flipped)
    if kind == 2:
        return (
            line[:at]
            + rng.choice((b"\xff", b"\xc3", b"\xed\xa0\x80", b"\x00", b"\xef\xbb\xbf", b"\r", b"\x0b"))
            + line[at:]
        )
    if kind == 3:
        return b"\xef\xbb\xbf" + line
    if kind == 4:
        return line + b"\r"
    if kind == 5:
        return line + line
    if kind == 6:
        return line.decode(errors="replace").encode(rng.choice(("utf-16", "latin-1")), "replace")
    if kind == 7:  # duplicate keys
        return line.rstrip(b"}") + b',"' + rng.choice(KEYS).encode() + b'":' + rng.choice((b"1", b'"x"', b"[]")) + b"}"
    return rng.choice((b"[]", b"{}", b"null", b"0", b'""', b"[" * 5000, b'{"a":' * 5000, b"\x00" * 9, b"//", b" \t x"))


def mutated_lines(count: int, seed: int) -> list[bytes]:
    """Lines without a line end; damage may have put line ends into some."""
    rng = random.Random(seed)
    made = []
    for number in range(count):
        record = copy.deepcopy(RECORDS[number % len(RECORDS)])
        for _ in range(rng.choice((0, 1, 1, 1, 2, 2, 4))):
            if not (found := list(places(record))):
                break
            holder, key = rng.choice(found)
            rng.choice(_VALUE_MUTATIONS)(rng, record, holder, key)
        line = dumped(record).encode("utf-8", "surrogatepass")
        if b'"audio' in line:  # ends the run: the encoder of the tests has no audio processor
            line = dumped(RECORDS[number % len(RECORDS)]).encode()
        made.append(_bytes(rng, line) if rng.random() < 0.15 else line)
    return made
