"""Training with megatron-core on CPU over parallel groups, with checkpoints in the layout of Megatron-LM.

ARGUMENTS: RANK WORLD_SIZE STORE SHARDS FOLDER LAYOUT TENSOR PIPELINE CONTEXT, in a script of `run_ranks`

`main` prints one line for each step and is killed after step 6. After step 3 it saves a complete checkpoint. The kill
interrupts the checkpoint of step 4: its data position is saved, the tracker still names step 3. `reference` trains the
same model on each sample separately, without parallel groups.
"""

import hashlib
import os
import signal
import sys
import time
from collections.abc import Iterable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel, utils
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.rerun_state_machine import RerunDataIterator
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from energon_packed import PaddingFreeCollator
from tests.integrations.megatron.on_cpu import PackedAttention, run_on_cpu
from tests.internals import global_loader, train_valid_test_dataloaders_provider

STEPS, COMPLETE, INTERRUPTED = 6, 3, 4
MICRO_BATCHES, SEQ_LEN, VOCABULARY, LAYERS, LEARNING_RATE = 2, 64, 64, 2, 0.5
FIRST_RANK_LOADS = {"tokens": torch.int64, "labels": torch.int64, "loss_mask": torch.float32} | {
    name: torch.int32 for name in ("cu_seqlens", "max_seqlen")
}  # pretrain_gpt.py broadcasts these


class Norm(torch.nn.LayerNorm):
    """Norm with sequence parallelism, which the norm of megatron-core for CPU does not support."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps=eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def build_model(tensor: int = 1, pipeline: int = 1, context: int = 1) -> GPTModel:
    """Model part of this rank; the weights do not depend on the parallel groups."""
    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = PackedAttention
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = Norm
    model = GPTModel(
        config=TransformerConfig(
            num_layers=LAYERS,
            hidden_size=16,
            num_attention_heads=4,
            use_cpu_initialization=True,
            attention_dropout=0.0,
            hidden_dropout=0.0,
            tensor_model_parallel_size=tensor,
            pipeline_model_parallel_size=pipeline,
            context_parallel_size=context,
            sequence_parallel=tensor > 1,
            pipeline_dtype=torch.float32,
            calculate_per_token_loss=True,
            finalize_model_grads_func=finalize_model_grads,
        ),
        transformer_layer_spec=TransformerBlockSubmodules([spec] * (LAYERS // pipeline), layer_norm=Norm),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQ_LEN,
        position_embedding_type="rope",
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    with torch.no_grad():
        for name, parameter in whole_names(model).items():
            seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
            whole = [*parameter.shape]
            if is_sharded(parameter):
                whole[parameter.partition_dim] *= tensor
            drawn = torch.randn(whole, generator=torch.Generator().manual_seed(seed)) * 0.3
            parameter.copy_(part(drawn + ("layernorm.weight" in name), parameter))
    return model


def whole_names(model: GPTModel) -> dict[str, torch.nn.Parameter]:
    """Parameters by their names in a model without pipeline stages."""
    first = model.decoder.layers[0].layer_number - 1
    return {
        ".".join(str(int(word) + first) if word.isdigit() else word for word in name.split(".")): parameter
        for name, parameter in model.named_parameters()
    }


def is_sharded(parameter: torch.nn.Parameter) -> bool:
    return getattr(parameter, "tensor_model_parallel", False)


def part(whole: torch.Tensor, parameter: torch.nn.Parameter) -> torch.Tensor:
    """Part of a weight that this tensor-parallel rank has."""
    if not is_sharded(parameter):
        return whole
    group = parallel_state.get_tensor_model_parallel_group()
    return whole.chunk(group.size(), dim=parameter.partition_dim)[group.rank()]


def update(model: GPTModel, gradients: Iterable[torch.Tensor]) -> None:
    with torch.no_grad():
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter -= LEARNING_RATE * gradient


def read_batch(iterator: Any) -> dict[str, Any]:
    """Batch of this rank; if only the first rank of a tensor-parallel group loads, the batch is broadcast."""
    if parallel_state.get_tensor_model_parallel_world_size() == 1:
        batch = next(iterator)
        bounds = batch["cu_seqlens_q"]
        batch["cu_seqlens"], batch["cu_seqlens_padded"] = bounds, batch.get("cu_seqlens_q_padded", bounds)
        return batch | {"max_seqlen": batch["max_seqlen_q"][None]}
    batch = {} if iterator is None else next(iterator)
    if hasattr(utils, "get_batch_on_this_tp_rank"):
        return broadcast_by_core(batch)
    sent: dict[str, Any] = {}
    for kind in set(FIRST_RANK_LOADS.values()):
        names = [name for name, other in FIRST_RANK_LOADS.items() if other == kind]
        sent |= tensor_parallel.broadcast_data(names, batch, kind)
    sent["cu_seqlens"] = sent["cu_seqlens"][0]
    # Since core_v0.18, the step reads these boundaries, and broadcasts them only with context parallelism.
    padded = batch.get("cu_seqlens_padded")
    return sent | {"cu_seqlens_padded": sent["cu_seqlens"] if padded is None else padded[0]}


def broadcast_by_core(batch: dict[str, Any]) -> dict[str, Any]:
    """Batch of this rank by the functions of core_v0.19, without context parallelism, as pretrain_gpt.py."""
    names = (*FIRST_RANK_LOADS, "position_ids", "cu_seqlens_padded", "attention_mask")
    batch = utils.get_batch_on_this_tp_rank(
        {name: batch.get(name) for name in names},
        broadcast_src_rank=parallel_state.get_tensor_model_parallel_src_rank(),
        broadcast_group=parallel_state.get_tensor_model_parallel_group(),
        has_cu_seqlens=True,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=False,
        cp_size=1,
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        micro_batch_size=1,
        seq_length=SEQ_LEN,
        mtp_on_this_rank=False,
    )
    batch = utils.flatten_batch_for_packed_sequences(batch)
    bounds, padded = batch["cu_seqlens"][0], batch["cu_seqlens_padded"]
    return batch | {"cu_seqlens": bounds, "cu_seqlens_padded": bounds if padded is None else padded[0]}


def split_over_context_ranks(batch: dict[str, Any]) -> tuple[dict[str, Any], PackedSeqParams]:
    """Tokens of this rank of a context-parallel group, and the boundaries for attention, as pretrain_gpt.py."""
    kept = {name: batch[name] for name in ("tokens", "labels", "loss_mask")}
    bounds, padded, longest = batch["cu_seqlens"], batch["cu_seqlens_padded"], batch["max_seqlen"]
    if hasattr(utils, "get_thd_batch_on_this_cp_rank"):  # until core_v0.18
        return utils.get_thd_batch_on_this_cp_rank(kept, bounds, padded, longest)
    kept |= {"cu_seqlens": bounds[None], "cu_seqlens_padded": padded[None], "max_seqlen": longest}
    group = parallel_state.get_context_parallel_group()
    kept = utils.get_batch_on_this_cp_rank(kept, is_hybrid_cp=False, cp_group=group)
    names = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
    limits = dict.fromkeys(("max_seqlen_q", "max_seqlen_kv"), int(longest.item()))
    return kept, PackedSeqParams(qkv_format="thd", **dict.fromkeys(names, padded), **limits, tokens_per_sample=SEQ_LEN)


def forward_step(iterator: Any, model: Any) -> tuple[torch.Tensor, Any]:
    kept, params = split_over_context_ranks(read_batch(iterator))
    labels = kept["labels"].clamp(min=0)
    losses = model(kept["tokens"], None, None, labels=labels, packed_seq_params=params)
    return losses, partial(sum_loss, kept["loss_mask"])


def sum_loss(mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    total, targets = (losses * mask).sum(), mask.sum().int()
    return total, targets, {"loss": total.detach()}


def main() -> None:
    rank, world_size, store, shards, folder, layout, *sizes = sys.argv[1:]
    torch.set_num_threads(1)
    tensor, pipeline, context = map(int, sizes)
    run_on_cpu()
    parallel_state.initialize_model_parallel(tensor, pipeline, context_parallel_size=context)
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    model = build_model(tensor, pipeline, context)
    tracker = Path(folder) / "latest_checkpointed_iteration.txt"
    step, restore = 0, None
    if tracker.is_file():
        step, restore = int(tracker.read_text()), Path(folder) / "data"
        model.load_state_dict(torch.load(Path(folder) / f"iter_{step:07d}" / f"model{rank}.pt"))
    wrapped = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    collator = PaddingFreeCollator(pad_multiple=4, pad_to=SEQ_LEN)
    provider = train_valid_test_dataloaders_provider(
        shards,
        None,
        layout=layout,
        restore=restore,
        num_workers=1,
        collator=collator,  # type: ignore[arg-type]
    )
    train, _, _ = provider([0, 0, 0])
    iterator = None if train is None else RerunDataIterator(train)
    while step < STEPS:
        step += 1
        wrapped.zero_grad_buffer()
        done = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterator,
            model=[wrapped],
            num_microbatches=MICRO_BATCHES,
            seq_length=SEQ_LEN,
            micro_batch_size=1,
            forward_only=False,
        )
        update(model, (parameter.main_grad for parameter in model.parameters()))
        loss = sum((micro["loss"] for micro in done), torch.zeros(()))  # of this rank, 0 before the last stage
        torch.distributed.all_reduce(loss, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
        print(step, loss.item(), digest, flush=True)
        if step in (COMPLETE, INTERRUPTED) and restore is None:
            save(Path(folder), step, model, iterator)
            torch.distributed.barrier()
            if step == COMPLETE and rank == "0":
                tracker.write_text(str(step))
    expected = torch.load(Path(folder) / "reference.pt")
    change, difference = 0.0, 0.0
    for name, parameter in whole_names(model).items():
        first, last = (part(whole, parameter) for whole in expected[name])
        change, difference = (
            max(old, float(new.abs().max())) for old, new in ((change, last - first), (difference, parameter - last))
        )
    print("difference", difference / change, flush=True)
    Path(f"{store}.{rank}").touch()
    deadline = time.monotonic() + 60
    while not all(Path(f"{store}.{number}").exists() for number in range(int(world_size))):
        assert time.monotonic() < deadline
        time.sleep(0.01)  # the last step of each rank needs all of them
    os.kill(os.getpid(), signal.SIGKILL)


def save(folder: Path, step: int, model: GPTModel, iterator: Any) -> None:
    """Save the data position, and then the model, as Megatron-LM does."""
    data, saved = folder / "data" / f"iter_{step:07d}" / "mp_rank_00", folder / f"iter_{step:07d}"
    for path in (data, saved):
        path.mkdir(parents=True, exist_ok=True)
    groups = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank()
    if groups == (0, 0) and parallel_state.get_context_parallel_rank() == 0:
        state = {"dataloader_state_dict": iterator.iterable.save_state()}
        torch.save(state, data / f"train_dataloader_dprank{parallel_state.get_data_parallel_rank():03d}.pt")
    torch.save(model.state_dict(), saved / f"model{torch.distributed.get_rank()}.pt")


def reference() -> None:
    """Print the summed loss of each step, and save the weights before and after the training."""
    _, _, _, shards, file, world_size = sys.argv[1:]
    run_on_cpu()
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    model = build_model()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    ranks = [
        iter(global_loader(Path(shards), None, rank=rank, world_size=int(world_size), num_workers=0))
        for rank in range(int(world_size))
    ]
    for _ in range(STEPS):
        rows = [row for rank in ranks for row in islice(rank, MICRO_BATCHES)]
        total, targets = torch.zeros(()), 0
        for sample in (sample for row in rows for sample in row.split()):
            logits = model(torch.from_numpy(sample.input_ids)[None].long(), None, None)[0, :-1]
            labels = torch.from_numpy(sample.labels)[1:].long()
            total = total + torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
            targets += int((labels != -100).sum())
        print(total.item(), flush=True)
        update(model, torch.autograd.grad(total / targets, [*model.parameters()]))
    torch.save({name: (before[name], p.detach()) for name, p in model.named_parameters()}, file)
