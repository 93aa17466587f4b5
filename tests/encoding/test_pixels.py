"""Images get the pixels of the installed processor, in the order of their row."""

import io
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from energon_packed import (
    BatchError,
    ChatEncoder,
    ConfigError,
    EncodedSample,
    EncoderSettings,
    MediaReference,
    PackedBatch,
    PackedDataset,
    PaddingFreeCollator,
    VisionFamily,
    get_packed_loader,
    normalize,
)
from tests.internals import load_image, load_vision

FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen2-VL": {"image_processor": "Qwen2VLProcessor", "min_pixels": 28 * 28, "max_pixels": 28 * 28 * 9},
    "Qwen2.5-VL": {"image_processor": "Qwen2_5_VLProcessor", "factor": 28, "max_pixels": 100_000},
    "Qwen3-VL": {"image_processor": "Qwen3VLProcessor", "min_pixels": 4096, "max_pixels": 150_000},
    "LLaVA-OneVision-2": {"image_processor": "LlavaOnevision2Processor", "factor": 48, "max_pixels": 150_000},
}


@cache
def family(name: str) -> VisionFamily:
    vision = load_vision(EncoderSettings(**FAMILIES[name]))
    assert vision is not None
    return vision


def noise(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    channels = {"L": 1, "1": 1, "P": 1, "LA": 2, "RGBA": 4, "CMYK": 4}.get(mode, 3)
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)
    if mode in ("1", "P"):
        return Image.fromarray(pixels[..., 0]).convert(mode)
    image = Image.frombytes(mode.removeprefix("transparent "), (width, height), pixels.tobytes())
    if mode == "transparent RGB":
        image.info["transparency"] = tuple(pixels[0, 0].tolist())
    return image


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "RGBA", "LA", "transparent RGB"])
@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
@pytest.mark.parametrize("orientation", [1, 6])
def test_pixels_of_files_equal_a_plain_decode(mode: str, kind: str, orientation: int) -> None:
    image, out, exif = noise(61, 93, mode), io.BytesIO(), Image.Exif()
    exif[0x0112] = orientation
    (image.convert("RGB") if kind == "JPEG" else image).save(out, kind, exif=exif)
    loaded = load_image(MediaReference(data=out.getvalue()))
    with Image.open(out) as again:
        turned = again.transpose(Image.Transpose.ROTATE_270) if orientation == 6 else again.copy()
    assert loaded.mode == "RGB"
    assert loaded.size == ((93, 61) if orientation == 6 else (61, 93))
    assert np.array_equal(np.asarray(loaded), np.asarray(turned.convert("RGB")))
    vision = family("Qwen2-VL")
    assert torch.equal(vision.preprocess([loaded]).values, vision.pixels([turned.convert("RGB")])[0])


@pytest.mark.parametrize(
    ("name", "factor", "patch", "merge"),
    [
        ("Qwen2_5_VLProcessor", 28, 14, 2),
        ("Qwen3VLProcessor", 32, 16, 2),
        ("LlavaOnevision2Processor", 28, 14, 2),
        ("LlavaOnevision2Processor", 32, 16, 2),
        ("LlavaOnevision2Processor", 48, 16, 3),
    ],
)
def test_patch_order_and_token_count_of_a_factor(name: str, factor: int, patch: int, merge: int) -> None:
    vision = load_vision(EncoderSettings(image_processor=name, factor=factor, min_pixels=1))
    assert vision is not None
    assert (vision.image_processor.patch_size, vision.merge_size) == (patch, merge)
    rows, columns = 3 * merge, 2 * merge
    cells = np.zeros((rows, columns, 3), dtype=np.uint8)
    cells[..., 0], cells[..., 1] = np.indices((rows, columns)) * 20  # red tells the row, green the column
    image = Image.fromarray(cells.repeat(patch, axis=0).repeat(patch, axis=1))
    values, grids = vision.pixels([image])
    assert grids.tolist() == [[1, rows, columns]]
    assert vision.num_tokens(vision.num_patches(image.height, image.width)) == 6
    pixels = values.reshape(rows * columns, 3, vision.temporal_patch_size, patch * patch)
    assert torch.equal(pixels[:, :, 0], pixels[:, :, -1])  # an image is both frames of a temporal patch
    mean, std = np.array(vision.image_mean), np.array(vision.image_std)
    colors = np.rint((pixels[:, :, 0].mean(dim=2).numpy() * std + mean) * 255).astype(int)
    order = [(y, x) for y0 in range(0, rows, merge) for x0 in range(0, columns, merge)
             for y in range(y0, y0 + merge) for x in range(x0, x0 + merge)]  # fmt: skip
    assert [(red // 20, green // 20) for red, green, _ in colors] == order
    positions = vision.patch_positions(grids.numpy())
    assert positions is None or positions[:, 1:].tolist() == [list(cell) for cell in order]


def test_a_factor_without_published_layout_has_candidates() -> None:
    vision = load_vision(EncoderSettings(image_processor="Qwen2VLProcessor", factor=48))
    assert vision is not None
    assert vision.ambiguous_layouts == ((16, 3), (24, 2))
    with pytest.raises(ConfigError, match="`factor` 48 is 16 x 3 or 24 x 2"):
        vision.check_decided()
    vision = load_vision(EncoderSettings(image_processor="Qwen2VLProcessor", factor=56))  # no multiple of 3
    assert vision is not None
    assert (vision.image_processor.patch_size, vision.merge_size, vision.ambiguous_layouts) == (28, 2, ())
    with pytest.raises(ConfigError, match="`factor` must be patch size times merge size .*, got `factor` 31"):
        load_vision(EncoderSettings(image_processor="Qwen2VLProcessor", factor=31))


def test_a_family_with_custom_pixels_is_used_unchanged(encoder: ChatEncoder) -> None:
    class Gray(type(family("Qwen2.5-VL"))):  # type: ignore[misc]
        def pixels(self, images: list[Image.Image]) -> tuple[torch.Tensor, torch.Tensor]:
            return super().pixels([image.convert("L").convert("RGB") for image in images])  # type: ignore[no-any-return]

    assert encoder.vision is not None
    gray = ChatEncoder(encoder.tokenizer, Gray(encoder.vision.image_processor))
    assert gray.vision is not None
    out = io.BytesIO()
    noise(90, 60).save(out, "PNG")
    record = {"images": [out.getvalue()], "prompts": ["What?"], "captions": ["This."]}
    found = gray.encode(normalize(record)).pixel_values
    assert found is not None
    assert torch.equal(found, gray.vision.pixels([noise(90, 60)])[0])
    assert not torch.equal(found, encoder.vision.pixels([noise(90, 60)])[0])


# --- rows -----------------------------------------------------------------------------------------------------------


def sample(number: int, patches: torch.Tensor | None, grids: torch.Tensor | None) -> EncodedSample:
    ids = np.arange(5, dtype=np.int64)
    return EncodedSample(id=str(number), input_ids=ids, labels=ids, pixel_values=patches, image_grid_thw=grids)


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_a_row_joins_images_of_any_kind_in_order(dtype: torch.dtype | None) -> None:
    vision = family("LLaVA-OneVision-2")
    groups = [[noise(60, 60), noise(99, 40, "RGBA")], [], [noise(150, 70, seed=1)], [noise(50, 200, seed=2)]]
    samples = [sample(n, *(vision.pixels(group) if group else (None, None))) for n, group in enumerate(groups)]
    row = PaddingFreeCollator(pixel_dtype=dtype).collate(samples)
    expected, grids = vision.pixels([image for group in groups for image in group])
    assert row.pixel_values is not None
    assert row.pixel_values.dtype == (dtype or torch.float32)
    assert torch.equal(row.pixel_values, expected.to(row.pixel_values.dtype))
    assert row.image_grid_thw is not None
    assert row.image_grid_thw.tolist() == grids.tolist()


def test_pixels_of_other_processors_keep_their_type_unless_asked() -> None:
    wide = torch.rand(4, 3, dtype=torch.float64)
    patches, grids = family("Qwen2-VL").pixels([noise(40, 40)])
    assert PaddingFreeCollator().collate([sample(0, wide, None)]).pixel_values.dtype == torch.float64  # type: ignore[union-attr]
    joined = PaddingFreeCollator().collate([sample(0, wide.repeat(1, 392), grids), sample(1, patches, grids)])
    assert joined.pixel_values is not None
    assert joined.pixel_values.dtype == torch.float64
    assert torch.equal(joined.pixel_values[4:], patches.double())
    with pytest.raises(BatchError, match=r"must have one shape, got \[\(3,\), \(1176,\)\]. Use one encoder"):
        PaddingFreeCollator().collate([sample(0, wide, grids), sample(1, patches, grids)])
    with pytest.raises(ConfigError, match=r"`pixel_dtype` must be torch.float32 or torch.bfloat16, got torch.float16"):
        PaddingFreeCollator(pixel_dtype=torch.float16)


def test_loaders_return_the_pixels_of_the_installed_processor(pack_demo: Any, encoder: ChatEncoder) -> None:
    folder = pack_demo(sample_class="PackedCaptioningSample").shards
    dataset = PackedDataset(folder, encoder)
    assert encoder.vision is not None
    expected: dict[str, torch.Tensor] = {}
    for index in range(len(dataset)):
        images = [load_image(image) for one in dataset.sample(index).conversations() for image in one.images]
        if images:
            expected[",".join(str(one.id) for one in dataset[index])] = encoder.vision.pixels(images)[0]
    collator = PaddingFreeCollator(pixel_dtype=torch.bfloat16)
    torch_loader = torch.utils.data.DataLoader(
        dataset, collate_fn=lambda packs: collator.collate(packs[0]), num_workers=2
    )
    energon = get_packed_loader(folder, encoder, collator=collator, epochs=1, num_workers=0, shuffle=False)
    for loader in (torch_loader, energon):
        seen: list[PackedBatch] = [batch for batch in loader if batch.pixel_values is not None]
        assert len(seen) == len(expected) > 3
        for batch in seen:
            assert batch.pixel_values is not None
            assert torch.equal(batch.pixel_values, expected[",".join(map(str, batch.ids))].to(torch.bfloat16))
