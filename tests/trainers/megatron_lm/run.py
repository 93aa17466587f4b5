"""Megatron-LM's `pretrain` with the script of docs/train-energon.md, from the checkout that MEGATRON_LM names."""

import contextlib
import functools
import os
import sys
import typing
from typing import Any
from unittest.mock import MagicMock

import torch
import typing_extensions
from torch.optim.optimizer import register_optimizer_step_pre_hook

sys.path.insert(1, os.environ["MEGATRON_LM"])  # has megatron.core too, of the same release

from tests.docs.pages import code_block
from tests.integrations.megatron.on_cpu import PackedAttention, run_on_cpu
from tests.trainers.megatron_model import Trained, recorded_step
from tests.trainers.recorder import Recorder, Spec

PACKS, SEQ_LEN = 13, 120  # of the harness
ARGUMENTS = f"""
--sft --micro-batch-size 1 --seq-length {SEQ_LEN} --dataloader-type external --tokenizer-type NullTokenizer
--ckpt-format torch --save-interval 1 --eval-iters 0 --eval-interval 1000 --calculate-per-token-loss --optimizer
adam --lr-decay-style constant --weight-decay 0.01 --clip-grad 0 --adam-beta2 0.999 --normalization RMSNorm
--norm-epsilon 1e-6 --swiglu --position-embedding-type rope --disable-bias-linear --add-qkv-bias
--group-query-attention --untie-embeddings-and-output-weights --make-vocab-size-divisible-by 1
--max-position-embeddings 4096 --attention-dropout 0 --use-cpu-initialization --transformer-impl local
--distributed-backend gloo --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-swiglu-fusion
--no-bias-dropout-fusion --no-rope-fusion --no-persist-layer-norm
"""


def main(spec: Spec) -> None:
    start_without_gpu()
    import pretrain_gpt

    source = spec.load_model()
    recorder, trained = Recorder(spec), Trained(source.config)
    step = recorded_step(pretrain_gpt.forward_step, recorder)

    def forward_step(iterator: Any, model: Any, *given: Any) -> Any:
        if trained.model is None:
            trained.model = model.module
            if not pretrain_gpt.get_args().iteration:  # no checkpoint is loaded
                trained.load(source.state_dict())
        return step(iterator, model, *given)

    pretrain_gpt.forward_step = forward_step
    register_optimizer_step_pre_hook(lambda *_: recorder.keep(trained.gradients()))
    config, steps = source.config, -(-PACKS // spec.world_size) * spec.epochs // spec.accumulation
    options = {
        "num-layers": config.num_hidden_layers,
        "hidden-size": config.hidden_size,
        "ffn-hidden-size": config.intermediate_size,
        "num-attention-heads": config.num_attention_heads,
        "num-query-groups": config.num_key_value_heads,
        "kv-channels": config.head_dim,
        "vocab-size": config.vocab_size,
        "hidden-dropout": spec.dropout,
        "global-batch-size": spec.accumulation * spec.world_size,
        "train-iters": steps,
        "lr": spec.learning_rate,
        "min-lr": spec.learning_rate,
        **dict.fromkeys(("save", "load", "dataloader-save"), spec.checkpoints),
    }
    sys.argv[1:] = ARGUMENTS.split()
    sys.argv += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    script = code_block("train-energon.md", "pretrain_gpt")
    here = {'"out"': repr(spec.packs), '"TOKENIZER_DIR"': repr(spec.tokenizer), "num_workers=4": "num_workers=1"}
    for text, value in here.items():
        assert script.count(text) == 1
        script = script.replace(text, value)
    exec(compile(script, "train.py", "exec"), {})
    recorder.finish(trained.weights())


def start_without_gpu() -> None:
    """Replace the parts of Megatron-LM and of Python that this machine does not have."""
    if not hasattr(typing, "override"):  # Python 3.11
        typing.override = typing_extensions.override  # type: ignore[attr-defined]
    run_on_cpu()
    torch.cuda.device_count = lambda: 1
    torch.cuda.set_device = lambda *_: None  # type: ignore[assignment]
    torch.cuda.Stream = torch.cuda.current_stream = torch.cuda.default_stream = MagicMock()  # type: ignore[misc]
    torch.cuda.stream = lambda *_: contextlib.nullcontext()  # type: ignore[assignment, misc]
    from megatron import core
    from megatron.core.models import backends
    from megatron.training import initialize, training

    # The version in tag core_v0.19.0 is 0.19.1.
    assert core.__version__.startswith("0.19."), f"MEGATRON_LM must be at core_v0.19.0, got {core.__version__}"
    backends.LocalSpecProvider.core_attention = lambda _: PackedAttention
    initialize._compile_dependencies = lambda: None  # of datasets that are not used here
    training.initialize_megatron = functools.partial(training.initialize_megatron, allow_no_cuda=True)


if __name__ == "__main__":
    main(Spec.read(sys.argv[1]))
