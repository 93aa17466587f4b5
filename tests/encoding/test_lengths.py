"""length(c) == len(encode(c).input_ids), for any text, image, format, orientation and setting."""

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from energon_packed import ChatEncoder, Conversation, MediaReference, RecordError, Reject, normalize
from tests.internals import load_image, read_header

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
SETTINGS = [
    {},
    {"image_processor": "Qwen2VLProcessor", "min_pixels": 28 * 28, "max_pixels": 28 * 28 * 9},
    {"image_processor": "Qwen2_5_VLProcessor", "factor": 28, "min_pixels": 3136, "max_pixels": 100_000},
    {"image_processor": "Qwen3VLProcessor", "factor": 32, "min_pixels": 4096, "max_pixels": 150_000},
    {"image_processor": "LlavaOnevision2Processor", "factor": 56, "min_pixels": 3136, "max_pixels": 100_000},
]


def image_bytes(width: int, height: int, kind: str, orientation: int, mode: str = "RGB") -> bytes:
    out = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = Image.new(mode, (width, height), 90)
    if kind in ("GIF", "BMP"):
        image.convert("P" if kind == "GIF" else "RGB").save(out, kind)
    else:
        image.save(out, kind, exif=exif)
    return out.getvalue()


images = st.builds(image_bytes, st.integers(1, 260), st.integers(1, 260), st.sampled_from(FORMATS), st.integers(1, 8))


@pytest.fixture(scope="session")
def encoders(tokenizer_dir: Path, text_tokenizer_dir: Path) -> list[ChatEncoder]:
    return [
        ChatEncoder.from_pretrained(text_tokenizer_dir if "factor" in options else tokenizer_dir, **options)
        for options in SETTINGS
    ]


@given(
    which=st.integers(0, len(SETTINGS) - 1),
    loss_on=st.sampled_from(["assistant", "last", "all"]),
    turns=st.lists(st.tuples(st.text(max_size=60), st.text(max_size=60)), min_size=1, max_size=3),
    pictures=st.lists(images, max_size=3),
    system=st.none() | st.text(max_size=20),
)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_length_is_the_length_of_the_encoding(
    encoders: list[ChatEncoder],
    which: int,
    loss_on: str,
    turns: list[tuple[str, str]],
    pictures: list[bytes],
    system: str | None,
) -> None:
    encoder = encoders[which]
    encoder.renderer.loss_on = loss_on  # type: ignore[assignment]
    record = {
        "images": pictures,
        "prompts": [prompt for prompt, _ in turns],
        "captions": [caption or "x" for _, caption in turns],
        "system": system,
    }
    try:
        conversation = normalize(record)
        encoded = encoder.encode(conversation)
    except RecordError as error:
        # A picture 200 times as wide as high, or a text that is empty or holds a placeholder: both must refuse.
        if "conversation" in locals():
            with pytest.raises(RecordError) as caught:
                encoder.length(conversation)
            assert caught.value.reason == error.reason
        return
    assert encoder.length(conversation) == len(encoded.input_ids)
    tokens_only = encoder.measure([conversation], keep_tokens=True)[0].sample
    assert tokens_only is not None
    assert tokens_only.input_ids.tolist() == encoded.input_ids.tolist()
    assert tokens_only.labels.tolist() == encoded.labels.tolist()
    assert len(encoded.labels) == len(encoded.input_ids)
    if pictures:
        assert encoded.image_grid_thw is not None
        tokens = encoded.image_grid_thw.prod(dim=1).sum() // 4
        assert (encoded.input_ids == encoded.image_token_id).sum() == tokens
        assert encoded.pixel_values is not None
        assert len(encoded.pixel_values) == encoded.image_grid_thw.prod(dim=1).sum()
        assert (encoded.labels[encoded.input_ids == encoded.image_token_id] == -100).all()


@given(text=st.text(min_size=1, max_size=200))
@settings(deadline=None)
def test_documents(encoder: ChatEncoder, text: str) -> None:
    if not text.strip() or "<image>" in text:
        return
    encoded = encoder.encode(normalize({"text": text}))
    assert encoder.length(normalize({"text": text})) == len(encoded)
    assert (encoded.labels == encoded.input_ids).all()
    assert encoder.tokenizer.decode(encoded.input_ids).startswith(text[:1])


@given(data=images)
@settings(max_examples=200, deadline=None)
def test_header_size_equals_pixel_size(data: bytes) -> None:
    reference = MediaReference(data=data)
    header = read_header(reference)
    assert (header.width, header.height) == load_image(reference).size
    assert header.num_bytes == len(data)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_file_cut_short_is_corrupt(kind: str) -> None:
    data = image_bytes(200, 100, kind, 1)
    with pytest.raises(RecordError) as caught:
        read_header(MediaReference(data=data[: len(data) * 2 // 3]))
    assert caught.value.reason.value == "corrupt_image"


def test_the_end_of_a_thumbnail_is_not_the_end_of_a_jpeg() -> None:
    rng = np.random.default_rng(0)
    image = Image.fromarray(rng.integers(0, 256, (300, 300, 3), dtype=np.uint8))
    thumbnail, whole = io.BytesIO(), io.BytesIO()
    image.resize((40, 40)).save(thumbnail, "JPEG", quality=40)
    image.save(whole, "JPEG", exif=b"Exif\0\0II*\0\x08\0\0\0\0\0\0\0\0\0" + thumbnail.getvalue())
    assert (read_header(MediaReference(data=whole.getvalue())).width, len(whole.getvalue()) > 8000) == (300, True)
    with pytest.raises(RecordError, match="corrupt_image"):
        read_header(MediaReference(data=whole.getvalue()[:4000]))


def test_late_png_metadata_still_rotates_the_image() -> None:
    data = image_bytes(40, 20, "PNG", 1)
    exif = image_bytes(40, 20, "PNG", 6)
    start = exif.index(b"eXIf") - 4
    chunk = exif[start : start + 12 + int.from_bytes(exif[start : start + 4], "big")]
    plain = data[: data.index(b"eXIf") - 4] + data[data.index(b"IDAT") - 4 :] if b"eXIf" in data else data
    end = plain.index(b"IEND") - 4
    late = MediaReference(data=plain[:end] + chunk + plain[end:])
    assert load_image(late).size == (20, 40)
    assert (read_header(late).width, read_header(late).height) == (20, 40)


@pytest.mark.parametrize("mode", ["RGBA", "L", "P", "1", "I;16", "LA"])
def test_any_colour_mode(encoder: ChatEncoder, mode: str) -> None:
    data = image_bytes(64, 48, "PNG", 1, mode)
    record = {"images": [data], "captions": ["c"]}
    assert encoder.length(normalize(record)) == len(encoder.encode(normalize(record)))


def test_patch_positions_are_read_and_checked(tokenizer_dir: Path, tmp_path: Path) -> None:
    encoder = ChatEncoder.from_pretrained(tokenizer_dir, image_processor="LlavaOnevision2Processor")
    data = image_bytes(112, 56, "JPEG", 1)
    record = {"images": [data], "captions": ["c"], "patch_positions": [str(tmp_path / "p.npy")]}
    positions = np.indices((1, 4, 8)).reshape(3, -1).T  # row by row
    np.save(tmp_path / "p.npy", positions)
    encoded = encoder.encode(normalize(record))
    assert encoded.patch_positions is not None
    assert sorted(encoded.patch_positions.tolist()) == sorted(positions.tolist())
    assert encoder.length(normalize(record)) == len(encoded)
    for wrong in (positions[:-1], positions.astype(float), positions.reshape(-1)):
        np.save(tmp_path / "p.npy", wrong)
        for call in (encoder.length, encoder.encode):
            with pytest.raises(RecordError, match="missing_patch_positions: .*p.npy has "):
                call(normalize(record))
    whole = (tmp_path / "p.npy").read_bytes()
    for junk in (b"", b"\x93NUMPY", whole[:40], whole.replace(b"descr", b"de(cr"), whole.replace(b"}", b"'")):
        (tmp_path / "p.npy").write_bytes(junk)
        with pytest.raises(RecordError, match="missing_patch_positions"):
            encoder.length(normalize(record))
    (tmp_path / "p.npy").unlink()
    with pytest.raises(RecordError, match="missing_patch_positions"):
        encoder.length(normalize(record))


def test_patch_positions_come_in_the_order_of_the_pixels(tokenizer_dir: Path) -> None:
    encoder = ChatEncoder.from_pretrained(tokenizer_dir, image_processor="LlavaOnevision2Processor")
    encoded = encoder.encode(normalize({"images": [image_bytes(84, 56, "PNG", 1)], "captions": ["c"]}))
    assert encoded.position_ids is None
    assert encoded.patch_positions is not None
    # 4 x 6 patches in blocks of 2 x 2, row by row.
    assert encoded.patch_positions[:6].tolist() == [[0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 1, 1], [0, 0, 2], [0, 0, 3]]


def test_a_batch_is_measured_and_encoded_as_each_conversation_alone(encoder: ChatEncoder) -> None:
    captions = [{"prompts": ["2 + 2?"], "captions": ["4 " * (n % 7 + 1)]} for n in range(300)]  # more than one batch
    measured = encoder.measure([normalize(record) for record in captions])
    alone = [encoder.encode(normalize(record)) for record in captions[:7]]
    expected = [(len(alone[n % 7]), alone[n % 7].num_supervised) for n in range(300)]
    assert [(own.length, own.supervised) for own in measured] == expected
    records = [
        {"text": "A document."},
        captions[1],
        {"messages": [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]},
        {"input_ids": [20, 10**6]},
        {"input_ids": [20, 21, 22], "labels": [-100, 21, -100]},
    ]
    conversations = [normalize(record) for record in records]
    conversations.append(Conversation(members=tuple(conversations[:2])))
    together = encoder.encode_many(conversations)
    found = [own.detail if isinstance(own, Reject) else (len(own), own.num_supervised) for own in together]
    assert found == [
        (9, 8),
        (18, 4),
        "no assistant turn among system, user",
        "input_ids contains 1000000, outside the 766 tokens of the tokenizer",
        (3, 1),
        "it is a group of samples; encode its `members`",
    ]
    rejects = [own if isinstance(own, Reject) else None for own in together]
    assert [own.reject for own in encoder.measure(conversations)] == rejects


def test_a_family_without_videos_has_no_token_of_videos(encoder: ChatEncoder) -> None:
    """Also with a vocabulary that has the empty string."""
    ids = {"": 7, "<image>": 5}
    tokenizer: Any = SimpleNamespace(backend=SimpleNamespace(token_to_id=ids.get), vocabulary=10)
    vision: Any = SimpleNamespace(image_token="<image>", video_token=None, reserved=())
    rules = type(encoder.rules).of(tokenizer, vision)
    assert (rules.image_token_id, rules.video_token_id, rules.audio_token_id) == (5, None, None)
