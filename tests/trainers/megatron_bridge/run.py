"""The gpt_step and the saved loader states of Megatron-Bridge, in a loop over the schedule of megatron-core.

Its `pretrain` needs GPUs and TransformerEngine; here, imports of packages for GPUs succeed and have no function.
"""

import sys
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.rerun_state_machine import RerunDataIterator
from megatron.core.transformer import TransformerConfig
from torch.optim.optimizer import register_optimizer_step_pre_hook

from energon_packed import ChatEncoder, PaddingFreeCollator
from tests.integrations.megatron.on_cpu import PackedAttention, run_on_cpu
from tests.internals import train_valid_test_dataloaders_provider
from tests.trainers.megatron_model import Trained, recorded_step
from tests.trainers.recorder import Recorder, Spec

GPU_PACKAGES = ("transformer_engine", "transformer_engine_torch", "modelopt", "triton", "nvidia_resiliency_ext")
PACKS, SEQ_LEN = 13, 160  # packs of the harness, and a length that its rows do not exceed with padding


class GpuPackages:
    """Finds modules of packages for GPUs: objects that accept every use."""

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] in GPU_PACKAGES else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module: Any = MagicMock(name=spec.name)
        module.__spec__, module.__path__, module.__name__, module.__version__ = spec, [], spec.name, "2.10.0"
        return module  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        pass


def main(spec: Spec) -> None:
    sys.meta_path.insert(0, GpuPackages())  # type: ignore[arg-type]  # after the import of megatron-core
    run_on_cpu()
    from megatron.bridge.training.checkpointing import maybe_save_dataloader_state
    from megatron.bridge.training.gpt_step import forward_step

    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    source = spec.load_model()
    recorder, trained = Recorder(spec), Trained(source.config)
    model = trained.model = build_model(source.config, spec)
    trained.load(source.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=spec.learning_rate)
    register_optimizer_step_pre_hook(lambda *_: recorder.keep(trained.gradients()))
    folder, step = Path(spec.checkpoints), 0
    if spec.resume:
        step = int(torch.load(folder / "latest_train_state.pt")["step"])
        saved = torch.load(folder / f"model-{step}-{spec.rank}.pt")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        torch.set_rng_state(saved["random"])
    provider = train_valid_test_dataloaders_provider(
        spec.packs,
        ChatEncoder.from_pretrained(spec.tokenizer),
        layout="bridge",
        restore=folder if spec.resume else None,
        collator=PaddingFreeCollator(pad_multiple=4, pad_to=SEQ_LEN),
        num_workers=1,
    )
    iterator = RerunDataIterator(provider()[0])
    wrapped = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    state = SimpleNamespace(timers=MagicMock(), straggler_timer=MagicMock(), cfg=MagicMock())
    state.cfg.rerun_state_machine.check_for_nan_in_loss = state.cfg.rerun_state_machine.check_for_spiky_loss = False
    while step < -(-PACKS // spec.world_size) * spec.epochs // spec.accumulation:
        step += 1
        wrapped.zero_grad_buffer()
        get_forward_backward_func()(
            forward_step_func=recorded_step(partial(forward_step, state), recorder),
            data_iterator=iterator,
            model=[wrapped],
            num_microbatches=spec.accumulation,
            seq_length=SEQ_LEN,
            micro_batch_size=1,
            forward_only=False,
        )
        for parameter in model.parameters():
            parameter.grad = parameter.main_grad.clone()
        optimizer.step()
        optimizer.zero_grad()
        maybe_save_dataloader_state(model, iterator, step, str(folder / "energon"))
        parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "random": torch.get_rng_state()}
        torch.save(parts, folder / f"model-{step}-{spec.rank}.pt")
        torch.distributed.barrier()
        if spec.rank == 0:
            torch.save({"step": torch.tensor(step)}, folder / "written.pt")
            (folder / "written.pt").rename(folder / "latest_train_state.pt")
    recorder.finish(trained.weights())


def build_model(config: Any, spec: Spec) -> GPTModel:
    layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    layer.submodules.self_attention.submodules.core_attention = PackedAttention
    return GPTModel(
        config=TransformerConfig(
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            ffn_hidden_size=config.intermediate_size,
            num_attention_heads=config.num_attention_heads,
            num_query_groups=config.num_key_value_heads,
            kv_channels=config.head_dim,
            normalization="RMSNorm",
            layernorm_epsilon=config.rms_norm_eps,
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            add_bias_linear=False,
            add_qkv_bias=True,
            use_cpu_initialization=True,
            attention_dropout=0.0,
            hidden_dropout=spec.dropout,
            bias_dropout_fusion=False,
            calculate_per_token_loss=True,
            finalize_model_grads_func=finalize_model_grads,
        ),
        transformer_layer_spec=layer,
        vocab_size=config.vocab_size,
        max_sequence_length=4096,
        position_embedding_type="rope",
    ).train()


if __name__ == "__main__":
    main(Spec.read(sys.argv[1]))
