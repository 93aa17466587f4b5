"""torchtitan's Trainer with FSDP on the CPU, over PackedDataLoader."""

# ruff: noqa: E402

import sys
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention.flex_attention import create_block_mask, create_mask
from torch.optim.optimizer import register_optimizer_step_post_hook

# torchtitan asks for the device when it is imported.
torch._utils._get_available_device_type = lambda: "cpu"  # type: ignore[assignment]

from torchtitan.components import metrics
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import default_adamw
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed import utils
from torchtitan.models import qwen3
from torchtitan.models.common import CosSinRoPE, Embedding, Linear, attention
from torchtitan.trainer import Trainer
from transformers import AutoConfig

from energon_packed import PackedDataLoader
from tests.trainers.recorder import IGNORED, Recorder, Spec

STEPS = 7  # of 2 epochs: 13 packs, 2 ranks, 2 micro batches
SEQ_LEN = 128


def dense_attention(
    query: Any, key: Any, value: Any, *, block_mask: Any, scale: Any, enable_gqa: bool, **_: Any
) -> Any:
    """Attention with the mask that torchtitan made; FlexAttention has no backward pass on a CPU."""
    length = query.shape[2]
    mask = create_mask(block_mask.mask_mod, query.shape[0], None, length, length, device="cpu")
    output = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scale, enable_gqa=enable_gqa
    )
    return output, None


attention.FlexAttention._compiled_flex_attn = staticmethod(dense_attention)
attention._compiled_create_block_mask = create_block_mask


class NoMemory:
    """In place of the memory statistics of a device."""

    device_name = "CPU"

    def get_peak_stats(self) -> metrics.DeviceMemStats:
        return metrics.DeviceMemStats(0, 0, 0, 0, 0, 0)

    def reset_peak_stats(self) -> None:
        pass


metrics.build_device_memory_monitor = NoMemory
utils.set_pg_timeouts = lambda *_, **__: None  # sets shorter timeouts by the device


class RecordingTrainer(Trainer):
    """Records each micro batch."""

    recorder: Recorder

    def forward_backward_step(self, *, input_dict: Any, labels: Any, global_valid_tokens: Any) -> Any:
        inputs = {"input_ids": input_dict["input"], "position_ids": input_dict["positions"]}
        compute = self.loss_fn

        def loss_fn(*args: Any, **kwargs: Any) -> Any:
            result = compute(*args, **kwargs)
            loss = float(result[0].detach()) * float(global_valid_tokens)
            self.recorder.record(inputs, loss, targets=int((labels != IGNORED).sum()))
            return result

        self.loss_fn = loss_fn
        try:
            return super().forward_backward_step(
                input_dict=input_dict, labels=labels, global_valid_tokens=global_valid_tokens
            )
        finally:
            self.loss_fn = compute


def model_spec(folder: str) -> Any:
    """The Qwen3 model of torchtitan with the sizes of a configuration of Transformers."""
    sizes = AutoConfig.from_pretrained(folder)
    spec = qwen3.model_registry("debugmodel")
    dim, vocabulary = sizes.hidden_size, sizes.vocab_size
    model = replace(
        spec.model,
        vocab_size=vocabulary,
        dim=dim,
        norm=qwen3._qwen3_norm(dim),
        enable_weight_tying=False,
        tok_embeddings=Embedding.Config(
            num_embeddings=vocabulary, embedding_dim=dim, param_init=qwen3._EMBEDDING_INIT
        ),
        lm_head=Linear.Config(in_features=dim, out_features=vocabulary, param_init=qwen3._LINEAR_INIT),
        layers=qwen3._build_qwen3_layers(
            fuse_qkv=False,
            n_layers=sizes.num_hidden_layers,
            dim=dim,
            n_heads=sizes.num_attention_heads,
            n_kv_heads=sizes.num_key_value_heads,
            head_dim=sizes.head_dim,
            hidden_dim=sizes.intermediate_size,
            attn_backend="flex",
            rope=CosSinRoPE.Config(dim=sizes.head_dim, max_seq_len=SEQ_LEN, theta=sizes.rope_parameters["rope_theta"]),
        ),
    )
    return replace(spec, model=model)


def main(spec: Spec) -> None:
    trainer = RecordingTrainer(
        Trainer.Config(
            model_spec=model_spec(spec.model),
            hf_assets_path=spec.tokenizer,
            dump_folder=spec.checkpoints,
            dataloader=PackedDataLoader.Config(dataset_path=spec.packs),
            loss=CrossEntropyLoss.Config(),
            optimizer=default_adamw(lr=spec.learning_rate),
            activation_checkpoint=None,
            parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
            training=TrainingConfig(
                local_batch_size=1,
                global_batch_size=spec.accumulation * spec.world_size,
                seq_len=SEQ_LEN,
                steps=STEPS,
                max_norm=1e9,
                mixed_precision_param="float32",
                disable_cuda_graphs=True,
            ),
            checkpoint=CheckpointManager.Config(
                enable=True,
                interval=1,
                keep_latest_k=0,
                last_save_model_only=False,
                initial_load_path=spec.model,
                initial_load_in_hf=True,
            ),
        )
    )
    recorder = trainer.recorder = Recorder(spec)
    (model,) = trainer.model_parts
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other reduction
    to_hf = qwen3.Qwen3StateDictAdapter(trainer.model_config, None).to_hf
    if spec.gradients:
        register_optimizer_step_post_hook(
            lambda *_: recorder.keep(to_hf({name: value.grad for name, value in model.named_parameters()}))
        )
    trainer.train()
    recorder.finish(to_hf(model.state_dict()))
    trainer.close()


if __name__ == "__main__":
    main(Spec.read(sys.argv[1]))
