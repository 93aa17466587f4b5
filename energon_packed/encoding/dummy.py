"""The dummy sample of a vision encoder: one minimal image, without a target, for rows that have no image."""

from typing import TYPE_CHECKING

import numpy as np

from energon_packed.encoding.image_runs import expanded
from energon_packed.encoding.sample import IGNORE_INDEX, EncodedSample
from energon_packed.encoding.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from energon_packed.encoding.vision import VisionFamily


def dummy_sample(vision: "VisionFamily", tokenizer: TextTokenizer, image_token_id: int) -> EncodedSample | None:
    """The placeholder of the family with the smallest image that its vision tower takes.

    Args:
        vision: the family; one that does not know its patch size has no dummy.
        tokenizer: tokenizes the placeholder.
        image_token_id: token that represents image features.

    Returns:
        A sample whose labels are all -100, or None.
    """
    if vision.undecided:
        return None
    pixels = vision.smallest()
    placeholder = tokenizer.encode([vision.placeholder], [None], special=False).input_ids
    ids, _ = expanded(placeholder, placeholder, image_token_id, pixels.runs)
    return EncodedSample(
        id="dummy image",
        input_ids=ids,
        labels=np.full(len(ids), IGNORE_INDEX, dtype=np.int64),
        image_token_id=image_token_id,
        pixel_values=pixels.values,
        image_grid_thw=pixels.grids_tensor,
        patch_positions=None if pixels.values is None else vision.patch_positions(pixels.grids),
        vision_inputs=pixels.inputs,
        token_type_ids=np.zeros(len(ids), dtype=np.int64) if vision.token_types else None,  # no attention of its own
    )
