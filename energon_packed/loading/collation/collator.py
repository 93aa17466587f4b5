"""Collators: a list of EncodedSamples (or an EncodedRow) in, one PackedBatch out, padding-free unless requested.

Subclasses of `Collator` implement `collate`; `PaddingFreeCollator` is the default. `row_media.py` joins the media of
samples, and `dummy_images.py` chooses the dummy image of a row without media.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from energon_packed.encoding import IGNORE_INDEX, EncodedRow, EncodedSample
from energon_packed.errors import BatchError, ConfigError
from energon_packed.loading.collation.batch import PackedBatch, trainer_inputs
from energon_packed.loading.collation.dummy_images import DummyChoice, DummyImages
from energon_packed.loading.collation.features import row_of
from energon_packed.loading.collation.row_media import media_tensors
from energon_packed.loading.resharding import DISPATCHED, dispatch_refusal, is_dispatched
from energon_packed.options import as_integer, check_choice, optional_integer
from energon_packed.records.columns import FILL
from energon_packed.seqlens import cu_seqlens_from_lengths, position_ids_from_cu_seqlens, round_up

LossWeighting = Literal["token", "sample", "sqrt"]
_EXPONENT: dict[str, float] = {"token": 0.0, "sample": 1.0, "sqrt": 0.5}


class Collator(ABC):
    """Base class of collators: `collate(samples)` joins EncodedSamples into one PackedBatch.

        class Reversed(PaddingFreeCollator):
            def collate(self, samples):
                return super().collate(samples[::-1])

    A collator is also a `collate_fn` of torch and a `data_collator` of transformers.Trainer.

    Examples:
        >>> class Reversed(PaddingFreeCollator):
        ...     def collate(self, samples):
        ...         return super().collate(samples[::-1])
        >>> a, b = (EncodedSample(input_ids=np.full(n, n), labels=np.full(n, n)) for n in (1, 2))
        >>> Reversed().collate([a, b]).input_ids.tolist()
        [[2, 2, 1]]
    """

    _with_weights = False
    _extras: Mapping[str, Callable[[PackedBatch], Any]] = {}

    @abstractmethod
    def collate(self, samples: Sequence[EncodedSample]) -> PackedBatch:
        """Combine the samples into one batch, in this order.

        Args:
            samples: the samples of one row, a list or an EncodedRow.

        Raises:
            BatchError: the samples cannot form a batch.
        """

    def __call__(self, features: Sequence[Any]) -> Any:
        """Collate what a torch DataLoader or transformers.Trainer passes.

        Packs of a `PackedDataset`, rows of its `to_hf()`, features and a finished PackedBatch are returned as the dict
        of `transformers_inputs()`, samples as a PackedBatch.

        Raises:
            BatchError: as `collate`, or `loss_mask` has weights other than 1, which the dict cannot represent.
            ConfigError: accelerate reads with `dispatch_batches=True`, which would split rows between ranks.
        """
        if refused := dispatch_refusal():
            return refused
        if features and isinstance(features[0], PackedBatch):
            if len(features) > 1:
                raise BatchError(
                    f"A batch of finished rows must have 1 row, got {len(features)}. Set the trainer's batch size "
                    "(`per_device_train_batch_size`; packed_training_arguments sets it) to 1, and `micro_batch_size` "
                    "of the loader to the packs per step."
                )
            return self._inputs(features[0])
        rows = [row for feature in features if (row := row_of(feature)) is not None]
        if rows and len(rows) == len(features):
            return self._inputs(self.collate(EncodedRow.joined(rows)))
        return self.collate(features)

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes, for a worker process that is spawned, and does not see a dispatcher in its callers.

        Raises:
            ConfigError: as `__call__`, on every process.
        """
        if is_dispatched():
            raise ConfigError(DISPATCHED)
        return vars(self)

    def _inputs(self, batch: PackedBatch) -> dict[str, Any]:
        inputs = trainer_inputs(batch, with_weights=self._with_weights)
        return inputs | {name: make(batch) for name, make in self._extras.items()}


class DefaultBatchCollator(Collator):
    """Stacks samples of any type, such as dicts of tensors of equal shape, by torch's `default_collate`.

    Examples:
        >>> DefaultBatchCollator().collate([{"x": 1}, {"x": 2}])["x"].tolist()
        [1, 2]
    """

    def collate(self, samples: Sequence[Any]) -> Any:
        """Stack the samples."""
        return torch.utils.data.default_collate(list(samples))

    def __call__(self, features: Sequence[Any]) -> Any:
        """Stack the samples, as a `collate_fn` of torch."""
        return self.collate(features)


def with_weights(collator: Collator) -> Collator:
    """Return a copy for a trainer that applies loss weights: its dicts have `loss_mask` if weights are not 1."""
    collator = copy(collator)
    collator._with_weights = True
    return collator


def with_extra(collator: Collator, name: str, make: Callable[[PackedBatch], Any]) -> Collator:
    """Return a copy whose dicts have an entry `name` with the value of `make(batch)`."""
    collator = copy(collator)
    collator._extras = {**collator._extras, name: make}
    return collator


class PaddingFreeCollator(Collator):
    """Concatenates samples without padding, unless a framework requires it.

    Args:
        pad_multiple: each sample is padded to a multiple of this many tokens: `2 * cp` for context parallelism,
            `lcm(2 * cp, cp * tp)` with sequence parallelism too.
        pad_to: the row is padded to this many tokens with one tail segment; None adds no tail.
        pad_token_id: token id of padding; excluded from the loss and from the attention of real tokens.
        loss_weighting: how the loss is weighted across samples. With n_i targets in sample i and N in the row,
            each target of i has the weight N * f(n_i) / sum_j(n_j * f(n_j)), where f(n) is 1 for `token` (all targets
            count equally), 1/n for `sample` (all samples count equally) and 1/sqrt(n) for `sqrt` (in between;
            "square averaging" in Z. Chen et al., InternVL 2.5, 2024). These weights sum to N. `loss_mask` has their
            product with the loss weights of the records (`EncodedSample.loss_weights`), so the loss is
            sum(loss * loss_mask) / sum(loss_mask). In a step of several rows, `step_targets` and PackedTrainer weight
            each target with f(n_i), divided by the sum of these weights over the step; Megatron sums `loss_mask`, so
            that a sample counts equally only among the samples of its row.
        pixel_dtype: torch.float32 or torch.bfloat16, dtype of pixels and of features of audio; bfloat16 needs
            half the memory, and a model in bfloat16 rounds to it anyway. None keeps the dtype of the image processor,
            float32.
        dummy_images: which rows without media get a minimal dummy image (of an audio model, a dummy audio file), as
            padding in the tail segment, so that every rank runs the encoder of media: `auto` (when several processes
            train),
            `always`, `never`, or `encoder.dummy` itself for features. It changes no loss and no gradient.

    Raises:
        ConfigError: an argument is out of range.

    Examples:
        >>> a, b = (EncodedSample(input_ids=np.full(n, n), labels=np.full(n, n)) for n in (3, 2))
        >>> batch = PaddingFreeCollator(pad_multiple=2).collate([a, b])
        >>> batch.input_ids.tolist(), batch.cu_seqlens.tolist(), batch.cu_seqlens_padded.tolist()
        ([[3, 3, 3, 0, 2, 2]], [0, 3, 5], [0, 4, 6])
    """

    def __init__(
        self,
        *,
        pad_multiple: int = 1,
        pad_to: int | None = None,
        pad_token_id: int = 0,
        loss_weighting: LossWeighting = "token",
        pixel_dtype: torch.dtype | None = None,
        dummy_images: DummyChoice | EncodedSample = "auto",
    ) -> None:
        check_choice("loss_weighting", loss_weighting, LossWeighting)
        if pixel_dtype not in (None, torch.float32, torch.bfloat16):
            raise ConfigError(f"`pixel_dtype` must be torch.float32 or torch.bfloat16, got {pixel_dtype!r}.")
        self.loss_weighting = loss_weighting
        self.pixel_dtype = pixel_dtype
        self.pad_multiple = as_integer(pad_multiple, "pad_multiple")
        self.pad_to = optional_integer(pad_to, "pad_to")
        self.pad_token_id = pad_token_id
        self.dummy_images = DummyImages(dummy_images)

    def collate(self, samples: Sequence[EncodedSample]) -> PackedBatch:
        """Combine the samples into one row, in this order.

        Raises:
            BatchError: no sample, a row longer than `pad_to`, mixed kinds of positions, no target, or no room for a
                dummy image that is required.
        """
        if not samples:
            raise BatchError("A batch must have at least 1 sample, got 0.")
        others = [] if isinstance(samples, EncodedRow) else [s for s in samples if not isinstance(s, EncodedSample)]
        if others:
            raise BatchError(
                f"PaddingFreeCollator needs EncodedSamples, got {type(others[0]).__name__}. Return EncodedSamples "
                "from the processor, or pass a `collator`, such as DefaultBatchCollator()."
            )
        # From here on, the row is columns: nothing below asks single samples, except for their images.
        row = EncodedRow.of(samples)
        lengths = np.diff(row.cu_seqlens).astype(np.int64)
        padded = lengths if self.pad_multiple == 1 else round_up(lengths, self.pad_multiple)
        room = None if self.pad_to is None else self.pad_to - int(padded.sum())
        num_images, num_videos, num_audios = row.num_images, row.num_videos, row.num_audios
        possible = self.dummy_images.candidate(row.dummy)
        has_vision = any(num_images) or any(num_videos)
        dummies = self.dummy_images.fit(possible, room, has_vision=has_vision, has_audio=any(num_audios))
        tail = self._tail(int(padded.sum()), sum([len(dummy) for dummy in dummies]))
        segments = np.append(padded, tail) if tail else padded
        # A stored row without padding has its boundaries already.
        is_stored = segments is lengths and row.cu_seqlens.dtype == np.int32 and bool(lengths.all())
        bounds = np.array(row.cu_seqlens, np.int32) if is_stored else cu_seqlens_from_lengths(segments)
        total, tokens = int(bounds[-1]), len(row.input_ids)

        is_padded_between = padded is not lengths and bool((padded != lengths).any())
        # Indices of the real tokens in the padded row: each sample is shifted by the padding before it.
        real: Any = slice(tokens)
        if is_padded_between:
            real = np.arange(tokens) + np.repeat(bounds[: len(lengths)] - row.cu_seqlens[:-1], lengths)
        if total == tokens:
            # A collator that may pad sets the mask for every row: Megatron's ranks must agree on whether it exists.
            may_pad = self.pad_multiple > 1 or self.pad_to is not None or possible is not None
            padding = np.zeros(total, dtype=bool) if may_pad else None
            # Copies, because labels are changed below and the columns may be views of a stored row.
            input_ids, labels = row.input_ids.copy(), row.labels.copy()
        else:
            padding = np.ones(total, dtype=bool)
            input_ids = np.full(total, self.pad_token_id, dtype=np.int64)
            labels = np.full(total, IGNORE_INDEX, dtype=np.int64)
            input_ids[real], labels[real], padding[real] = row.input_ids, row.labels, False
            start = total - tail
            for dummy in dummies:
                input_ids[start : start + len(dummy)] = dummy.input_ids
                start += len(dummy)
        labels[bounds[: len(lengths)]] = IGNORE_INDEX  # no token of the same sample predicts the first token
        is_target = labels != IGNORE_INDEX
        if not is_target.any() and row.roles is None and row.sample_labels is None:
            names = ", ".join(map(str, row.ids))
            raise BatchError(f"No token of {names} is a target. Pack with another `loss_on`, or remove these samples.")
        loss_mask, loss_mask_scale = self._weights(is_target, bounds)
        weights = None
        if row.loss_weights is not None:
            weights = np.zeros(total, dtype=np.float32)
            weights[real] = row.loss_weights
            loss_mask *= weights
        columns = {}
        for name, column in (row.columns or {}).items():
            padded_column = np.full((total, *column.shape[1:]), FILL, dtype=column.dtype)
            padded_column[real] = column
            columns[name] = _row(padded_column)
        # Kernels read `cu_seqlens` without the padding between samples, and the tail is a segment in both.
        unpadded = np.append(lengths, tail) if tail else lengths
        with_images = [*row.pictured, *dummies]
        return PackedBatch(
            __key__=[str(name) for name in row.ids],
            __restore_key__=(),
            input_ids=_row(input_ids),
            labels=_row(labels),
            loss_mask=_row(loss_mask),
            loss_weights=None if weights is None else _row(weights),
            columns=columns,
            loss_mask_scale=loss_mask_scale,
            position_ids=self._positions(row, bounds, real),
            cu_seqlens=torch.from_numpy(cu_seqlens_from_lengths(unpadded) if is_padded_between else bounds),
            cu_seqlens_padded=torch.from_numpy(bounds) if is_padded_between else None,
            max_seqlen=int(segments.max()),
            padding_mask=None if padding is None else _row(padding),
            **(media_tensors(with_images, self.pixel_dtype) if with_images else {}),
            ids=list(row.ids),
            sources=list(row.sources),
            num_images=num_images,
            num_videos=num_videos,
            num_audios=num_audios if any(num_audios) else [],
            image_token_id=row.image_token_id,
            video_token_id=row.video_token_id,
            audio_token_id=row.audio_token_id,
            token_type_ids=_token_types(row, real, dummies, bounds),
            needs=row.needs or next((dummy.needs for dummy in dummies if dummy.needs), None),
            groups=None if row.groups is None else _groups(row.groups),
            roles=[] if row.roles is None else list(row.roles),
            sample_labels=None if row.sample_labels is None else _sample_labels(row.sample_labels),
        )

    def _inputs(self, batch: PackedBatch) -> dict[str, Any]:
        if self.loss_weighting != "token" and not self._with_weights:
            raise BatchError(
                f"`loss_weighting` must be 'token' for packs and features, got {self.loss_weighting!r}: a model's own "
                "loss ignores loss_mask. Use collate() and batch.loss(logits) in the training step, or set "
                "`loss_weighting` to 'token'."
            )
        return super()._inputs(batch)

    def _weights(
        self, is_target: npt.NDArray[np.bool_], bounds: npt.NDArray[np.int32]
    ) -> tuple[npt.NDArray[np.float32], float]:
        """Weight of each target, float32 (T,), 0 elsewhere, and their factor; the weights sum to the targets."""
        exponent = _EXPONENT[self.loss_weighting]
        if exponent == 0:
            return np.asarray(is_target, dtype=np.float32), 1.0
        # With n targets in a segment, f(n) = n ** -exponent; the factor makes the weights sum to all targets, N.
        targets = np.add.reduceat(is_target, bounds[:-1], dtype=np.float64)
        weight = np.maximum(targets, 1.0) ** -exponent
        factor = targets.sum() / (targets * weight).sum()
        weight *= factor
        return np.asarray(np.repeat(weight, np.diff(bounds)) * is_target, dtype=np.float32), float(factor)

    def _tail(self, total: int, dummy: int) -> int:
        """Tokens of the tail segment, the tokens of the dummy image included."""
        if self.pad_to is None:
            return int(round_up(np.array([dummy], dtype=np.int64), self.pad_multiple)[0]) if dummy else 0
        if total > self.pad_to:
            raise BatchError(
                f"The row has {total} tokens but `pad_to` is {self.pad_to}. Set `pad_to` to at least {total}, or put "
                "fewer packs in a batch (`micro_batch_size`)."
            )
        return self.pad_to - total

    @staticmethod
    def _positions(row: EncodedRow, bounds: npt.NDArray[np.int32], real: Any) -> torch.Tensor:
        """int64 (1, T), or (1 + axes, 1, T) for M-RoPE positions; padding continues the count."""
        text = position_ids_from_cu_seqlens(bounds)
        if row.position_ids is None:
            return _row(text)
        # Row 0 counts tokens for the attention mask; the others are the axes of the model, usually t, h and w.
        rows = np.stack([text] * (1 + len(row.position_ids)))
        rows[1:, real] = row.position_ids
        return torch.from_numpy(rows).unsqueeze(1)


def _groups(keys: Sequence[str | None]) -> torch.Tensor:
    """int32 (S,), index of the group of each sample, in order of their first samples."""
    index: dict[Any, int] = {}
    own = [place if key is None else key for place, key in enumerate(keys)]
    return torch.tensor([index.setdefault(key, len(index)) for key in own], dtype=torch.int32)


def _sample_labels(labels: Sequence[tuple[float, ...] | None]) -> torch.Tensor:
    """float32 (S,), or (S, C) with C classes, NaN for samples without a label.

    Raises:
        BatchError: labels have different numbers of classes.
    """
    classes = sorted({len(label) for label in labels if label is not None})
    if len(classes) > 1:
        raise BatchError(
            f"All labels of a row must have the same number of values, got {' and '.join(map(str, classes))}. Write "
            "lists of the same length, one value for each class."
        )
    rows = [[float("nan")] * classes[0] if label is None else label for label in labels]
    values = torch.tensor(rows, dtype=torch.float32)
    return values[:, 0].contiguous() if classes[0] == 1 else values


def _token_types(
    row: EncodedRow, real: Any, dummies: Sequence[EncodedSample], bounds: npt.NDArray[np.int32]
) -> torch.Tensor | None:
    """int64 (1, T), the types of the samples, and of dummies in the tail; None for models that do not use it."""
    if row.token_type_ids is None and all(dummy.token_type_ids is None for dummy in dummies):
        return None
    types = np.zeros(int(bounds[-1]), dtype=np.int64)
    if row.token_type_ids is not None:
        types[real] = row.token_type_ids
    start = int(bounds[-2])  # of the tail, which is the last segment
    for dummy in dummies:
        if dummy.token_type_ids is not None:
            types[start : start + len(dummy)] = dummy.token_type_ids
        start += len(dummy)
    return _row(types)


def _row(array: Any) -> torch.Tensor:
    return torch.from_numpy(array[None])  # a third of the time of `unsqueeze`
