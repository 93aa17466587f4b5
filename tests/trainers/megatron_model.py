"""GPTModel of megatron-core with the weights of the model of the harness, and the record of its forward steps."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from tests.trainers.recorder import Recorder


class Trained:
    """A GPTModel with the names and tensors of the model of Transformers.

    Args:
        config: of the model of Transformers.

    Attributes:
        model: GPTModel; None before the first step.
    """

    def __init__(self, config: Any) -> None:
        self.model: Any = None
        self._groups = config.num_key_value_heads
        self._heads = config.num_attention_heads // config.num_key_value_heads  # of the queries in a group

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Copy the weights of a model of Transformers."""
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parts = [weights[other] for other in _names(name)]
                if "linear_qkv" in name:  # in each group: the queries, the key, the value
                    parameter.copy_(
                        torch.cat([x.unflatten(0, (self._groups, -1)) for x in parts], dim=1).flatten(0, 1)
                    )
                else:
                    parameter.copy_(torch.cat(parts))

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the weights by their names in Transformers."""
        return self._converted({name: parameter.detach() for name, parameter in self.model.named_parameters()})

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return the gradients that the optimizer uses, by their names in Transformers."""
        return self._converted({name: parameter.grad for name, parameter in self.model.named_parameters()})

    def _converted(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            names = _names(name)
            if "linear_qkv" in name:
                grouped = tensor.unflatten(0, (self._groups, self._heads + 2, -1))
                parts = [part.flatten(0, 2) for part in grouped.split([self._heads, 1, 1], dim=1)]
            else:
                parts = list(tensor.chunk(len(names)))
            found |= dict(zip(names, parts, strict=True))
        return found


def _names(name: str) -> list[str]:
    """Names in Transformers of a parameter of megatron-core, which may join several."""
    name = name.replace("decoder.final_layernorm", "model.norm").replace("decoder.", "model.")
    name = name.replace("embedding.word_embeddings", "model.embed_tokens").replace("output_layer", "lm_head")
    name = name.replace("pre_mlp_layernorm", "post_attention_layernorm")
    for joined, parts in (
        ("self_attention.linear_qkv", [f"self_attn.{part}_proj" for part in "qkv"]),
        ("self_attention.linear_proj", ["self_attn.o_proj"]),
        ("linear_fc1", ["gate_proj", "up_proj"]),
        ("linear_fc2", ["down_proj"]),
    ):
        if joined in name:
            return [name.replace(joined, part) for part in parts]
    return [name]


def recorded_step(step: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    """Return a forward step of Megatron, (iterator, model) to (output, loss function), that records micro batches."""

    def forward_step(iterator: Iterator[dict[str, Any]], model: Any, *given: Any) -> tuple[Any, Callable[..., Any]]:
        batch = next(iterator)
        is_real = ~batch.get("padding_mask", torch.zeros_like(batch["tokens"], dtype=torch.bool))
        inputs = {"input_ids": batch["tokens"][is_real], "position_ids": batch["position_ids"][is_real]}
        output, loss = step(iter([batch]), model, *given)

        def recorded_loss(*values: Any) -> Any:
            result = loss(*values)
            recorder.record(inputs, result[0].detach(), targets=int(result[1]))
            return result

        return output, recorded_loss

    return forward_step
