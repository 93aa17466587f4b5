"""CostModel: sizes of rows -> estimated compute cost of each row, in floating point operations or seconds."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import combinations
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from energon_packed.arrays import blocks
from energon_packed.errors import ConfigError
from energon_packed.files import disk_array
from energon_packed.loading.costs.flops import audio_flops, text_flops, vision_flops

Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]
HIDDEN_SIZE = 4096
"""Hidden size of a model of 7 to 8 billion parameters."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowSizes:
    """Sizes of P rows that determine their cost.

    Attributes:
        tokens: int64 (P,), tokens of each row.
        squares: int64 (P,), sum of the squared lengths of the samples of each row.
        patches: int64 (P,), patches of the images and videos of each row, and positions of its audio files in the
            audio encoder.
        patch_squares: int64 (P,), sum of the squared patches of each image, each temporal patch of a video and each
            audio file.

    Examples:
        >>> sizes = RowSizes.of_samples([[4096], [2048, 2048]], patches=[[], []])
        >>> sizes.tokens.tolist(), sizes.squares.tolist()
        ([4096, 4096], [16777216, 8388608])
    """

    tokens: Int64
    squares: Int64
    patches: Int64
    patch_squares: Int64

    @classmethod
    def of_samples(
        cls, lengths: Sequence[npt.ArrayLike], patches: Sequence[Sequence[float]], *, multiple: int = 1
    ) -> "RowSizes":
        """Compute the sizes of P rows from their samples and images.

        Args:
            lengths: P arrays, tokens of each sample of a row.
            patches: P lists, patches of each image, of each temporal patch of a video, and of each audio file, of a
                row.
            multiple: each sample is padded to a multiple of it (context parallelism).
        """
        padded = [-(-np.asarray(row, dtype=np.int64) // multiple) * multiple for row in lengths]
        images = [np.asarray(row, dtype=np.float64) for row in patches]
        return cls(
            tokens=np.array([row.sum() for row in padded], dtype=np.int64),
            squares=np.array([(row**2).sum() for row in padded], dtype=np.int64),
            patches=np.array([row.sum() for row in images], dtype=np.int64),
            patch_squares=np.array([(row**2).sum() for row in images], dtype=np.int64),
        )

    def __getitem__(self, rows: Int64 | slice) -> "RowSizes":
        return self.mapped(lambda values: values[rows])

    def mapped(self, change: Callable[[Int64], Int64]) -> "RowSizes":
        """The sizes with each array changed."""
        return RowSizes(**{each.name: change(getattr(self, each.name)) for each in fields(self)})

    @classmethod
    def joined(cls, parts: Iterable["RowSizes"], count: int) -> "RowSizes":
        """The rows of all parts, in their order; `count` is their number."""
        names, start = [each.name for each in fields(cls)], 0
        joined = cls(**{name: disk_array(None, count, np.int64) for name in names})
        for part in parts:
            stop = start + len(part.tokens)
            for name in names:
                getattr(joined, name)[start:stop] = getattr(part, name)
            start = stop
        return joined

    def columns(self) -> Float64:
        """The sizes as float64 (P, 4), in the order of the attributes."""
        return np.stack([self.tokens, self.squares, self.patches, self.patch_squares], axis=1).astype(np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Estimated compute cost of a row.

    The cost is `token * tokens + square * squares + patch * patches + patch_square * patch_squares`, of the sizes in
    `RowSizes`. `squares` sums the squared lengths of samples, because attention is blocked by sample. Only the ratios
    of the constants matter. Tensor, sequence and context parallelism divide all of them by the same number.

    The default constants are in units of a token through the dense layers of a model of 7 billion parameters.
    `from_config` computes the constants of a model, and `fit` measures them.

    Args:
        token: cost of a token in the dense layers.
        square: cost of attention per squared token. The default is 1 / (12 h) for h = 4096: dense layers need 24 h^2
            floating point operations per token and layer (h hidden units, 4h in the MLP), causal attention needs 2 h
            per square (D. Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", 2021,
            appendix).
        patch: cost of a patch of an image or a video, or of a position in the audio encoder. The default is a tower
            of 0.7 billion parameters next to a model of 7 billion, as in Qwen2.5-VL and Qwen2-Audio.
        patch_square: cost of attention in the vision tower per squared patch; 0 for attention in windows of fixed
            size, whose cost is the same for every patch.

    Raises:
        ConfigError: a constant below 0, or all 0.

    Examples:
        >>> sizes = RowSizes.of_samples([[4096], [2048, 2048]], patches=[[], []])
        >>> CostModel().costs(sizes).round().tolist()
        [4437.0, 4267.0]
    """

    token: float = 1.0
    square: float = 1 / (12 * HIDDEN_SIZE)
    patch: float = 0.1
    patch_square: float = 0.0

    def __post_init__(self) -> None:
        values = self.constants()
        for name, value in values.items():
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"`{name}` must be a number >= 0, got {value}.")
        if not any(values.values()):
            raise ConfigError("`token`, `square`, `patch` and `patch_square` must not all be 0. Set one of them.")

    def constants(self) -> dict[str, float]:
        """The constants by name."""
        return {name: float(value) for name, value in asdict(self).items()}

    def costs(self, sizes: RowSizes) -> Float64:
        """Cost of each row, float64 (P,)."""
        constants, costs = np.array(list(self.constants().values())), disk_array(None, len(sizes.tokens), np.float64)
        for block in blocks(len(costs)):
            costs[block] = sizes[block].columns() @ constants
        return costs

    @classmethod
    def from_config(
        cls, config: Any, vision: Any = None, *, vocab_size: int | None = None, trains_vision: bool = True
    ) -> "CostModel":
        """Compute the constants of a model: floating point operations of the forward and the backward pass.

            CostModel.from_config(AutoConfig.from_pretrained(DIR))
            CostModel.from_config(language_config, vision_config, vocab_size=152064)       # Megatron

        Args:
            config: configuration of a Transformers model, with `text_config`, and `vision_config` if it reads images
                or `audio_config` if it reads audio; or a TransformerConfig of Megatron.
            vision: configuration of the vision tower, instead of `config.vision_config`.
            vocab_size: rows of the output layer, which a configuration of Megatron does not contain; None counts no
                output layer there.
            trains_vision: False for a frozen vision tower or audio encoder, which has no backward pass.

        Raises:
            ConfigError: the configuration has no number of layers, heads or hidden units, or another kind of
                attention; the remedy is `fit`.
        """
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        token, square = text_flops(text, vocab_size)
        vision = getattr(config, "vision_config", None) if vision is None else vision
        audio = getattr(config, "audio_config", None)
        patch, patch_square = 0.0, 0.0
        if vision is not None:
            patch, patch_square = vision_flops(vision, text)
        elif audio is not None:
            patch = audio_flops(audio, text)
        # The backward pass computes the gradients of inputs and weights: twice the operations of the forward pass.
        passes = 3 if trains_vision else 1
        return cls(token=3 * token, square=3 * square, patch=passes * patch, patch_square=passes * patch_square)

    @classmethod
    def fit(cls, sizes: RowSizes, seconds: npt.ArrayLike) -> "CostModel":
        """Fit the constants to measured times: least squares of the relative error, with constants >= 0.

        Args:
            sizes: sizes of P measured rows of different lengths, P at least 3; `dataset.row_sizes()[indices]` has
                the sizes of packs.
            seconds: time of each row, forward and backward, shape (P,), above 0.

        Raises:
            ConfigError: too few times, a time that is not above 0, or sizes that are all 0.
        """
        times = np.asarray(seconds, dtype=np.float64)
        columns = sizes.columns()
        if times.shape != (len(columns),) or len(times) < 3 or not (times > 0).all():
            shown = np.array2string(times, threshold=6)
            raise ConfigError(
                f"`seconds` must be a time above 0 for each of 3 or more rows, got {shown} for {len(columns)} rows."
            )
        if not columns.any():
            raise ConfigError(f"`sizes` must have tokens or patches, got 0 for all {len(columns)} rows.")
        # Dividing by the times makes the errors relative. The best non-negative solution is the unconstrained solution
        # of some subset of the columns, and there are only 15 subsets, so no solver is needed. Scaled columns of
        # different magnitudes (squares are 10,000 times tokens) would lose digits.
        scaled, target = columns / times[:, None], np.ones(len(times))
        scale = np.maximum(scaled.max(axis=0), np.finfo(np.float64).tiny)
        best: tuple[float, Float64] | None = None
        for count in range(1, min(len(times), columns.shape[1]) + 1):
            for chosen in combinations(range(columns.shape[1]), count):
                used = scaled[:, chosen] / scale[list(chosen)]
                solution = np.linalg.lstsq(used, target, rcond=None)[0]
                error = float(((used @ solution - target) ** 2).sum())
                # More constants must be clearly better, so that noise of the arithmetic does not select them.
                if (solution >= 0).all() and (best is None or error < best[0] - 1e-12):
                    constants = np.zeros(columns.shape[1])
                    constants[list(chosen)] = solution / scale[list(chosen)]
                    best = error, constants
        assert best is not None, "the solution of a single column is above 0"
        token, square, patch, patch_square = best[1].tolist()
        return cls(token=token, square=square, patch=patch, patch_square=patch_square)


Balance = Literal["attention", "tokens"] | CostModel
"""Value of `balance`: a CostModel, `attention` for the default constants, `tokens` for the number of tokens."""


def cost_model(balance: Any) -> CostModel:
    """Return the cost model of a value of `balance`.

    Raises:
        ConfigError: the value is unknown; the message names it.
    """
    if isinstance(balance, CostModel):
        return balance
    if balance == "attention":
        return CostModel()
    if balance == "tokens":
        return CostModel(square=0, patch=0)
    raise ConfigError(f"`balance` must be 'attention', 'tokens', a CostModel or None, got {balance!r}.")
