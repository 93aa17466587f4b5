"""Patch positions in .npy files: row by row or in blocks, one for each image or one for all frames of a video."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from energon_packed import ChatEncoder, ConfigError, Conversation, EncoderSettings, RecordError, normalize
from tests.internals import MediaTokens, load_vision, mrope_positions

LAYOUTS = {2: {"factor": 28}, 3: {"factor": 48}}


@pytest.fixture(scope="module", params=[2, 3])
def merged(request: pytest.FixtureRequest, text_tokenizer_dir: Path) -> ChatEncoder:
    """LLaVA-OneVision-2 with 14-pixel patches merged 2 x 2, and with 16-pixel patches merged 3 x 3."""
    settings = {"vision_family": "llava_onevision2", "min_pixels": 1, **LAYOUTS[request.param]}
    return ChatEncoder.from_pretrained(text_tokenizer_dir, **settings)


def by_row(h: int, w: int, t: int = 0) -> npt.NDArray[np.int64]:
    """As `build_patch_positions_for_frame` of LLaVA-OneVision-2 writes a frame: patch i at (t, i // w, i % w)."""
    i = np.arange(h * w)
    return np.stack([np.full(h * w, t), i // w, i % w], axis=1)


def as_trained(rows: npt.NDArray[np.int64], t: int, h: int, w: int, m: int) -> npt.NDArray[np.int64]:
    """What its trainer makes of rows: `convert_positions_to_block_layout`, by the definition of a block."""
    order = [
        frame * h * w + y * w + x
        for frame in range(t)
        for y0 in range(0, h, m)
        for x0 in range(0, w, m)
        for y in range(y0, y0 + m)
        for x in range(x0, x0 + m)
    ]
    return rows[order]


def record(encoder: ChatEncoder, files: list[npt.NDArray[Any]], images: int, blocks: tuple[int, int]) -> Conversation:
    """`images` frames of blocks[0] x blocks[1] tokens."""
    assert encoder.vision is not None
    side = encoder.vision.image_processor.patch_size * encoder.vision.merge_size
    stream = io.BytesIO()
    Image.new("RGB", (blocks[1] * side, blocks[0] * side)).save(stream, "PNG")
    arrays = []
    for file in files:
        saved = io.BytesIO()
        np.save(saved, file)
        arrays.append(saved.getvalue())
    turns = [{"role": "user", "content": "<image>" * images}, {"role": "assistant", "content": "Yes."}]
    return normalize({"messages": turns, "images": [stream.getvalue()] * images, "patch_positions": arrays})


def loaded(encoder: ChatEncoder, conversation: Conversation) -> npt.NDArray[np.int64]:
    encoded = encoder.encode(conversation)
    assert encoder.length(conversation) == len(encoded)
    assert encoded.patch_positions is not None
    return encoded.patch_positions


def test_rows_are_put_into_blocks_and_blocks_stay(merged: ChatEncoder) -> None:
    assert merged.vision is not None
    m = merged.vision.merge_size
    h, w = 3 * m, 4 * m
    expected = as_trained(by_row(h, w), 1, h, w, m)
    assert (expected != by_row(h, w)).any(axis=1).sum() > h * w / 2  # the order matters
    assert loaded(merged, record(merged, [by_row(h, w)], 1, (3, 4))).tolist() == expected.tolist()
    assert loaded(merged, record(merged, [expected], 1, (3, 4))).tolist() == expected.tolist()
    # Positions that are not given have the same order, at time 0.
    assert loaded(merged, record(merged, [], 1, (3, 4))).tolist() == expected.tolist()


def test_one_file_of_a_video_is_split_over_its_frames(merged: ChatEncoder) -> None:
    assert merged.vision is not None
    m = merged.vision.merge_size
    h, w = 2 * m, 3 * m
    rows = np.concatenate([by_row(h, w, t) for t in (0, 8, 16)])
    expected = as_trained(rows, 3, h, w, m)
    assert loaded(merged, record(merged, [rows], 3, (2, 3))).tolist() == expected.tolist()
    per_frame = np.split(rows, 3)
    assert loaded(merged, record(merged, per_frame, 3, (2, 3))).tolist() == expected.tolist()
    assert loaded(merged, record(merged, [rows[: h * w], rows[h * w :]], 3, (2, 3))).tolist() == expected.tolist()
    short = record(merged, [rows[:-1]], 3, (2, 3))
    for call in (merged.length, merged.encode):
        with pytest.raises(RecordError, match=rf"1 patch_positions with {3 * h * w - 1} rows for 3 images with"):
            call(short)
    with pytest.raises(RecordError, match="2 patch_positions for 1 images; one per image is needed, or one for all"):
        record(merged, per_frame[:2], 1, (2, 3))


def test_an_undetectable_patch_order_names_the_option(merged: ChatEncoder, text_tokenizer_dir: Path) -> None:
    assert merged.vision is not None
    m = merged.vision.merge_size
    h, w = 2 * m, 3 * m
    anything = np.random.default_rng(0).integers(0, 99, (h * w, 3))
    conversation = record(merged, [anything], 1, (2, 3))
    for call in (merged.length, merged.encode):  # found while packing, not while training
        with pytest.raises(RecordError, match="neither row by row nor in blocks .* set `patch_order` to 'row' or"):
            call(conversation)
    settings = {"vision_family": "llava_onevision2", "min_pixels": 1, **LAYOUTS[m]}
    for order, expected in (("row", as_trained(anything, 1, h, w, m)), ("block", anything)):
        encoder = ChatEncoder.from_pretrained(text_tokenizer_dir, patch_order=order, **settings)
        assert loaded(encoder, conversation).tolist() == expected.tolist()
        assert encoder.fingerprint() != merged.fingerprint()


def test_canvases_of_patches_from_several_frames(merged: ChatEncoder) -> None:
    """A canvas of a codec holds blocks of several frames: rows of it are told by the same rule."""
    assert merged.vision is not None
    m = merged.vision.merge_size
    square, places = np.indices((1, m, m)).reshape(3, -1).T, ((3, 5, 1), (9, 0, 0), (9, 2, 7))
    blocks = [np.add(square, [t, y * m, x * m]) for t, y, x in places]
    canvas = np.concatenate(blocks)  # 1 x 3 blocks
    rows = np.empty_like(canvas)
    rows[as_trained(np.arange(len(canvas)), 1, m, 3 * m, m)] = canvas
    assert loaded(merged, record(merged, [rows], 1, (1, 3))).tolist() == canvas.tolist()


def test_merge_three_counts_tokens_and_numbers_them(text_tokenizer_dir: Path) -> None:
    """Token counts, patches and M-RoPE positions with 3 x 3 merged patches, as Transformers has them."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLModel

    vision = load_vision(
        EncoderSettings(image_processor="Qwen2_5_VLProcessor", patch_size=16, merge_size=3, min_pixels=1)
    )
    assert vision is not None
    assert (vision.num_patches(96, 144), vision.num_tokens(54), vision.grid(96, 144)) == (54, 6, (6, 9))
    tiny = {"depth": 1, "hidden_size": 8, "num_heads": 1, "out_hidden_size": 8, "intermediate_size": 8}
    text = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    text |= {"num_key_value_heads": 1, "vocab_size": 99, "rope_parameters": {"mrope_section": [1, 1, 2]}}
    config = Qwen2_5_VLConfig(
        vision_config={**tiny, "spatial_merge_size": 3, "patch_size": 16},
        text_config=text,
        image_token_id=7,
        vision_start_token_id=5,
    )
    ids = np.array([1, 2, 5, *[7] * 6, 6, 3, 4])
    import torch

    model = Qwen2_5_VLModel(config)
    expected, _ = model.get_rope_index(
        input_ids=torch.tensor(ids)[None],
        image_grid_thw=torch.tensor([[1, 6, 9]]),
        mm_token_type_ids=torch.tensor(ids == 7)[None].int(),
    )
    ours = mrope_positions(ids, MediaTokens(7, np.array([[1, 6, 9]])), 3)
    assert ours.tolist() == expected[:, 0].tolist()


def test_a_factor_of_two_meanings_refuses_positions(text_tokenizer_dir: Path) -> None:
    encoder = ChatEncoder.from_pretrained(
        text_tokenizer_dir, image_processor="Qwen2_5_VLProcessor", factor=48, min_pixels=1
    )
    known = ChatEncoder.from_pretrained(text_tokenizer_dir, vision_family="llava_onevision2", min_pixels=1)
    with pytest.raises(ConfigError, match="48 is 16 x 3 or 24 x 2"):
        encoder.length(record(known, [by_row(6, 9)], 1, (2, 3)))
