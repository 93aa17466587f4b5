"""M-RoPE positions: one (t, h, w) triple per token, as in Qwen2-VL and its successors.

    tokens     A  B  [image 1 x 2 x 3 merged]  C
    t          0  1   2 2 2 2 2 2              5
    h          0  1   2 2 2 3 3 3              5
    w          0  1   2 3 4 2 3 4              5

Text positions increase by one in all three rows. An image starts at the current position in each row and spans its
grid; the text after it starts at start + max(height, width) of the merged grid. Source: P. Wang et al., "Qwen2-VL",
2024, section 2.1; tests compare with `get_rope_index` of Qwen2VLModel in Transformers.
"""

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]


def mrope_positions(input_ids: Int64, image_token_id: int, grids: Int64, merge_size: int) -> Int64:
    """Compute the positions of one sample.

    Args:
        input_ids: int64 (L,).
        image_token_id: token whose runs represent images.
        grids: int64 (images, 3), patches in t, h, w before merging.
        merge_size: patches merged along each side into one token.

    Returns:
        int64 (3, L): rows t, h, w.

    Raises:
        ValueError: the number of image tokens does not match the grids.
    """
    merged = grids // np.array([1, merge_size, merge_size])
    counts = merged.prod(axis=1)
    places = np.flatnonzero(input_ids == image_token_id)
    if len(places) != counts.sum():
        raise ValueError(f"`input_ids` has {len(places)} image tokens, but `grids` require {counts.sum()}")
    starts = places[(np.cumsum(counts) - counts)]
    positions = np.empty((3, len(input_ids)), dtype=np.int64)
    done = 0  # tokens numbered so far
    here = 0  # position of the next token
    for start, count, (t, h, w) in zip(starts, counts, merged, strict=True):
        text = start - done
        positions[:, done:start] = here + np.arange(text)
        here += text
        positions[:, start : start + count] = here + np.indices((t, h, w)).reshape(3, -1)
        here += max(h, w)
        done = start + count
    positions[:, done:] = here + np.arange(len(input_ids) - done)
    return positions
