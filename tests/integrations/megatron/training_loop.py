"""A training loop of megatron-core on CPU, with checkpoints as Megatron-LM lays them out.

ARGUMENTS: RANK WORLD_SIZE STORE SHARDS TOKENIZER FOLDER, in a script of `run_ranks`

Runs to step 6, prints one line for each step, and is killed. After step 3 it saves a complete checkpoint; after step 4
one that the kill interrupts: its data position is there, the tracker still names step 3.
"""

import itertools
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.rerun_state_machine import RerunDataIterator
from megatron.core.transformer import TransformerConfig

from energon_packed import ChatEncoder
from tests.internals import train_valid_test_dataloaders_provider

STEPS, COMPLETE, INTERRUPTED = 6, 3, 4


class PackedAttention(torch.nn.Module):
    """Attention inside each sub-sample of a row, on CPU, where megatron-core has none."""

    def __init__(self, **settings: object) -> None:
        super().__init__()

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object, **named: Any) -> Any:
        """Query, key and value (T, heads, width); returns (T, heads * width)."""
        bounds = named["packed_seq_params"].cu_seqlens_q.tolist()
        parts = []
        for start, end in itertools.pairwise(bounds):
            q, k, v = (x[start:end].transpose(0, 1) for x in (query, key, value))
            parts.append(torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1))
        return torch.cat(parts).flatten(1)


def main() -> None:
    rank, world_size, store, shards, tokenizer, folder = sys.argv[1:]
    torch.set_num_threads(1)
    parallel_state.initialize_model_parallel()
    encoder = ChatEncoder.from_pretrained(tokenizer)
    torch.manual_seed(0)
    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = PackedAttention
    model = GPTModel(
        config=TransformerConfig(
            num_layers=1,
            hidden_size=16,
            num_attention_heads=2,
            use_cpu_initialization=True,
            attention_dropout=0.0,
            hidden_dropout=0.0,
        ),
        transformer_layer_spec=spec,
        vocab_size=len(encoder.tokenizer),
        max_sequence_length=4096,
        position_embedding_type="learned_absolute",
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    tracker = Path(folder) / "latest_checkpointed_iteration.txt"
    step, restore = 0, None
    if tracker.is_file():
        step, restore = int(tracker.read_text()), Path(folder) / "data"
        saved = torch.load(Path(folder) / f"iter_{step:07d}" / "model.pt")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    provider = train_valid_test_dataloaders_provider(shards, encoder, layout="bridge", restore=restore, num_workers=1)
    train, _, _ = provider([0, 0, 0])
    assert train is not None
    iterator = RerunDataIterator(train)
    while step < STEPS:
        step += 1
        loss = train_step(model, optimizer, next(iterator))
        print(step, loss, flush=True)
        if step in (COMPLETE, INTERRUPTED) and restore is None:
            save(Path(folder), step, model, optimizer, iterator.iterable)
            torch.distributed.barrier()
            if step == COMPLETE and rank == "0":
                tracker.write_text(str(step))
    Path(f"{store}.{rank}").touch()
    while not all(Path(f"{store}.{number}").exists() for number in range(int(world_size))):
        time.sleep(0.01)  # the last step of each rank needs all of them
    os.kill(os.getpid(), signal.SIGKILL)


def train_step(model: GPTModel, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]) -> str:
    """One step on one row of each rank; returns the tokens of this rank and the loss in full precision."""
    tokens, bounds, longest = batch["tokens"], batch["cu_seqlens_q"], int(batch["max_seqlen_q"])
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=longest, max_seqlen_kv=longest
    )
    labels = batch["labels"].clamp(min=0)
    losses = model(tokens, batch["position_ids"][-1], None, labels=labels, packed_seq_params=packed)
    loss = (losses * batch["loss_mask"]).sum() / batch["loss_mask"].sum()
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        torch.distributed.all_reduce(parameter.grad, group=parallel_state.get_data_parallel_group())
    optimizer.step()
    return f"{int(tokens.sum())} {loss.item()!r}"


def save(folder: Path, step: int, model: GPTModel, optimizer: torch.optim.Optimizer, iterator: object) -> None:
    """Data position first, as Megatron-LM does, then the model."""
    rank = parallel_state.get_data_parallel_rank()
    data = folder / "data" / f"iter_{step:07d}" / "mp_rank_00"
    data.mkdir(parents=True, exist_ok=True)
    state = {"dataloader_state_dict": iterator.save_state()}  # type: ignore[attr-defined]
    torch.save(state, data / f"train_dataloader_dprank{rank:03d}.pt")
    if rank == 0:
        (folder / f"iter_{step:07d}").mkdir()
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(saved, folder / f"iter_{step:07d}" / "model.pt")
