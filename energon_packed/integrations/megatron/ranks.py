"""Place of this process among Megatron's ranks, and settings that would give silently wrong rows there."""

import sys
from dataclasses import dataclass
from typing import Any

from energon_packed.errors import ConfigError
from energon_packed.integrations.megatron.layouts import Layout
from energon_packed.loading import Collator, PaddingFreeCollator


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronRanks:
    """Place of this process among Megatron's ranks.

    Attributes:
        rank, world_size: data-parallel, without context parallelism.
        context_parallel_size: processes that share a row.
        is_first_tensor_rank: first of its tensor-parallel group.
        is_middle_stage: neither the first nor the last stage of the pipeline.
    """

    rank: int
    world_size: int
    context_parallel_size: int
    is_first_tensor_rank: bool
    is_middle_stage: bool

    @classmethod
    def of_this_process(cls) -> "MegatronRanks":
        """As `megatron.core.parallel_state` has it.

        Raises:
            ConfigError: megatron-core is not installed or not initialized.
        """
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
            context_parallel_size=parallel_state.get_context_parallel_world_size(),
            is_first_tensor_rank=parallel_state.get_tensor_model_parallel_rank() == 0,
            is_middle_stage=0 < stage < stages - 1,
        )

    def loads(self, layout: Layout) -> bool:
        """Whether the step of this layout reads the iterator here, or gets the batch from another rank."""
        if layout == "megatron-lm":
            return self.is_first_tensor_rank and not self.is_middle_stage
        return layout == "bridge" or self.is_first_tensor_rank


def megatron_lm_args() -> Any:
    """What Megatron-LM's `get_args()` returns; None where Megatron-LM does not run."""
    training = sys.modules.get("megatron.training.global_vars")
    try:
        return None if training is None else training.get_args()
    except AssertionError:  # imported (Megatron-Bridge does so), and not in use
        return None


def check_parallelism(place: MegatronRanks, layout: Layout, collator: Collator | None) -> None:
    """Refuse settings with which the training step would be silently wrong.

    Raises:
        ConfigError: context or sequence parallelism that drops the boundaries of samples, padding that context
            parallelism cannot divide, or loss weights that do not reach the step.
    """
    size, args = place.context_parallel_size, megatron_lm_args()
    if layout == "megatron-lm":
        if size > 1 or getattr(args, "sequence_parallel", False):
            raise ConfigError(
                "layout 'megatron-lm' with context or sequence parallelism: examples/multimodal then replaces the "
                "boundaries of samples by those of the row, so that samples attend to each other; use neither, or "
                "layout 'bridge'"
            )
        if isinstance(collator, PaddingFreeCollator) and collator.loss_weighting != "token":
            raise ConfigError(
                f"`loss_weighting` is {collator.loss_weighting!r}, which layout 'megatron-lm' cannot carry: "
                "examples/multimodal makes its own loss mask of ones; use 'token', or another layout"
            )
    if size > 1 and (collator is None or isinstance(collator, PaddingFreeCollator)):
        multiple, width = (1, None) if collator is None else (collator.pad_multiple, collator.pad_to)
        if multiple % (2 * size) or (width or 0) % (2 * size):
            raise ConfigError(
                f"`pad_multiple` is {multiple} and `pad_to` is {width}, and context parallelism over {size} ranks "
                f"needs multiples of {2 * size}; pass collator=PaddingFreeCollator(pad_multiple={2 * size}), and pack "
                f"with --pad-multiple {2 * size}"
            )
