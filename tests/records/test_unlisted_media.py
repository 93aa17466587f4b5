"""An image in a field that is not read is never lost: the record is rejected with a remedy. Text stays text."""

import base64
import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from energon_packed import FieldMap, MediaReference, RecordError, RejectLimitError, normalize, pack

TURNS = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "A cat."}]
FORMATS: tuple[dict[str, Any], ...] = (
    {"messages": TURNS},
    {"conversations": [{"from": "human", "value": "What is it?"}, {"from": "gpt", "value": "A cat."}]},
    {"question": "What is it?", "answer": "A cat."},
    {"prompt": "What is it?", "completion": "A cat."},
    {"instruction": "Name it.", "output": "A cat."},
    {"caption": "A cat.", "prompt": "Name it."},
    {"text": "A cat."},
    {"input_ids": [1, 2, 3]},
)
NAMES = (
    *("image", "images", "Image", "IMAGE", "Images", "image_1", "image1", "image_0", "img", "imgs", "img_1", "Img"),
    *(
        "imageId",
        "image_id",
        "imageID",
        "image_ids",
        "imagePath",
        "image_path",
        "image_paths",
        "image-file",
        "imgFile",
    ),
    *("image_filename", "imageFilename", "imgname", "image_name", "image_key", "image_url", "imageUrl", "img_url"),
    *("image_uri", "image_src", "img_path", "image_base64", "image_bytes", "image_data", "picture", "Picture"),
    *("pictures", "pic", "photo", "photos", "photo_path", "screenshot", "screenshots", "figure", "thumbnail", "jpg"),
    *("png", "file", "file_name", "filename", "path", "media", "attachments", "page_image", "question_image", "scan"),
    *("diagram", "chart", "cover", "source", "url", "local_path", "Bild", "image path"),
)


def picture(path: Path | None = None) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(stream, "PNG")
    if path is not None:
        path.write_bytes(stream.getvalue())
    return stream.getvalue()


DATA_URL = "data:image/png;base64," + base64.b64encode(picture()).decode()


def result(record: Any, root: Path) -> str:
    try:
        return "used" if normalize(record, image_root=str(root)).images else "lost"
    except RecordError as error:
        assert "\n" not in str(error)
        assert error.reason.value in ("unsupported_media", "unsupported_field", "image_count_mismatch"), error
        return "rejected"


@pytest.mark.parametrize("record", FORMATS, ids=lambda record: next(iter(record)))
def test_an_image_under_any_name_is_used_or_rejects_the_record(record: dict[str, Any], tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    assert len(NAMES) >= 60
    values = ("a.png", "none.png", "/data/photos/a.JPG", DATA_URL)
    found = {(name, value[:20]): result({**record, name: value}, tmp_path) for name in NAMES for value in values}
    print(Counter(found.values()))
    assert not [case for case, outcome in found.items() if outcome == "lost"]


@pytest.mark.parametrize(
    "field",
    [
        {"picture": DATA_URL},
        {"scan": base64.b64encode(picture()).decode()},
        {"scan": {"path": "a.png", "bytes": None}},
        {"attachments": [None, {"type": "image", "url": "file:///data/a.png"}]},
        {"pages": [["a.png", "b.png"]]},
        {"screens": [b"\x89PNG"]},
        {"Image": "coco/000000033471"},
        {"photo": "coco/000000033471"},
        {"screenshot": "https://a.b/c"},
        {"image_id": 0},
        {"imageIds": ["x"]},
        {"photo": "my photo.png"},
        {"screenshot": "no_extension"},
        {"Bild": "Bild von heute.png"},
        {"clip": "a.mp4"},
        {"scan": Image.new("RGB", (8, 8))},
        {"jpg": MediaReference(path="a.tar", offset=512, size=9)},
    ],
)
def test_other_values_that_are_media_reject_the_record(field: dict[str, Any], tmp_path: Path) -> None:
    picture(tmp_path / "no_extension")
    picture(tmp_path / "Bild von heute.png")
    with pytest.raises(RecordError, match=r"refers to an? (image|video), but the record contains none\. .*`adapter`"):
        normalize({"messages": TURNS, **field}, image_root=str(tmp_path))


@pytest.mark.parametrize(
    "field",
    [
        {"id": "0001.png"},
        {"question_id": "COCO_val2014_000000000042.jpg"},
        {"docId": "a.png"},
        {"__key__": "a.png"},
        {"url": "https://en.wikipedia.org/wiki/File:Cat.jpg"},
        {"page_url": "https://a.b/c.png"},
        {"link": "http://a.b/c.gif"},
        {"source": "ai2-adapt-dev/oasst1_converted"},
        {"source": "image_dataset"},
        {"title": "cat.jpg"},
        {"note": "See https://a.b/c.png"},
        {"comment": "The figure is in a.png"},
        {"description": "First line.\nIt was cropped from a.png"},
        {"path": "src/main.py"},
        {"max_stars_repo_path": "web/app.ts"},
        {"file_name": "notes.txt"},
        {"filename": "logo.svg"},
        {"image_caption": "A black cat."},
        {"picture": "A black cat in the grass."},
        {"photo": "none"},
        {"figure": "3"},
        {"num_images": 0},
        {"has_image": False},
        {"image_width": 640},
        {"image_size": [640, 480]},
        {"screenshot": None},
        {"Image": ""},
        {"img": []},
        {"images_count": "0"},
        {"data": "data: the plural of datum"},
        {"topic": "data:image formats"},
        {"epic": "story.md"},
        {"metadata": {"url": "https://a.b/c.png", "width": 3}},
        {"metadata": '{"image": "a.png"}'},
        {"tags": ["png", "jpg"]},
        {"code": "/9j/4AAQ"},
    ],
)
def test_text_that_looks_like_media_stays_text(field: dict[str, Any], tmp_path: Path) -> None:
    conversation = normalize({"messages": TURNS, **field}, image_root=str(tmp_path))
    assert not conversation.images
    assert [message.content for message in conversation.messages] == ["What is it?", "A cat."]


@pytest.mark.parametrize(
    ("image", "fields"),
    [
        ("photos/a.png", {"image_path": "/data/a.png", "imgFile": "a.png", "image_1": "a.png"}),
        ("photos/a.png", {"source": "foo.png", "thumbnail": "a_small.png", "imageUrl": "https://a.b/c.png"}),
        ({"bytes": picture(), "path": None}, {"image_path": "a.png", "file_name": "a.png", "image_id": 5}),
        ("photos/a.png", {"image_base64": base64.b64encode(picture()).decode()}),
        (DATA_URL, {"img": DATA_URL}),
    ],
)
def test_beside_a_used_image_fields_with_its_name_or_origin_are_metadata(image: Any, fields: dict[str, Any]) -> None:
    conversation = normalize({"messages": TURNS, "image": image, **fields})
    assert len(conversation.images) == 1
    assert conversation.unused_fields == tuple(sorted(fields))


@pytest.mark.parametrize("field", [{"image_2": "b.png"}, {"imgs": ["a.png", "b.png"]}, {"Image": "b.png"}])
def test_a_second_image_in_a_field_that_is_not_read_rejects_the_record(field: dict[str, Any]) -> None:
    with pytest.raises(RecordError, match="an image that is not among the images of the record. List all images as"):
        normalize({"messages": TURNS, "image": "a.png", **field})


def test_fields_of_turns_and_content_parts_are_inspected() -> None:
    parts = [{"type": "text", "text": "What is it?", "img": "a.png"}]
    for turn in ({**TURNS[0], "img": "a.png"}, {**TURNS[0], "content": parts}):
        with pytest.raises(RecordError, match="img 'a.png' of a .* Rename the field to `image`"):
            normalize({"messages": [turn, TURNS[1]]})
    assert len(normalize({"messages": [{**TURNS[0], "image": "a.png", "img": "a.png"}, TURNS[1]]}).images) == 1


@pytest.mark.parametrize("record", FORMATS[:-1], ids=lambda record: next(iter(record)))
def test_the_map_of_the_message_reads_the_image(record: dict[str, Any]) -> None:
    record = {**record, "screenshot": "a.png"}
    with pytest.raises(RecordError, match="Read it with `map=images=screenshot`"):
        normalize(record)
    [image] = normalize(FieldMap.parse("images=screenshot").apply(record)).images
    assert image.path == "a.png"


def test_a_run_stops_if_every_record_has_an_image_that_is_not_read(tmp_path: Path, tokenizer_dir: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"messages": TURNS, "screenshot": f"{n}.png"}) + "\n" for n in range(3)))
    options: dict[str, Any] = {"seq_len": 256, "tokenizer": tokenizer_dir, "workers": 1}
    with pytest.raises(RejectLimitError, match=r"none of 3 .*screenshot '0.png'.*`map=images=screenshot`") as caught:
        pack(data, output_dir=tmp_path / "out", **options)
    assert "\n" not in str(caught.value)
    for n in range(3):
        picture(tmp_path / f"{n}.png")
    assert pack(data, output_dir=tmp_path / "mapped", map="images=screenshot", **options).manifest.images == 3


def test_urls_of_images_stop_a_run_only_if_every_record_has_one(tmp_path: Path, tokenizer_dir: Path) -> None:
    pages = [{"text": "A red bus.", "url": url} for url in ("https://a.b/1.jpg", "https://a.b/2.JPG", "https://a.b/")]
    files = {name: tmp_path / f"{name}.jsonl" for name in ("images", "pages")}
    files["images"].write_text("".join(json.dumps(page) + "\n" for page in pages[:2]))
    files["pages"].write_text("".join(json.dumps(page) + "\n" for page in pages))
    options: dict[str, Any] = {"seq_len": 256, "tokenizer": tokenizer_dir, "workers": 1}
    with pytest.raises(RejectLimitError, match="all 2 records have the URL of an image in the field url"):
        pack(files["images"], output_dir=tmp_path / "a", **options)
    packed = pack(files["pages"], output_dir=tmp_path / "b", **options).manifest
    assert (packed.records, packed.notes) == (3, {"not fetched: URL of an image in the field url": 2})


def test_pixels_beside_tokens_reject_the_record() -> None:
    with pytest.raises(RecordError, match="the field pixel_values of the record is not supported"):
        normalize({"input_ids": [1, 2], "pixel_values": [[0.5]]})
