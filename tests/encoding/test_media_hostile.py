"""Images that strangers send: each costs its record one line, with bounded time and memory, and nothing else.

Pixels are those of `transformers.image_utils.load_image`, whose own pixels stand beside ours here.
"""

import io
import os
import re
import socket
import struct
import subprocess
import sys
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from transformers.image_transforms import convert_to_rgb
from transformers.image_utils import load_image as reference_load

from energon_packed import ChatEncoder, MediaReference, RecordError, normalize
from tests import oldest
from tests.internals import MAX_PIXELS, load_image, media, read_header
from tests.internals import images as images_module

ORIENTATION = 0x0112


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def noise(height: int, width: int, channels: int = 3) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, channels), dtype=np.uint8))


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(width: int, height: int, pixels: bytes, *, depth: int = 8, color: int = 0) -> bytes:
    """A PNG with valid checksums around `pixels`, which are the compressed rows (or are not)."""
    head = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def png16(values: np.ndarray, color: int) -> bytes:  # type: ignore[type-arg]
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    return png(values.shape[1], values.shape[0], zlib.compress(rows), depth=16, color=color)


def tiff(width: int, height: int) -> bytes:
    """The header of a grey TIFF, of a few bytes."""
    entries = [(256, 4, width), (257, 4, height), (258, 3, 8), (259, 3, 1), (262, 3, 1), (273, 4, 8), (278, 4, height)]
    entries += [(279, 4, 4)]
    body = b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in entries)
    return b"II*\0" + struct.pack("<IH", 8, len(entries)) + body + b"\0" * 8


def gif(frames: int) -> bytes:
    first = saved(Image.new("P", (8, 8), 3), "GIF")
    start = first.index(b"\x2c")
    return first[:start] + first[start:-1] * frames + b";"


def why(data: bytes) -> str:
    """The one line that `read_header` and `load_image` both give."""
    lines = set()
    for function in (read_header, load_image):
        with pytest.raises(RecordError) as caught:
            function(MediaReference(data=data))
        assert caught.value.reason.value == "corrupt_image"
        lines.add(caught.value.detail)
    assert len(lines) == 1
    assert "\n" not in min(lines)
    assert ";" in min(lines)
    return lines.pop()


JPEG = saved(noise(64, 64), "JPEG")
WEBP = saved(noise(64, 64), "WEBP", lossless=True)
MOVING = saved(noise(64, 64), "WEBP", save_all=True, append_images=[noise(65, 64).crop((0, 1, 64, 65))])
FRAME = MOVING.index(b"ANMF") + 42  # pixels of the first frame, after the headers of the frame and of VP8
SCAN = JPEG.rindex(b"\xff\xda")
BAD_PIXELS = {
    "png with valid checksums": png(64, 64, b"no deflate stream at all" * 4),
    "webp": WEBP[:30] + bytes(len(WEBP) - 30),
    "animated webp": MOVING[:FRAME] + b"\xff" * 600 + MOVING[FRAME + 600 :],
    "jpeg": JPEG[: SCAN + 5] + b"\x09" + JPEG[SCAN + 6 :],  # a component that the frame does not have
}


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (b"", "is empty, 0 bytes"),
        (b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"/>', "an SVG drawing has no pixels"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nquit\n", "EPS is a program"),
        (b"hello, I am a text", "not an image that Pillow can read"),
        (JPEG[: len(JPEG) // 2], "truncated"),
        (png(50_000, 50_000, zlib.compress(bytes(5000))), r"2,500,000,000 pixels are more than the limit of 178,95"),
        (tiff(50_000, 50_000), "2,500,000,000 pixels are more than the limit"),
        (saved(Image.new("RGB", (1, 1)), "GIF").replace(b"\x01\0\x01\0", b"\xff\xff\xff\xff"), "pixels are more than"),
        (
            saved(Image.fromarray(np.array([[0, 0.2], [1, 0.5]], dtype=np.float32)), "TIFF"),
            "32-bit .* values 0 to 1",
        ),
        (
            saved(Image.fromarray(np.array([[0, 70_000]], dtype=np.int32)), "TIFF"),
            "32-bit .* values 0 to 70000",
        ),
        (
            saved(Image.fromarray(np.array([[np.nan, 1]], dtype=np.float32)), "TIFF"),
            "32-bit .* values nan to nan",
        ),
    ],
)
def test_a_file_that_is_not_an_image_is_rejected_with_a_remedy(data: bytes, line: str) -> None:
    assert re.search(line, why(data))


def test_the_pixel_limit_applies_if_pillow_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    assert f"the limit of {MAX_PIXELS:,}" in why(png(50_000, 50_000, zlib.compress(bytes(5000))))


def test_a_file_of_too_many_bytes_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images_module, "MAX_BYTES", len(JPEG) - 1)
    assert f"{len(JPEG):,} bytes are more than the limit" in why(JPEG)


@pytest.mark.parametrize("name", BAD_PIXELS)
def test_a_header_does_not_show_damaged_pixels(name: str) -> None:
    reference = MediaReference(data=BAD_PIXELS[name])
    header = read_header(reference)
    assert (header.width, header.height, header.decoded) == (64, 64, False)
    with pytest.raises(RecordError, match="corrupt_image"):
        load_image(reference)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP"])
def test_damaged_files_are_decoded_or_rejected(kind: str) -> None:
    data, rng = saved(noise(24, 24), kind), np.random.default_rng(1)
    for _ in range(60):
        damaged = bytearray(data)
        damaged[rng.integers(len(data))] ^= 1 << int(rng.integers(8))
        cut = bytes(damaged[: rng.integers(len(data))] if rng.random() < 0.3 else damaged)
        found = set()
        for function in (read_header, load_image):
            try:
                image = function(MediaReference(data=cut))
                found.add((image.width, image.height))
            except RecordError as error:
                assert error.reason.value == "corrupt_image"
        assert len(found) <= 1  # where both give a size, it is the same


@pytest.mark.parametrize(
    ("image", "kind", "options"),
    [
        (noise(9, 7, 4), "PNG", {}),
        (noise(9, 7, 4), "WEBP", {"lossless": True, "exact": True}),
        (noise(9, 7, 4).convert("LA"), "PNG", {}),
        (noise(9, 7).quantize(16), "PNG", {"transparency": 3}),
        (noise(9, 7).quantize(16), "GIF", {"transparency": 3}),
        (noise(9, 7).convert("L"), "PNG", {"transparency": 3}),
        (noise(9, 7).convert("1"), "PNG", {}),
        (noise(9, 7, 4).convert("RGB").convert("CMYK"), "JPEG", {}),
        (noise(9, 7, 4).convert("RGB").convert("CMYK"), "TIFF", {}),
        (noise(9, 7).convert("LAB"), "TIFF", {}),
        (noise(9, 7).convert("YCbCr"), "JPEG", {}),
        (noise(9, 7), "GIF", {"save_all": True, "append_images": [noise(9, 7).convert("L")]}),
        (noise(9, 7), "PNG", {"save_all": True, "append_images": [noise(7, 9).resize((7, 9))]}),
        (Image.new("RGB", (1, 1), (1, 2, 3)), "PNG", {}),
        (Image.new("RGB", (20_000, 1), (1, 2, 3)), "PNG", {}),
    ],
)
def test_pixels_equal_transformers(tmp_path: Path, image: Image.Image, kind: str, options: dict) -> None:  # type: ignore[type-arg]
    path = tmp_path / "image.jpg"  # the content decides, whatever the extension
    path.write_bytes(saved(image, kind, **options))
    ours = load_image(MediaReference(path=str(path)))
    header = read_header(MediaReference(path=str(path)))
    assert (ours.mode, ours.size) == ("RGB", (header.width, header.height))
    np.testing.assert_array_equal(np.asarray(ours), np.asarray(reference_load(str(path))))


@pytest.mark.parametrize("image", [noise(60, 90, 4), noise(60, 90).quantize(16), noise(60, 90).convert("CMYK")])
def test_a_model_sees_what_its_processor_makes_of_the_file(
    encoder: ChatEncoder, tmp_path: Path, image: Image.Image
) -> None:
    path = tmp_path / "image"
    path.write_bytes(saved(image, "TIFF") if image.mode == "CMYK" else saved(image, "PNG"))
    assert encoder.vision is not None
    theirs = encoder.vision.image_processor(images=[reference_load(str(path))], return_tensors="pt")
    ours = encoder.encode(normalize({"images": [str(path)], "captions": ["c"]}))
    assert ours.image_grid_thw is not None
    assert ours.image_grid_thw.tolist() == theirs["image_grid_thw"].tolist()
    assert ours.pixel_values is not None
    np.testing.assert_array_equal(ours.pixel_values.numpy(), theirs["pixel_values"].numpy())


def test_orientation_of_an_image_with_alpha(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    (tmp_path / "a.png").write_bytes(saved(noise(9, 7, 4), "PNG", exif=exif))
    ours = load_image(MediaReference(path=str(tmp_path / "a.png")))
    assert ours.size == (9, 7)
    np.testing.assert_array_equal(np.asarray(ours), np.asarray(reference_load(str(tmp_path / "a.png"))))


def test_transformers_composites_only_what_is_not_loaded_by_it() -> None:
    """A processor that gets an open RGBA file draws it on white; its own `load_image` has dropped alpha before."""
    data = saved(Image.new("RGBA", (2, 2), (200, 0, 0, 0)), "PNG")
    assert np.asarray(load_image(MediaReference(data=data)))[0, 0].tolist() == [200, 0, 0]
    options = {} if oldest.TRANSFORMERS else {"return_numpy": True}
    drawn = np.asarray(convert_to_rgb(Image.open(io.BytesIO(data)), **options))
    assert drawn[0, 0].tolist() == ([200, 0, 0] if oldest.TRANSFORMERS else [255, 255, 255])


GREY = np.linspace(0, 65_000, 16).astype(np.uint16).reshape(4, 4)
SCALED = (GREY >> 8).astype(np.uint8)


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM", "big-endian TIFF"])
def test_grey_of_16_bits_is_scaled_and_not_white(kind: str) -> None:
    grey = Image.fromarray(GREY)
    if kind == "PPM":
        data = b"P5 4 4 65535\n" + GREY.astype(">u2").tobytes()
    elif kind == "big-endian TIFF":
        data = saved(Image.frombytes("I;16B", (4, 4), GREY.astype(">u2").tobytes()), "TIFF")
    else:
        data = saved(grey, kind)
    ours = np.asarray(load_image(MediaReference(data=data)))
    for channel in range(3):
        np.testing.assert_array_equal(ours[..., channel], SCALED)
    assert (np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))[1:] == 255).all()  # what Transformers makes of it


@pytest.mark.parametrize(("channels", "color"), [(3, 2), (2, 4), (4, 6)])
def test_colour_of_16_bits_is_scaled(channels: int, color: int) -> None:
    ours = np.asarray(load_image(MediaReference(data=png16(np.stack([GREY] * channels, axis=-1), color))))
    np.testing.assert_array_equal(ours[..., 0], SCALED)


def test_many_frames_cost_no_more_than_the_first() -> None:
    data = gif(100_000)
    begin = time.process_time()
    header = read_header(MediaReference(data=data))
    assert load_image(MediaReference(data=data)).size == (header.width, header.height) == (8, 8)
    assert time.process_time() - begin < 2


@pytest.mark.parametrize(("width", "height"), [(1, 1), (20_000, 1), (1, 300), (190, 1)])
def test_narrow_images_fit_or_are_rejected_with_the_limit(encoder: ChatEncoder, width: int, height: int) -> None:
    record = normalize({"images": [saved(Image.new("RGB", (width, height)), "PNG")], "captions": ["c"]})
    found = encoder.measure([record])[0]
    if max(width, height) <= 200:
        assert found.length == len(encoder.encode(record))
        return
    with pytest.raises(RecordError) as caught:
        encoder.encode(record)
    assert found.reject == caught.value.reject
    assert "ratio" in caught.value.detail
    assert "200" in caught.value.detail


def _places(folder: Path) -> dict[str, str]:
    os.mkfifo(folder / "fifo")
    (folder / "folder").mkdir()
    (folder / "to-device").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(os.path.relpath(folder / "socket"))
    (folder / "loop").symlink_to(folder / "loop")
    return {"fifo": "a FIFO", "folder": "a folder", "to-device": "a device", "socket": "a socket", "loop": "loop"}


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    for name, kind in _places(tmp_path).items():
        for function in (read_header, load_image, MediaReference.read):
            with pytest.raises(RecordError, match=kind if kind == "loop" else f"is {kind}.*pass the path") as caught:
                function(MediaReference(path=str(tmp_path / name)))
            assert caught.value.reason.value == "missing_image"


@pytest.mark.parametrize(
    "path", ["/dev/zero", "/dev/stdin", "/proc/self/mem", "../x", "to-device/../../x", "a/../../x"]
)
def test_files_outside_the_root_are_not_opened(tmp_path: Path, path: str) -> None:
    root = tmp_path / "root"
    (root / "a").mkdir(parents=True)
    (root / "to-device").symlink_to("/dev/zero")
    with pytest.raises(RecordError, match="outside `image_root`"):
        read_header(MediaReference(path=path, root=str(root)))


def test_a_file_that_grows_is_read_up_to_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(saved(noise(9, 9), "PNG"))

    class Growing(io.FileIO):
        def read(self, size: int | None = -1) -> bytes:
            with path.open("ab") as writer:
                writer.write(bytes(99))
            return super().read(size)

    monkeypatch.setattr(media, "open_regular", lambda path, _: Growing(path))
    size = path.stat().st_size
    with pytest.raises(RecordError, match=f"grew past its {size} bytes while it was read"):
        MediaReference(path=str(path)).read()


LIMITED = """
import resource, sys
from energon_packed import MediaReference, RecordError
from tests.internals import load_image, read_header
used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in sys.argv[1:]:
    for function in (read_header, load_image):
        try:
            function(MediaReference(path=path))
        except RecordError:
            pass
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used)
"""


def test_decompression_bombs_need_no_memory(tmp_path: Path) -> None:
    bombs = {
        "a.png": png(50_000, 50_000, zlib.compress(bytes(50_000 * 100))),
        "a.tif": tiff(50_000, 50_000),
        "a.gif": gif(100_000),
        "text.png": png(9, 9, b"")[:33] + chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(1 << 26), 9)),
    }
    for name, data in bombs.items():
        (tmp_path / name).write_bytes(data)
    paths = [str(tmp_path / name) for name in bombs]
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, *paths], capture_output=True, text=True, check=True, timeout=300
    )
    assert int(done.stdout) < 64 << 10, f"{done.stdout} KiB"
