"""Conversations with images give the ids of the model's own processor: typed parts through its chat template.

The oracle is `processor(text=processor.apply_chat_template(typed parts), images=...)` of Transformers, with the chat
templates that the trl package ships. `ENERGON_PACKED_FUZZ=1000` is the long form: conversations of each family.
"""

import io
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from transformers import AutoProcessor, PreTrainedTokenizerFast
from transformers.utils import is_torchvision_available as has_torchvision

from energon_packed import ChatEncoder, normalize
from tests.encoding.real_templates import source, tokenizer_of
from tests.internals import ChatTemplate, TokenizerParts

sys.path.append(str(Path(__file__).parents[2] / "tools"))
from tiny_vision import NEED_TORCHVISION, write_processor

# (processor, chat template) of published models; SmolVLM has the processor of Idefics 3
MODELS = [
    ("llava", "llava_next"),
    ("llava_next", "llava_next"),
    ("gemma3", "gemma3"),
    ("idefics3", "idefics3"),
    ("idefics3", "smolvlm"),
]
HERE = [model for model in MODELS if has_torchvision() or model[0] not in NEED_TORCHVISION]
ROUNDS = max(40, int(os.environ.get("ENERGON_PACKED_FUZZ", "0")) // 20)
IMAGE = {"type": "image"}
TEXTS = ("What is this?", "\nWhat is this?", "  two\n\nlines ", "and", " ", "a <b> & 'c'", "1. first\n2. second\n")


@pytest.fixture(scope="module", params=HERE, ids="-".join)
def folder(request: Any, text_tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A processor folder with the chat template of the published model."""
    processor, template = request.param
    path = write_processor(tmp_path_factory.mktemp(template), processor, text_tokenizer_dir)
    (path / "chat_template.jinja").write_text(source(template), encoding="utf-8")
    config = json.loads((path / "tokenizer_config.json").read_text(encoding="utf-8"))
    config.pop("chat_template", None)
    (path / "tokenizer_config.json").write_text(json.dumps({**config, "bos_token": "<|im_start|>"}), encoding="utf-8")
    return path


def png(size: tuple[int, int]) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", size, (9, 99, 9)).save(stream, "PNG")
    return stream.getvalue()


def parts_of(places: str, texts: list[str]) -> list[dict[str, Any]]:
    """`iti` is an image, a text and an image."""
    rest = iter(texts)
    return [IMAGE if kind == "i" else {"type": "text", "text": next(rest)} for kind in places]


def conversations(seed: int) -> list[list[dict[str, Any]]]:
    """Typed parts with images first, last, between texts, two in a row, in the first and in later questions."""
    rng = random.Random(seed)
    answer = {"role": "assistant", "content": [{"type": "text", "text": "A drawing of a house."}]}
    made = []
    for places in ("it", "ti", "tit", "iit", "iti", "itit", "i", "t"):
        question = {"role": "user", "content": parts_of(places, rng.choices(TEXTS, k=3))}
        made.append([question, answer])
        later = {"role": "user", "content": parts_of(rng.choice(("it", "ti", "tit")), rng.choices(TEXTS, k=3))}
        made.append([question, answer, later, {**answer, "content": [{"type": "text", "text": "Yes. "}]}])
    return made


def differing(folder: Path, seed: int) -> list[tuple[str, str]]:
    """(text of the processor, text of the encoder) of conversations that differ."""
    encoder, processor = ChatEncoder.from_pretrained(folder), AutoProcessor.from_pretrained(folder)
    found = []
    for messages in conversations(seed):
        count = sum(part == IMAGE for message in messages for part in message["content"])
        sizes = [(64 + 8 * n, 96) for n in range(count)]
        text = processor.apply_chat_template(messages, tokenize=False)
        options: dict[str, Any] = {"images": [Image.new("RGB", size, (9, 99, 9)) for size in sizes]} if count else {}
        expected = list(processor(text=[text], add_special_tokens=False, **options)["input_ids"][0])
        record = {"messages": messages, "images": [{"bytes": png(size)} for size in sizes]}
        sample = encoder.encode(normalize(record))
        if sample.input_ids.tolist() != expected:
            found.append((processor.tokenizer.decode(expected), processor.tokenizer.decode(sample.input_ids)))
        supervised = encoder.tokenizer.decode(sample.input_ids[sample.labels != -100])
        assert supervised.strip().startswith("A drawing of a house."), (text, supervised)
        assert encoder.length(normalize(record)) == len(sample)
    return found


@pytest.mark.parametrize("seed", range(ROUNDS // 20))
def test_ids_equal_the_processor_with_typed_parts(folder: Path, seed: int) -> None:
    assert differing(folder, seed) == []


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_templates_that_render_strings_and_parts_alike_keep_strings(name: str, text_tokenizer_dir: Path) -> None:
    """Strings need no Jinja."""
    base = PreTrainedTokenizerFast.from_pretrained(text_tokenizer_dir)
    token = "<|vision_start|><|image_pad|><|vision_end|>"
    template = ChatTemplate(TokenizerParts.of(tokenizer_of(base, source(name))), image_token=token)
    part = template._rendered([{"role": "user", "content": [IMAGE]}, {"role": "assistant", "content": "b"}], None)[0]
    assert part.count(token) == 1
    assert not template.needs_image_parts
