"""Megatron: the dictionaries that its training steps read, and its data loader provider.

    bridge       Megatron-Bridge's packed step (`vlm_step`, `gpt_step`): labels already shifted, THD metadata
    megatron-lm  Megatron-LM's examples/multimodal: labels one longer than tokens, shifted by the step itself

Rows are chosen by one argument, `layout`. Sources: `get_packed_seq_params` and `get_batch_from_iterator` of
Megatron-Bridge, `get_batch` of Megatron-LM's examples/multimodal/train.py.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from energon_packed.dataflow import PackedBatch, PackedLoader, get_packed_loader
from energon_packed.encoding import IGNORE_INDEX, Processor
from energon_packed.errors import ConfigError
from energon_packed.metadataset import has_split

Layout = Literal["bridge", "megatron-lm"]
LAYOUTS: tuple[Layout, ...] = ("bridge", "megatron-lm")
Provider = Callable[[Any], tuple["MegatronIterator | None", "MegatronIterator | None", "MegatronIterator | None"]]


@dataclass(slots=False)
class VisualInputs:
    """What Megatron-Bridge moves to the device and hands to the vision tower.

    Attributes:
        pixel_values: float32 (patches, patch_dim).
        image_grid_thw: int64 (images, 3).
        patch_positions: int64 (patches, 3), or None.
    """

    pixel_values: torch.Tensor
    image_grid_thw: torch.Tensor
    patch_positions: torch.Tensor | None = None

    def normalized_for_model(self) -> dict[str, torch.Tensor]:
        """Arguments of the model; only those that are there."""
        return {name: value for name, value in self.__dict__.items() if value is not None}


def megatron_batch(batch: PackedBatch, layout: Layout, *, metadata_only: bool = False) -> dict[str, Any]:
    """A batch in the words of one training step.

    Args:
        batch: one row.
        layout: `bridge` or `megatron-lm`.
        metadata_only: for the middle stages of a pipeline, which need positions and boundaries alone (`bridge`).

    Returns:
        `bridge`: tokens, input_ids, position_ids, labels, loss_mask, cu_seqlens_q/kv, cu_seqlens_q_padded/kv_padded
        where they differ, max_seqlen_q/kv int32 (), total_tokens, padding_mask, visual_inputs or None.
        `megatron-lm`: tokens (1, T), labels (1, T + 1) unshifted, imgs (patches, patch_dim), num_tiles int32
        (images,) patches of each image, cu_lengths int32 (1, S + 1), max_lengths int32 (1, 1); for a row without
        images, imgs and num_tiles are zeros of shape (1, 1), as that example has it.

    Raises:
        ConfigError: an unknown layout, or a row whose sub-samples are padded, which `megatron-lm` cannot say.
    """
    if layout == "megatron-lm":
        return _megatron_lm(batch)
    if layout != "bridge":
        raise ConfigError(f"layout is {layout!r}; use one of {', '.join(LAYOUTS)}")
    inputs = batch.megatron_inputs(metadata_only=metadata_only)
    for name in ("max_seqlen_q", "max_seqlen_kv"):
        inputs[name] = torch.tensor(inputs[name], dtype=torch.int32)
    if metadata_only:
        return inputs
    inputs["input_ids"] = inputs["tokens"]
    pixels = {name: inputs.pop(name, None) for name in ("pixel_values", "image_grid_thw", "patch_positions")}
    inputs["visual_inputs"] = VisualInputs(**pixels) if pixels["pixel_values"] is not None else None
    return inputs


class MegatronIterator(Iterator[dict[str, Any]]):
    """An endless iterator over a loader, as Megatron's training loop takes it; `save_state` goes into checkpoints."""

    def __init__(self, loader: PackedLoader, layout: Layout, *, metadata_only: bool = False) -> None:
        self._loader = loader
        self._layout: Layout = layout
        self._metadata_only = metadata_only
        self._batches = iter(loader)

    def __next__(self) -> dict[str, Any]:
        return megatron_batch(next(self._batches), self._layout, metadata_only=self._metadata_only)

    def save_state(self) -> Any:
        """State of this data-parallel rank."""
        return self._loader.save_state_rank()

    def restore_state(self, state: Any) -> None:
        """Resume from a saved state; call it before the first batch is taken."""
        self._loader.restore_state_rank(state)
        self._batches = iter(self._loader)


def train_valid_test_dataloaders_provider(
    path: str | Path, encoder: Processor, *, layout: Layout = "bridge", **options: Any
) -> Provider:
    """A provider for Megatron's `pretrain`: called on every rank, it gives (train, valid, test) iterators.

        provider = train_valid_test_dataloaders_provider("out", encoder, micro_batch_size=2, num_workers=4)
        pretrain(provider, model_provider, ModelType.encoder_or_decoder, forward_step)

    Ranks are those of `megatron.core.parallel_state`. In `bridge` layout every tensor-parallel rank loads the same
    rows and middle pipeline stages get metadata; in `megatron-lm` layout only the first tensor-parallel rank of the
    first and last stage loads, and the step broadcasts. `valid` and `test` are None where the data has no such split.

    Args:
        path: a packed dataset, or a Metadataset YAML.
        encoder: the Processor that the data was packed with.
        layout: `bridge` or `megatron-lm`.
        options: as `get_packed_loader` takes them, without rank, world size, split and epochs.

    Raises:
        ConfigError: an unknown layout; when called, that megatron-core is not installed.
    """
    if layout not in LAYOUTS:
        raise ConfigError(f"layout is {layout!r}; use one of {', '.join(LAYOUTS)}")

    def provider(train_val_test_num_samples: Any = None) -> tuple[Any, Any, Any]:
        place = _Place.of_this_process()
        if layout == "megatron-lm" and not (place.is_first_tensor_rank and not place.is_middle_stage):
            return None, None, None

        def iterator(split: str) -> MegatronIterator | None:
            if split != "train" and not has_split(path, split):
                return None
            loader = get_packed_loader(
                path, encoder, split=split, rank=place.rank, world_size=place.world_size, **options
            )
            return MegatronIterator(loader, layout, metadata_only=place.is_middle_stage)

        return iterator("train"), iterator("val"), iterator("test")

    provider.is_distributed = True  # type: ignore[attr-defined]  # Megatron then calls it on every rank
    return provider


@dataclass(frozen=True, slots=True)
class _Place:
    """Place of this process among Megatron's ranks."""

    rank: int
    world_size: int
    is_first_tensor_rank: bool
    is_middle_stage: bool

    @classmethod
    def of_this_process(cls) -> "_Place":
        try:
            from megatron.core import parallel_state
        except ImportError as error:
            raise ConfigError(
                "the provider needs megatron-core; run pip install 'energon-packed[megatron]'"
            ) from error
        if not parallel_state.is_initialized():
            raise ConfigError("megatron.core.parallel_state is not initialized; call the provider inside pretrain()")
        stages, stage = (
            parallel_state.get_pipeline_model_parallel_world_size(),
            parallel_state.get_pipeline_model_parallel_rank(),
        )
        return cls(
            rank=parallel_state.get_data_parallel_rank(),
            world_size=parallel_state.get_data_parallel_world_size(),
            is_first_tensor_rank=parallel_state.get_tensor_model_parallel_rank() == 0,
            is_middle_stage=0 < stage < stages - 1,
        )


def _megatron_lm(batch: PackedBatch) -> dict[str, Any]:
    if batch.cu_seqlens_padded is not None:
        raise ConfigError(
            "layout 'megatron-lm' has no boundaries for padded sub-samples; use pad_multiple=1 or 'bridge'"
        )
    end = torch.full_like(batch.labels[:, :1], IGNORE_INDEX)
    with_images = batch.pixel_values is not None and batch.image_grid_thw is not None
    return {
        "tokens": batch.input_ids,
        "labels": torch.cat([batch.labels, end], dim=1),
        "imgs": batch.pixel_values if with_images else torch.zeros(1, 1),
        "num_tiles": (
            batch.image_grid_thw.prod(dim=1).int()
            if batch.image_grid_thw is not None
            else torch.zeros(1, 1, dtype=torch.int32)
        ),
        "cu_lengths": batch.cu_seqlens[None],
        "max_lengths": torch.tensor([[batch.max_seqlen]], dtype=torch.int32),
    }
