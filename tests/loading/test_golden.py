"""Golden batches: the Energon path and the torch path give the same bytes, and small ones are in `golden/` to read."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from energon_packed import (
    ChatEncoder,
    DataflowLoader,
    EnergonDistributor,
    MapDistributor,
    PackedBatch,
    PackedDataset,
    PaddingFreeCollator,
    PoolPacker,
    SequentialPacker,
    get_packed_loader,
)

GOLDEN = Path(__file__).parent / "golden" / "batches.json"
TENSORS = (
    "input_ids", "labels", "loss_mask", "position_ids", "cu_seqlens", "cu_seqlens_padded", "padding_mask",
    "pixel_values", "image_grid_thw", "patch_positions",
)  # fmt: skip


def assert_same_bytes(left: PackedBatch, right: PackedBatch) -> None:
    assert left.ids == right.ids
    assert left.max_seqlen == right.max_seqlen
    for name in TENSORS:
        one, other = getattr(left, name), getattr(right, name)
        assert (one is None) == (other is None), name
        if one is not None:
            assert one.dtype == other.dtype, name
            assert one.shape == other.shape, name
            raw = [t.contiguous().view(torch.uint8).numpy().tobytes() for t in (one, other)]
            assert raw[0] == raw[1], name


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("flavor", ["PackedCaptioningSample", "PackedTokensSample"])
def test_energon_and_torch_paths_give_the_same_bytes(
    pack_demo: Any, encoder: ChatEncoder, flavor: str, num_workers: int
) -> None:
    shards = pack_demo(sample_class=flavor, max_packs_per_shard=4).shards
    collator = PaddingFreeCollator(pad_multiple=4, loss_weighting="sqrt")
    options = {"num_workers": num_workers, "seed": 5}
    theirs = get_packed_loader(
        shards, encoder, collator=collator, micro_batch_size=2, epochs=1, shuffle_buffer_size=6, **options
    )
    distributor = EnergonDistributor(shards, shuffle_buffer_size=6)
    ours = DataflowLoader(distributor, encoder, collator=collator, batch_size=2, **options)
    pairs = list(zip(theirs, ours, strict=True))
    assert len(pairs) > 3
    for left, right in pairs:
        assert_same_bytes(left, right)


def test_map_style_gives_the_bytes_of_energon_in_order(pack_demo: Any, encoder: ChatEncoder) -> None:
    shards = pack_demo(max_packs_per_shard=4).shards
    theirs = get_packed_loader(shards, encoder, epochs=1, num_workers=0, shuffle=False)
    for left, right in zip(theirs, DataflowLoader(MapDistributor(PackedDataset(shards, encoder), shuffle=False)),
                           strict=True):  # fmt: skip
        assert_same_bytes(left, right)


def golden_batches() -> dict[str, Any]:
    """Rows of 8 tokens from samples of 3, 4, 2, 5, 1 + 3 and 6 tokens; a target is the token itself."""
    data = [
        {"id": "a", "input_ids": [11, 12, 13]},
        {"id": "b", "input_ids": [21, 22, 23, 24], "labels": [-100, -100, 23, 24]},
        {"id": "c", "input_ids": [31, 32]},
        {"id": "d", "input_ids": [41, 42, 43, 44, 45], "labels": [-100, 42, 43, 44, 45]},
        {"id": "e", "input_ids": [51, 52, 53, 54]},
        {"id": "f", "input_ids": [61, 62, 63, 64, 65, 66]},
    ]
    flows = {
        "sequential": (SequentialPacker(8), PaddingFreeCollator()),
        "pool": (PoolPacker(8), PaddingFreeCollator()),
        "sequential, padded to multiples of 4": (
            SequentialPacker(8, multiple=4), PaddingFreeCollator(pad_multiple=4, pad_to=8)
        ),
    }  # fmt: skip
    found = {}
    for name, (packer, collator) in flows.items():
        loader = DataflowLoader(MapDistributor(data, shuffle=False), packer=packer, collator=collator)
        found[name] = [
            {
                "ids": batch.ids,
                **{
                    field: value.squeeze(0).tolist()
                    for field in TENSORS
                    if (value := getattr(batch, field)) is not None
                },
            }
            for batch in loader
        ]
    return found


def test_golden_batches() -> None:
    assert golden_batches() == json.loads(GOLDEN.read_text())


if __name__ == "__main__":
    rows = {
        name: "[\n" + ",\n".join(
            "    {" + ",\n     ".join(f'"{k}": {json.dumps(v)}' for k, v in one.items()) + "}" for one in batches
        ) + "\n  ]"
        for name, batches in golden_batches().items()
    }  # fmt: skip
    GOLDEN.write_text("{\n" + ",\n".join(f'  "{name}": {text}' for name, text in rows.items()) + "\n}\n")
