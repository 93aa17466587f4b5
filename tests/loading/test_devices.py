"""Batches on other devices: `to`, pinned memory, and what a model gets there."""

import copy
from dataclasses import fields
from typing import Any

import pytest
import torch

from energon_packed import BatchError, DataflowLoader, MapDistributor, PackedBatch, PaddingFreeCollator, SimpleBatcher
from tests.loading.flows import FEATURES, ITEMS, feature


def tensors(batch: Any) -> dict[str, torch.Tensor]:
    return {one.name: value for one in fields(batch) if isinstance(value := getattr(batch, one.name), torch.Tensor)}


def batch_with_everything() -> PackedBatch:
    data = [
        feature(number) | {"image_grid_thw": torch.tensor([[1, 2, 2]]), "pixel_values": torch.rand(4, 3)}
        for number in range(3)
    ]
    collator = PaddingFreeCollator(pad_multiple=4, pad_to=64)
    return next(iter(DataflowLoader(MapDistributor(data), packer=SimpleBatcher(3), collator=collator)))


def test_to_moves_every_tensor_and_keeps_the_batch() -> None:
    batch = batch_with_everything()
    before = {name: tensor.clone() for name, tensor in tensors(batch).items()}
    assert {"pixel_values", "image_grid_thw", "padding_mask", "cu_seqlens_padded", "loss_mask"} <= set(before)
    moved = batch.to("meta", non_blocking=True)
    assert {tensor.device.type for tensor in tensors(moved).values()} == {"meta"}
    assert {name: (t.dtype, t.shape) for name, t in tensors(moved).items()} == {
        name: (t.dtype, t.shape) for name, t in before.items()
    }
    assert (moved.ids, moved.max_seqlen, moved.__key__) == (batch.ids, batch.max_seqlen, batch.__key__)
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors(batch).items())
    inputs = moved.transformers_inputs()
    assert {value.device.type for value in inputs.values() if isinstance(value, torch.Tensor)} == {"meta"}
    assert inputs["seq_idx"].shape == batch.input_ids.shape


def test_a_dtype_is_that_of_pixels_alone() -> None:
    batch = batch_with_everything()
    cast = batch.to(dtype=torch.bfloat16)
    changed = {name for name, tensor in tensors(cast).items() if tensor.dtype != tensors(batch)[name].dtype}
    assert changed == {"pixel_values"}
    assert cast.pixel_values is not None
    assert batch.pixel_values is not None
    assert torch.equal(cast.pixel_values, batch.pixel_values.bfloat16())
    assert cast.input_ids is batch.input_ids
    with pytest.raises(BatchError, match=r"`dtype` must be a floating-point type, got torch.int64"):
        batch.to(dtype=torch.int64)


def test_segments_are_numbered_as_their_boundaries_say() -> None:
    batch = batch_with_everything()
    bounds, numbers = batch.cu_seqlens_padded, batch.transformers_inputs()["seq_idx"]
    assert bounds is not None
    assert numbers.dtype == torch.int32
    for number, (start, stop) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)):
        assert set(numbers[0, start:stop].tolist()) == {number}


def test_torch_pins_a_batch_by_its_own_method() -> None:
    from torch.utils.data._utils.pin_memory import pin_memory

    batch = batch_with_everything()
    if not torch.accelerator.is_available():  # torch then pins nothing, and says so for each tensor
        with pytest.raises(RuntimeError, match="accelerator|NVIDIA driver"):  # builds for CPUs, for CUDA
            pin_memory(copy.copy(batch))
        return
    pinned = pin_memory(batch)
    assert isinstance(pinned, PackedBatch)
    assert all(tensor.is_pinned() for tensor in tensors(pinned).values())
    assert not batch.input_ids.is_pinned()
    assert batch.to("cuda", non_blocking=True).split()[0].id == batch.ids[0]


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true")
def test_a_loader_that_pins_gives_the_same_batches(num_workers: int) -> None:
    def new_loader(**options: Any) -> DataflowLoader:
        return DataflowLoader(MapDistributor(FEATURES), batch_size=4, **options)

    loader = new_loader(num_workers=num_workers, pin_memory=True)
    found = list(loader)
    assert sum(batch.num_samples for batch in found) == ITEMS
    if not num_workers:
        assert [batch.ids for batch in found] == [batch.ids for batch in new_loader()]
    if torch.accelerator.is_available():
        assert all(tensor.is_pinned() for batch in found for tensor in tensors(batch).values())


def test_losses_need_no_value_of_the_logits_device() -> None:
    """The host does not wait for an accelerator: on the device "meta", which has no values, each read of one fails."""
    batch = batch_with_everything()
    logits = torch.empty(*batch.input_ids.shape, 128, device="meta")
    for targets in (None, 5.0, torch.tensor(5.0), torch.tensor(5.0, device="meta")):
        assert batch.loss(logits, targets=targets).device.type == "meta"
    signals: tuple[Any, ...] = ("loss", "entropy", "gradient_norm")
    for signal in signals:
        assert {value.device.type for value in batch.loss_by_source(logits, signal).values()} == {"meta"}


def test_losses_are_computed_where_the_logits_are() -> None:
    """A batch that stays on the host, and logits of a model on the accelerator, if there is one."""
    batch = batch_with_everything()
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    logits = torch.randn(*batch.input_ids.shape, 128, generator=torch.Generator().manual_seed(0))
    there = logits.to(device)
    for targets in (None, 5.0, torch.tensor(5.0), torch.tensor(5.0, device=device)):
        of_host = targets.cpu() if isinstance(targets, torch.Tensor) else targets
        loss = batch.loss(there, targets=targets)
        assert loss.device.type == there.device.type
        assert loss.item() == pytest.approx(batch.loss(logits, targets=of_host).item(), rel=1e-5)
    signals: tuple[Any, ...] = ("loss", "entropy", "gradient_norm")
    for signal in signals:
        found, expected = batch.loss_by_source(there, signal), batch.loss_by_source(logits, signal)
        assert {value.device.type for value in found.values()} == {there.device.type}
        assert {name: value.item() for name, value in found.items()} == pytest.approx(
            {name: value.item() for name, value in expected.items()}, rel=1e-4
        )
