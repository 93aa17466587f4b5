"""Megatron's parallel state to the rank of this process, and a check of settings that would corrupt rows silently."""

import sys
from dataclasses import dataclass
from typing import Any

from energon_packed.errors import ConfigError
from energon_packed.integrations.megatron.layouts import Layout, early_bridge, release
from energon_packed.libraries import private
from energon_packed.loading.collation.collator import Collator, PaddingFreeCollator


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronRanks:
    """Ranks of this process in Megatron's parallel groups.

    Attributes:
        rank, world_size: data-parallel, without context parallelism.
        context_parallel_size: processes that share a row.
        is_first_tensor_rank: first rank of its tensor-parallel group.
        is_middle_stage: neither the first nor the last stage of the pipeline.
        is_first: first of the processes that share a data-parallel rank.
    """

    rank: int
    world_size: int
    context_parallel_size: int
    is_first_tensor_rank: bool
    is_middle_stage: bool
    is_first: bool = True

    @classmethod
    def of_this_process(cls) -> "MegatronRanks":
        """Read the ranks from `megatron.core.parallel_state`.

        Raises:
            ConfigError: megatron-core is not installed or not initialized.
        """
        try:
            from megatron.core import parallel_state
        except ImportError as error:
            raise ConfigError(
                "the provider needs megatron-core. Run pip install 'energon-packed[megatron]'."
            ) from error
        if not parallel_state.is_initialized():
            raise ConfigError("megatron.core.parallel_state is not initialized. Call the provider inside pretrain().")
        stages = parallel_state.get_pipeline_model_parallel_world_size()
        stage = parallel_state.get_pipeline_model_parallel_rank()
        tensor_rank = parallel_state.get_tensor_model_parallel_rank()
        return cls(
            rank=parallel_state.get_data_parallel_rank(),
            world_size=parallel_state.get_data_parallel_world_size(),
            context_parallel_size=parallel_state.get_context_parallel_world_size(),
            is_first_tensor_rank=tensor_rank == 0,
            is_middle_stage=0 < stage < stages - 1,
            is_first=not (tensor_rank or stage or parallel_state.get_context_parallel_rank()),
        )

    def loads(self, layout: Layout) -> bool:
        """Return whether the step of this layout reads the iterator on this rank; False if it receives a broadcast."""
        if layout == "megatron-lm":
            return self.is_first_tensor_rank and not self.is_middle_stage
        return layout in ("bridge", "bridge-audio") or self.is_first_tensor_rank


def megatron_lm_args() -> Any:
    """Return Megatron-LM's `get_args()`; None if Megatron-LM is not running."""
    training = sys.modules.get("megatron.training.global_vars")
    try:
        return None if training is None else training.get_args()
    except AssertionError:  # imported, for example by Megatron-Bridge, but not in use
        return None


def num_microbatches() -> int:
    """Return the micro batches of a rank in a step, from Megatron's calculator; 1 if it is not initialized."""
    from megatron.core import num_microbatches_calculator

    if private(num_microbatches_calculator, "_GLOBAL_NUM_MICROBATCHES_CALCULATOR", "megatron-core") is None:
        return 1
    return int(num_microbatches_calculator.get_num_microbatches())


def data_parallel_group() -> Any:
    """Return the process group of the ranks that read different rows."""
    from megatron.core import parallel_state

    return parallel_state.get_data_parallel_group()


def megatron_version() -> str:
    """Return the version of megatron-core."""
    from megatron import core

    return str(core.__version__)


def check_parallelism(ranks: MegatronRanks, layout: Layout, collator: Collator | None) -> None:
    """Refuse settings with which the training step would be silently wrong.

    Raises:
        ConfigError: the step drops the sample boundaries with this parallelism, padding is not divisible by context
            parallelism, or loss weights do not reach the step.
    """
    size, args = ranks.context_parallel_size, megatron_lm_args()
    if layout == "megatron-lm":
        if size > 1 or getattr(args, "sequence_parallel", False):
            raise ConfigError(
                "layout 'megatron-lm' does not support context or sequence parallelism: examples/multimodal then "
                "replaces the sample boundaries by the row boundaries, so that samples attend to each other. Disable "
                "both, or use layout 'bridge'."
            )
        if isinstance(collator, PaddingFreeCollator) and collator.loss_weighting != "token":
            raise ConfigError(
                f"`loss_weighting` must be 'token' with layout 'megatron-lm', got {collator.loss_weighting!r}: "
                "examples/multimodal uses a loss mask of ones. Use 'token', or another layout."
            )
    if layout == "megatron-gpt" and args is not None and release(megatron_version()) < (0, 18):
        tensor, stages = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
        if tensor > 1 or stages > 2 or size > 1:
            raise ConfigError(
                f"layout 'megatron-gpt' with tensor parallelism over {tensor} ranks, context parallelism over {size} "
                f"and {stages} pipeline stages needs Megatron-LM core_v0.18 or later, got {megatron_version()}, whose "
                "pretrain_gpt.py does not pass the sample boundaries to all ranks. Update Megatron-LM."
            )
    if layout == "bridge-audio" and size > 1:
        raise ConfigError(
            f"layout 'bridge-audio' does not support context parallelism, got {size} ranks: the Qwen2-Audio of "
            "Megatron-Bridge does not divide a row among them. Disable context parallelism."
        )
    if layout == "bridge" and ranks.is_middle_stage and (version := early_bridge()):
        raise ConfigError(
            f"layout 'bridge' with more than 2 pipeline stages needs Megatron-Bridge 0.6 or later, got {version}, "
            "whose gpt_step does not pass the sample boundaries to the middle stages. Update Megatron-Bridge."
        )
    if size > 1 and (collator is None or isinstance(collator, PaddingFreeCollator)):
        # Megatron assigns each context-parallel rank 2 chunks of every sample, so that causal work is equal.
        multiple, width = (1, None) if collator is None else (collator.pad_multiple, collator.pad_to)
        if multiple % (2 * size) or (width or 0) % (2 * size):
            raise ConfigError(
                f"`pad_multiple` and `pad_to` must be multiples of {2 * size} for context parallelism over {size} "
                f"ranks, got {multiple} and {width}. Pass collator=PaddingFreeCollator(pad_multiple={2 * size}), and "
                f"pack with --pad-multiple {2 * size}."
            )
