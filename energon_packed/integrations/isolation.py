"""A model to how far the samples of a packed row influence each other: check_isolation.

The logits of a sample must not depend on the other samples of its row. Three forward passes compare:

    row        |-- first --|- second -|-- third --|
    change 1   x x x x x x              every token of the first sample; later logits must not change
    change 2                x x x x x x every token of the last sample; earlier logits may only show rounding
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from math import isfinite
from typing import Any

import numpy as np
import torch

from energon_packed.encoding import EncodedSample
from energon_packed.errors import ConfigError, IsolationError
from energon_packed.libraries import private
from energon_packed.loading.collation.batch import PackedBatch, padded_bounds
from energon_packed.loading.collation.collator import PaddingFreeCollator

_LENGTHS = (8, 6, 7, 5)  # tokens of the samples of the default row
# Fractions of the change in the changed sample itself. A leak changes later logits by far more than rounding does.
_ROUNDING = 1e-5
_MAX_ROUNDING = 0.05
_ONE_SAMPLE_A_ROW = (
    "pack with `max_samples_per_pack=1` and train with one pack in a batch, or choose a model that the page "
    "'Isolation' lists as clean"
)


@dataclass(frozen=True, slots=True)
class IsolationResult:
    """Result of check_isolation: how far samples of a row change the logits of each other.

    Attributes:
        later: largest change of the later samples' logits if every token of the first sample changes, as a fraction
            of the largest change in the first sample itself.
        earlier: the same for the samples before the last sample, if the tokens of the last sample change. A causal
            model cannot look ahead, so this is rounding: with routed experts, the sizes of matrix products change.
    """

    later: float
    earlier: float

    @property
    def leaks(self) -> bool:
        """Whether the change is larger than rounding."""
        return self.later > max(_ROUNDING, 5 * self.earlier) or max(self.later, self.earlier) > _MAX_ROUNDING


def check_isolation(model: Any, batch: PackedBatch | None = None) -> IsolationResult:
    """Check that a model keeps the samples of a packed row apart.

        model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa")
        check_isolation(model)

    Runs three forward passes over one short row, without gradients, in training mode and with the same random numbers.
    With sharded parameters (FSDP, DeepSpeed), call it on every rank. A model that is known to leak in the installed
    release of Transformers is refused by name, before any pass.

    Args:
        model: a Hugging Face causal language model or vision-language model, wrapped (PEFT, DDP) or not.
        batch: row to use, of at least two samples, images included; by default 26 random tokens in 4 samples. In the
            first and the last sample, all tokens change except special tokens of the model's configuration.

    Raises:
        IsolationError: logits of a sample change with the tokens of another sample, the model does not accept packed
            rows, or its logits are not finite.
        BatchError: `batch` has fewer than two samples.
    """
    refuse_known(model)
    inputs, bounds = _inputs(model, batch)
    try:
        result = measure(model, inputs, bounds)
    except (TypeError, ValueError, RuntimeError) as error:  # also NotImplementedError
        check_positions(model, inputs["position_ids"], error)
        if not isinstance(error, TypeError | ValueError | NotImplementedError):
            raise
        reason = " ".join(str(error).split())[:200]
        raise IsolationError(f"{describe(model)} cannot read packed rows: {reason}; {_ONE_SAMPLE_A_ROW}") from error
    if not isfinite(result.later) or not isfinite(result.earlier):
        raise IsolationError(
            f"{describe(model)} returns logits that are not finite, or that do not depend on their tokens, so "
            "isolation cannot be checked. Load trained weights, or use another dtype."
        )
    if result.leaks:
        raise IsolationError(
            f"{describe(model)} does not keep packed samples apart: other tokens in the first sample change the "
            f"logits of later ones by {result.later:.1e} of the change in the first (rounding: {result.earlier:.1e}); "
            f"{_remedy(model)}"
        )
    return result


def measure(model: Any, inputs: dict[str, Any], bounds: list[int]) -> IsolationResult:
    """Measure the influence of the first and of the last sample on the other samples.

    Args:
        model: as in `check_isolation`.
        inputs: arguments of the model for one row of T tokens, without labels.
        bounds: sample boundaries in the row, S+1 numbers from 0; the last number is at most T.
    """
    first, last = slice(0, bounds[1]), slice(bounds[-2], bounds[-1])
    later, earlier = slice(bounds[1], bounds[-1]), slice(0, bounds[-2])
    with repeatable(model):
        plain = _logits(model, inputs)
        changed = _logits(model, _changed(model, inputs, first))
        control = _logits(model, _changed(model, inputs, last))
    return IsolationResult(
        later=_relative_change(changed - plain, later, first),
        earlier=_relative_change(control - plain, earlier, last),
    )


def refuse_known(model: Any) -> None:
    """Refuse a model that the table of this release lists as leaking; see docs/isolation.md.

    The table is valid for one release of Transformers; with another release, no model is refused by name.

    Raises:
        IsolationError: the table lists the model as leaking.
    """
    table = isolation_table()
    if table["transformers"] == version("transformers") and _known(model).get(attention_of(model)) == "leaks":
        raise IsolationError(
            f"{describe(model)} does not keep packed samples apart in Transformers {table['transformers']}: "
            f"{_remedy(model)}"
        )


@cache
def isolation_table() -> dict[str, Any]:
    """Return the families tested with tiny random models by tools/isolation_table.py.

    `transformers` is the release; `families` has, by class name: `model_type`, `kind` (`text` or `vision`), and by
    attention implementation `clean`, `leaks`, `kernel` (needs the package in `needs`) or `refuses` (it raises);
    `with_kernel` is the result with that package, on a GPU.
    `images` has the families tested with images by their processors, by name.
    """
    table: dict[str, Any] = json.loads(files(__package__).joinpath("isolation_table.json").read_text(encoding="utf-8"))
    return table


def describe(model: Any) -> str:
    """Return class and attention implementation of a model, for messages."""
    return f"{type(_transformer(model)).__name__} with attn_implementation={attention_of(model)!r}"


def attention_of(model: Any) -> str:
    """Return the attention implementation of a model's text part."""
    config = _transformer(model).config
    if not hasattr(config, "get_text_config"):  # the model is not from Transformers
        return "None"
    of_text, own = (private(each, "_attn_implementation", "transformers") for each in (_text_config(config), config))
    return str(of_text or own)


def _remedy(model: Any) -> str:
    clean = [name for name in ("sdpa", "eager") if _known(model).get(name) == "clean"]
    if clean and attention_of(model) not in clean:
        return f"load it with attn_implementation={clean[0]!r}, which keeps them apart"
    return _ONE_SAMPLE_A_ROW


def _known(model: Any) -> dict[str, Any]:
    known: dict[str, Any] = isolation_table()["families"].get(type(_transformer(model)).__name__, {})
    return known


def _transformer(model: Any) -> Any:
    """Return the Hugging Face model inside wrappers."""
    from transformers import PreTrainedModel

    return next((module for module in model.modules() if isinstance(module, PreTrainedModel)), model)


def _inputs(model: Any, batch: PackedBatch | None) -> tuple[dict[str, Any], list[int]]:
    """Return arguments of the model on its device, and the sample boundaries."""
    row = short_row(model) if batch is None else batch
    if row.num_samples < 2:
        raise IsolationError(f"`batch` must have at least 2 samples, got {row.num_samples}. Pass a longer row.")
    device = next(model.parameters()).device
    inputs = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in row.transformers_inputs().items()
        if name != "labels"
    }
    bounds = padded_bounds(row)
    return inputs, bounds.tolist()[: row.num_samples + 1]


def short_row(model: Any, lengths: Sequence[int] = _LENGTHS) -> PackedBatch:
    """Return a row of random text tokens, by default 26 in 4 samples, with the positions that the model needs."""
    allowed = _text_tokens(_transformer(model).config)
    chosen = torch.randint(len(allowed), (1, sum(lengths)), generator=torch.Generator().manual_seed(0))
    samples = []
    for ids in np.split(allowed[chosen][0].numpy(), np.cumsum(lengths)[:-1]):
        positions = np.tile(np.arange(len(ids)), (3, 1)) if has_mrope(model) else None
        samples.append(EncodedSample(input_ids=ids, labels=ids, position_ids=positions))
    return PaddingFreeCollator(dummy_images="never").collate(samples)


def _text_tokens(config: Any) -> torch.Tensor:
    """Return the ids of text tokens: all ids that the configuration does not name."""
    allowed = torch.ones(_text_config(config).vocab_size, dtype=torch.bool)
    special = _special_tokens(config.to_dict())
    allowed[[token for token in special if 0 <= token < len(allowed)]] = False
    return allowed.nonzero()[:, 0]


def _text_config(config: Any) -> Any:
    """Return the configuration of the text part of a model."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _special_tokens(values: dict[str, Any]) -> Iterator[int]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _special_tokens(value)
        elif isinstance(name, str) and "token" in name and ("id" in name or "index" in name):
            yield from (token for token in (value if isinstance(value, list) else [value]) if isinstance(token, int))


def check_positions(model: Any, position_ids: torch.Tensor, error: Exception) -> None:
    """Explain the error of a model that has one position for each token and gets M-RoPE positions.

    Args:
        model: the model.
        position_ids: int64 (1, T), or (4, 1, T) for M-RoPE models.
        error: the error of its forward pass.

    Raises:
        ConfigError: the positions do not fit the model.
    """
    if position_ids.ndim == 3 and not has_mrope(model):
        raise ConfigError(f"{not_mrope(model)}, got {tuple(position_ids.shape)}. {MROPE_REMEDY}.") from error


MROPE_REMEDY = (
    "Train the model that the processor of the encoder belongs to, or pack text with the tokenizer of this model or "
    "`vision_family` 'none'"
)


def not_mrope(model: Any) -> str:
    """Start of the message for a model that gets M-RoPE positions and does not use them."""
    return f"`position_ids` must be (1, T) for {type(model).__name__}, which has no M-RoPE"


def has_mrope(model: Any) -> bool:
    """Whether a module of the model has sections of M-RoPE."""
    return any(hasattr(module, "mrope_section") for module in model.modules())


def _changed(model: Any, inputs: dict[str, Any], part: slice) -> dict[str, Any]:
    """Return the inputs with every text token in `part` replaced by another text token."""
    allowed = _text_tokens(_transformer(model).config).to(inputs["input_ids"].device)
    ids = inputs["input_ids"].clone()
    inside = ids[0, part]
    index = torch.searchsorted(allowed, inside).clamp(max=len(allowed) - 1)
    others = allowed[(index + len(allowed) // 2) % len(allowed)]
    # Special tokens stay: an image token without its image, for example, would raise in the model.
    ids[0, part] = torch.where(allowed[index] == inside, others, inside)
    return inputs | {"input_ids": ids}


def _logits(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """Return float32 logits (T, vocabulary), with the same random numbers in every pass."""
    device = inputs["input_ids"].device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        logits: torch.Tensor = model(**inputs).logits[0].float()
    return logits


def _relative_change(change: torch.Tensor, others: slice, own: slice) -> float:
    return float(change[others].abs().max() / change[own].abs().max())


@contextmanager
def repeatable(model: Any) -> Iterator[None]:
    """Use training mode without gradients and without running statistics; restore the mode of every module."""
    before = [(module, module.training) for module in model.modules()]
    model.train()
    for module, _ in before:
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in before:
            module.training = training
