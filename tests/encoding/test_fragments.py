"""Fragments of a long sample: nothing is lost, every token is a target once, images stay whole."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from energon_packed import EncodedSample, RecordError
from tests.internals import VisionInputs, fragment_of, split_sample, text_fragments

IGNORE_INDEX = -100
IMAGE = 7


def sample(ids: list[int], labels: list[int] | None = None, images: int = 0) -> EncodedSample:
    tokens = np.array(ids, dtype=np.int64)
    grids = torch.tensor([[1, 2, index + 1] for index in range(images)]) if images else None
    pixels = None if grids is None else torch.arange(int(grids.prod(dim=1).sum()))[:, None].float()
    return EncodedSample(
        id="doc",
        input_ids=tokens,
        labels=tokens.copy() if labels is None else np.array(labels, dtype=np.int64),
        image_token_id=IMAGE,
        image_grid_thw=grids,
        pixel_values=pixels,
    )


def check(whole: EncodedSample, parts: list[EncodedSample], overlap: int) -> None:
    """Targets and the tokens after the context are those of the sample, in order."""
    ids = [*parts[0].input_ids.tolist()]
    targets = [*parts[0].labels.tolist()[1:]]
    for part in parts[1:]:
        context = int(np.argmax(part.labels != IGNORE_INDEX)) if overlap > 1 else 1
        context = max(context, 1)
        assert ids[-context:] == part.input_ids[:context].tolist()
        ids += part.input_ids[context:].tolist()
        targets += part.labels[context:].tolist()
    assert ids == whole.input_ids.tolist()
    assert targets == whole.labels.tolist()[1:]


@pytest.mark.parametrize("overlap", [1, 2, 5])
def test_fragments_join_to_the_sample_and_every_token_is_a_target_once(overlap: int) -> None:
    rng = random.Random(overlap)
    for _ in range(300):
        length, row = rng.randint(2, 90), rng.randint(overlap + 1, 40)
        weights = np.array(rng.choices([0.5, 1, 2], k=length), dtype=np.float32)
        whole = replace(sample([rng.randint(8, 99) for _ in range(length)]), loss_weights=weights)
        fragments = split_sample(whole, row, overlap)
        parts = [fragment_of(whole, fragment) for fragment in fragments]
        check(whole, parts, overlap)
        assert {len(part) for part in parts[:-1]} <= {row}  # only the last fragment is shorter than a row
        assert len(parts[-1]) <= row
        assert fragments["supervised"].tolist() == [part.num_supervised for part in parts]
        assert sum(part.num_supervised for part in parts) == length - 1
        assert sum(part.weight_checksum for part in parts) % 2**63 == whole.weight_checksum
        assert (whole.weight_checksum == 0) == (weights[1:] == 1).all()
        # Without images and masked tokens, the length decides.
        assert text_fragments(np.array([length]), row, overlap).tolist() == fragments.tolist()


def test_images_stay_in_one_fragment_with_the_tokens_around_them() -> None:
    rng = random.Random(0)
    split = impossible = 0
    for _ in range(400):
        ids: list[int] = [rng.randint(20, 99) for _ in range(rng.randint(0, 12))]
        images = rng.randint(1, 4)
        for _ in range(images):
            ids += [8, *[IMAGE] * rng.randint(1, 6), 9, *[rng.randint(20, 99) for _ in range(rng.randint(0, 12))]]
        whole = sample(ids, images=images)
        overlap = rng.choice([1, 3])
        try:
            fragments = split_sample(whole, 16, overlap)
        except RecordError as error:
            assert error.reason == "overlong"
            impossible += 1
            continue
        parts = [fragment_of(whole, fragment) for fragment in fragments]
        check(whole, parts, overlap)
        split += 1
        seen = 0
        for part in parts:
            tokens = part.input_ids.tolist()
            runs = [i for i, token in enumerate(tokens) if token == IMAGE and tokens[i - 1] != IMAGE]
            assert len(runs) == part.num_images
            assert all(tokens[i - 1] == 8 for i in runs)
            if part.num_images:
                assert part.pixel_values is not None
                assert part.image_grid_thw is not None
                assert part.image_grid_thw[:, 2].tolist() == list(range(seen + 1, seen + 1 + part.num_images))
                assert len(part.pixel_values) == int(part.image_grid_thw.prod(dim=1).sum())
            else:
                assert part.pixel_values is None
            seen += part.num_images
        assert seen == images
    assert split > 100
    assert impossible > 10


def expected_fragments(
    total: int, images: list[tuple[int, int]], row: int, overlap: int
) -> list[tuple[int, int, int, int, int]] | None:
    """(start, stop, context, first image, last image) by the rules of the module; None if a row has no place to end.

    A row ends at the last place at which two tokens are left before an image, and three after one.
    """
    found, start, context = [], 0, 0
    while True:
        stops = [
            stop
            for stop in range(start + context + 1, min(start + row, total) + 1)
            if stop == total or all(stop <= first - 2 or stop >= last + 3 for first, last in images)
        ]
        if not stops:
            return None
        stop = stops[-1]
        inside = [index for index, (first, _) in enumerate(images) if start <= first < stop]
        before = [index for index, (first, _) in enumerate(images) if first < start]
        found.append((start, stop, context, len(before), len(before) + len(inside)))
        if stop == total:
            return found
        start = max(stop - overlap, *(last + 2 for first, last in images if first < stop), 0)
        context = stop - start


def test_rows_end_where_the_margins_of_images_allow() -> None:
    rng = random.Random(1)
    outcomes = {True: 0, False: 0}
    for _ in range(1500):
        ids: list[int] = []
        images = []
        for _ in range(rng.randint(0, 4)):
            ids += [8] * rng.choice([0, 1, 2, 3, 8]) if not ids else [8] * rng.choice([1, 2, 3, 4, 5, 9])
            images.append((len(ids), len(ids) + rng.randint(1, 5)))
            ids += [IMAGE] * (images[-1][1] - images[-1][0])
        ids += [9] * rng.randint(0 if images else 1, 14)
        overlap = rng.choice([1, 1, 2, 4])
        row = rng.randint(overlap + 1, 18)
        expected = expected_fragments(len(ids), images, row, overlap)
        outcomes[expected is None] += 1
        whole = sample(ids, images=len(images))
        if expected is None:
            with pytest.raises(RecordError, match=f"a row of {row} has no place to split it beside its images"):
                split_sample(whole, row, overlap)
            continue
        trained = [each for each in expected if each[1] - each[0] > max(each[2], 1)]
        if not trained:
            continue
        fragments = split_sample(whole, row, overlap)
        names = ["start", "stop", "context", "first_image", "last_image"]
        assert [tuple(map(int, each)) for each in fragments[names].tolist()] == trained
        assert fragments["number"].tolist() == list(range(len(trained)))
        assert set(fragments["total"].tolist()) == {len(ids)}
    assert min(outcomes.values()) > 200


def test_inputs_of_other_vision_towers_are_divided_by_image() -> None:
    ids = [token for image in range(4) for token in (8, *[IMAGE] * 2, 9, *range(20 + image, 30 + image))]
    values = {"pixel_values": torch.arange(4 * 6).reshape(4, 6), "sizes": torch.arange(8).reshape(2, 4)}
    whole = replace(sample(ids), vision_inputs=VisionInputs(values, {"pixel_values": 0, "sizes": 1}, 4))
    parts = [fragment_of(whole, fragment) for fragment in split_sample(whole, 32, 1)]
    inputs = [part.vision_inputs for part in parts if part.vision_inputs is not None]
    assert len(inputs) > 1
    assert [each.images for each in inputs] == [part.num_images for part in parts if part.num_images]
    assert [each.images for each in inputs] == [each.values["sizes"].shape[1] for each in inputs]
    assert torch.equal(torch.cat([each.values["pixel_values"] for each in inputs]), values["pixel_values"])
    assert torch.equal(torch.cat([each.values["sizes"] for each in inputs], dim=1), values["sizes"])
    text_alone = [part for part in parts if IMAGE not in part.input_ids]
    assert all(part.vision_inputs is None for part in text_alone)
    tiles = VisionInputs({"pixel_values": torch.zeros(7, 6)}, {"pixel_values": 0}, 4)
    with pytest.raises(RecordError, match="the tiles of its images cannot be divided between fragments"):
        _ = [fragment_of(replace(whole, vision_inputs=tiles), fragment) for fragment in split_sample(whole, 32, 1)]


def test_patch_positions_are_divided_by_image() -> None:
    ids = [token for image in range(4) for token in (8, *[IMAGE] * 2, 9, *range(20 + image, 30 + image))]
    whole = sample(ids, images=4)
    positions = torch.arange(3 * 20).reshape(20, 3)
    parts = [
        fragment_of(replace(whole, patch_positions=positions), fragment) for fragment in split_sample(whole, 32, 1)
    ]
    assert torch.equal(torch.cat([p.patch_positions for p in parts if p.patch_positions is not None]), positions)
    assert [len(p.patch_positions) for p in parts if p.patch_positions is not None] == [
        len(p.pixel_values) for p in parts if p.pixel_values is not None
    ]


def test_images_with_one_grid_are_divided_by_its_steps() -> None:
    ids = [token for image in range(4) for token in (8, *[IMAGE] * 2, 9, *range(20 + image, 30 + image))]
    pixels = torch.arange(4 * 6)[:, None].float()
    whole = replace(sample(ids, images=4), image_grid_thw=torch.tensor([[4, 2, 3]]), pixel_values=pixels)
    parts = [fragment_of(whole, fragment) for fragment in split_sample(whole, 32, 1)]
    grids = [part.image_grid_thw for part in parts if part.image_grid_thw is not None]
    assert len(grids) > 1
    assert all(grid.shape == (1, 3) and grid[0, 1:].tolist() == [2, 3] for grid in grids)
    assert sum(int(grid[0, 0]) for grid in grids) == 4
    joined = torch.cat([part.pixel_values for part in parts if part.pixel_values is not None])
    assert torch.equal(joined, pixels)
    assert [len(part.pixel_values) for part in parts if part.pixel_values is not None] == [
        int(grid.prod()) for grid in grids
    ]


def test_a_fragment_without_a_target_is_left_out() -> None:
    ids = list(range(10, 40))
    labels = [IGNORE_INDEX] * 20 + ids[20:]
    fragments = split_sample(sample(ids, labels), 10, 1)
    assert fragments["number"].tolist() == [0, 1]
    assert fragments["start"].tolist() == [18, 27]
    with pytest.raises(RecordError, match="none of which is a target"):
        split_sample(sample(ids, [IGNORE_INDEX] * 30), 10, 1)


def test_tiles_that_share_an_image_are_not_divided() -> None:
    tiles = [10, IMAGE, 11, IMAGE, *range(20, 50)]  # two runs of one image
    with pytest.raises(RecordError, match="cannot be split between its 1 images, whose tokens are 2 runs"):
        split_sample(sample(tiles, images=1), 16, 1)


def test_the_number_of_images_may_come_from_the_plan() -> None:
    tiles = sample([10, IMAGE, 11, IMAGE, *range(20, 50)])  # without pixels and grids, as while planning
    assert len(split_sample(tiles, 16, 1, 2)) > 1
    with pytest.raises(RecordError, match="cannot be split between its 1 images, whose tokens are 2 runs"):
        split_sample(tiles, 16, 1, 1)


def test_grids_without_pixels_are_divided() -> None:
    ids = [token for image in range(4) for token in (8, *[IMAGE] * 2, 9, *range(20 + image, 30 + image))]
    whole = replace(sample(ids, images=4), pixel_values=None)
    parts = [fragment_of(whole, fragment) for fragment in split_sample(whole, 32, 1)]
    grids = [part.image_grid_thw for part in parts if part.image_grid_thw is not None]
    assert torch.cat(grids).tolist() == [[1, 2, index + 1] for index in range(4)]
    assert all(part.pixel_values is None for part in parts)


def test_samples_with_videos_are_not_split() -> None:
    whole = replace(sample([10, 11, IMAGE + 1, *range(20, 50)]), video_token_id=IMAGE + 1)
    with pytest.raises(RecordError, match="33 tokens; a sample with video files cannot be split"):
        split_sample(whole, 16, 1)
    assert len(split_sample(replace(whole, video_token_id=IMAGE + 2), 16, 1)) == 3


def test_positions_of_a_fragment_start_at_0() -> None:
    whole = sample(list(range(10, 40)))
    moved = EncodedSample(
        id="doc",
        input_ids=whole.input_ids,
        labels=whole.labels,
        position_ids=np.broadcast_to(np.arange(30), (3, 30)),
        token_type_ids=np.arange(30),
    )
    part = fragment_of(moved, split_sample(moved, 12, 1)[1])
    assert part.id == "doc#1"
    assert part.position_ids is not None
    assert part.position_ids.tolist() == [list(range(12))] * 3
    assert part.token_type_ids is not None
    assert part.token_type_ids.tolist() == list(range(11, 23))
