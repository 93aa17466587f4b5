"""Collators combine encoded samples into one padding-free row. Subclasses implement `collate`.

DummyImages: which rows without images get a dummy image, so that the vision tower runs on every rank.

    rank 0   |-- text --|-- image --|             forward and backward through the vision tower
    rank 1   |-- text --|-- text --|(dummy)       the same collective operations, with zero gradient

DDP and FSDP reduce gradients, and FSDP gathers weights, in operations that every rank must take part in. A rank whose
row has no image skips the vision tower, and the others wait for it. The dummy is the row's tail segment: padding with
its own boundaries, without a target.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import reduce
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from energon_packed.encoding import IGNORE_INDEX, EncodedRow, EncodedSample
from energon_packed.encoding.vision.positions import VisionInputs
from energon_packed.errors import BatchError, ConfigError
from energon_packed.loading.batch import PackedBatch
from energon_packed.loading.features import PACK, from_features, is_features
from energon_packed.loading.ranks import group_place, has_group, launched_processes
from energon_packed.seqlens import cu_seqlens_from_lengths, position_ids_from_cu_seqlens, round_up

LossWeighting = Literal["token", "sample", "sqrt"]
_EXPONENT: dict[str, float] = {"token": 0.0, "sample": 1.0, "sqrt": 0.5}
_log = logging.getLogger(__name__)
DummyChoice = Literal["auto", "always", "never"]
DUMMY_CHOICES: tuple[DummyChoice, ...] = ("auto", "always", "never")


class DummyImages:
    """Decides for each row; the dummy is that of the row's samples, or one that is given.

    Args:
        choice: `auto` (several ranks train), `always`, `never`, or the dummy: `encoder.dummy`.

    Raises:
        ConfigError: an unknown choice, or a dummy without an image.
    """

    def __init__(self, choice: "DummyChoice | EncodedSample") -> None:
        given = choice if isinstance(choice, EncodedSample) else None
        if given is None and choice not in DUMMY_CHOICES:
            raise ConfigError(f"`dummy_images` is {choice!r}; use {', '.join(DUMMY_CHOICES)}, or `encoder.dummy`")
        if given is not None and given.num_images == 0:
            raise ConfigError("`dummy_images` is a sample without an image; pass `encoder.dummy` of a vision encoder")
        self._given = given
        self._choice = choice
        self._warned = False
        self._several = is_distributed()  # workers that are spawned do not know the process group

    def known(self, of_row: EncodedSample | None) -> EncodedSample | None:
        """The dummy that rows such as this one get if they have no image; None if they do not get a dummy.

        Args:
            of_row: the dummy of the row's samples.

        Raises:
            BatchError: `always`, and no sample is of a vision encoder.
        """
        if self._choice == "never":
            return None
        dummy = self._given or of_row
        if dummy is not None and self._choice == "auto" and not (self._several or is_distributed()):
            return None
        if dummy is None and self._choice == "always":
            raise BatchError(
                "`dummy_images` is 'always', but the samples do not come from an encoder with a vision family; "
                "pass `dummy_images=encoder.dummy`"
            )
        return dummy

    def fitting(self, dummy: EncodedSample | None, room: int | None) -> EncodedSample | None:
        """The dummy, where the row has room for it; with `auto`, a row without room has a warning in its place.

        Args:
            dummy: as `known` gives it.
            room: tokens that the row may still get; None where there is no limit, negative where it is too long.

        Raises:
            BatchError: no room, and the choice is not `auto`.
        """
        if dummy is None or room is None or room < 0 or len(dummy) <= room:
            return dummy
        why = (
            f"a row without images has room for {room} tokens up to `pad_to`, and the dummy image with which all "
            f"ranks run the vision tower takes {len(dummy)}: set `pad_to` to at least `seq_len` + {len(dummy)}, "
            "or pack with a smaller `seq_len`"
        )
        if self._choice != "auto":
            raise BatchError(f"{why}, or set `dummy_images` to 'never'")
        if not self._warned:
            self._warned = True
            _log.warning("%s; ranks may wait for each other (DDP, FSDP)", why)
        return None


def is_distributed() -> bool:
    """Whether several processes train."""
    return (group_place()[1] if has_group() else launched_processes()) > 1


class Collator(ABC):
    """Combines encoded samples into one row."""

    @abstractmethod
    def collate(self, samples: Sequence[EncodedSample]) -> PackedBatch:
        """Combine the samples into one batch, in the given order.

        Raises:
            BatchError: the samples cannot form a batch.
        """

    def __call__(self, features: Sequence[Any]) -> Any:
        """Entry point for torch's `collate_fn` and the `data_collator` of transformers.Trainer.

        Packs of a `PackedDataset`, rows of its `to_hf()`, features and a finished PackedBatch are returned as the dict
        of `transformers_inputs()`, samples as a PackedBatch.

        Raises:
            BatchError: as `collate`, or the dict cannot represent the collator's loss weights.
        """
        if features and isinstance(features[0], PackedBatch):
            return _only(features).transformers_inputs()
        if features and isinstance(features[0], dict) and PACK in features[0]:
            features = [feature[PACK] for feature in features]
        if features and isinstance(features[0], (list, EncodedRow)):
            samples = features[0] if len(features) == 1 else [sample for pack in features for sample in pack]
            return self.collate(samples).transformers_inputs()
        if features and is_features(features[0]):
            return self.collate([from_features(feature) for feature in features]).transformers_inputs()
        return self.collate(features)


class PaddingFreeCollator(Collator):
    """Concatenates samples without padding, unless a framework requires it.

    Args:
        pad_multiple: each sub-sample is padded to a multiple of this many tokens: `2 * cp` for context parallelism,
            `lcm(2 * cp, cp * tp)` with sequence parallelism too.
        pad_to: the row is padded to this many tokens with one tail segment; None adds no tail.
        pad_token_id: token id of padding; excluded from the loss and from the attention of real tokens.
        loss_weighting: how the loss is weighted across sub-samples. With n_i targets in sub-sample i and N in the row,
            each target of i has the weight N * f(n_i) / sum_j(n_j * f(n_j)), where f(n) is 1 for `token` (all targets
            count equally), 1/n for `sample` (all sub-samples count equally) and 1/sqrt(n) for `sqrt` (in between;
            "square averaging" in Z. Chen et al., InternVL 2.5, 2024). The weights are in `loss_mask` and sum to N, so
            the loss is sum(loss * loss_mask) / sum(loss_mask).
        pixel_dtype: torch.float32 or torch.bfloat16, dtype of `pixel_values`; bfloat16 takes half the memory, and is
            what a model in bfloat16 rounds them to. None leaves what the image processor gives, float32.
        dummy_images: which rows without images get a minimal dummy image, as padding in the tail segment, so that
            every rank runs the vision tower: `auto` (those of a vision encoder, when several processes train),
            `always`, `never`, or `encoder.dummy` itself for features. It changes no loss and no gradient.

    Raises:
        ConfigError: an argument is out of range.
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
        for name, value, least in (("pad_multiple", pad_multiple, 1), ("pad_to", pad_to, 1)):
            if value is not None and value < least:
                raise ConfigError(f"`{name}` is {value}; it must be at least {least}")
        if loss_weighting not in _EXPONENT:
            raise ConfigError(f"`loss_weighting` is {loss_weighting!r}; use one of {', '.join(_EXPONENT)}")
        if pixel_dtype not in (None, torch.float32, torch.bfloat16):
            raise ConfigError(f"`pixel_dtype` is {pixel_dtype!r}; use torch.float32 or torch.bfloat16")
        self.loss_weighting = loss_weighting
        self.pixel_dtype = pixel_dtype
        self.pad_multiple = pad_multiple
        self.pad_to = pad_to
        self.pad_token_id = pad_token_id
        self.dummy_images = DummyImages(dummy_images)

    def __call__(self, features: Sequence[Any]) -> Any:
        """As in Collator; packs and features require `loss_weighting` 'token', as Trainer ignores `loss_mask`.

        Features are `{"input_ids", "labels"}` as lists, arrays or tensors, as for Transformers'
        `DataCollatorWithFlattening`; without labels, all tokens but the first are targets.
        """
        if self.loss_weighting != "token" and features and isinstance(features[0], list | dict | PackedBatch):
            raise BatchError(
                f"`loss_weighting` is {self.loss_weighting!r}, but a model's own loss ignores loss_mask; use "
                "collate() and batch.loss(logits) in the training step, or set `loss_weighting` to 'token'"
            )
        return super().__call__(features)

    def collate(self, samples: Sequence[EncodedSample]) -> PackedBatch:
        """Combine the samples into one row, in the given order.

        Raises:
            BatchError: no sample, a row longer than `pad_to`, mixed kinds of positions, no target, or no dummy image
                where one is needed.
        """
        if not samples:
            raise BatchError("a batch needs at least one sample")
        row = EncodedRow.of(samples)
        lengths = np.diff(row.cu_seqlens).astype(np.int64)
        padded = lengths if self.pad_multiple == 1 else round_up(lengths, self.pad_multiple)
        possible = self.dummy_images.known(row.dummy)
        num_images = row.num_images
        room = None if self.pad_to is None else self.pad_to - int(padded.sum())
        dummy = None if any(num_images) else self.dummy_images.fitting(possible, room)
        tail = self._tail(int(padded.sum()), 0 if dummy is None else len(dummy))
        segments = np.append(padded, tail) if tail else padded
        bounds = cu_seqlens_from_lengths(segments)
        total, tokens = int(bounds[-1]), len(row.input_ids)

        between = padded is not lengths and bool((padded != lengths).any())
        # Places of the real tokens in the padded row.
        real: Any = slice(0, tokens)
        if between:
            real = np.arange(tokens) + np.repeat(bounds[: len(lengths)] - row.cu_seqlens[:-1], lengths)
        if total == tokens:
            pads = self.pad_multiple > 1 or self.pad_to is not None or possible is not None
            padding = np.zeros(total, dtype=bool) if pads else None
            input_ids, labels = row.input_ids.copy(), row.labels.copy()
        else:
            padding = np.ones(total, dtype=bool)
            input_ids = np.full(total, self.pad_token_id, dtype=np.int64)
            labels = np.full(total, IGNORE_INDEX, dtype=np.int64)
            input_ids[real], labels[real], padding[real] = row.input_ids, row.labels, False
            if dummy is not None:
                input_ids[total - tail : total - tail + len(dummy)] = dummy.input_ids
        labels[bounds[: len(lengths)]] = IGNORE_INDEX  # no token of the same sample predicts the first one
        is_target = labels != IGNORE_INDEX
        if not is_target.any():
            raise _without_target(row)
        unpadded = np.append(lengths, tail) if tail else lengths
        pictured = row.pictured if dummy is None else [dummy]
        return PackedBatch(
            __key__=[str(name) for name in row.ids],
            __restore_key__=(),
            input_ids=_row(input_ids),
            labels=_row(labels),
            loss_mask=_row(self._weights(is_target, bounds)),
            position_ids=self._positions(row, bounds, real),
            cu_seqlens=torch.from_numpy(cu_seqlens_from_lengths(unpadded) if between else bounds),
            cu_seqlens_padded=torch.from_numpy(bounds) if between else None,
            max_seqlen=int(segments.max()),
            padding_mask=None if padding is None else _row(padding),
            **(_images(pictured, self.pixel_dtype) if pictured else {}),
            **(_vision_inputs(pictured, self.pixel_dtype) if pictured else {}),
            ids=list(row.ids),
            sources=row.sources,
            num_images=num_images,
            token_type_ids=_token_types(row, real, dummy, bounds),
        )

    def _weights(self, is_target: npt.NDArray[np.bool_], bounds: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        """Weight of each target, float32 (T,), 0 elsewhere; the weights sum to the number of targets."""
        exponent = _EXPONENT[self.loss_weighting]
        if exponent == 0:
            return np.asarray(is_target, dtype=np.float32)
        targets = np.add.reduceat(is_target, bounds[:-1], dtype=np.float64)
        weight = np.where(targets > 0, np.maximum(targets, 1.0) ** -exponent, 0.0)
        weight *= targets.sum() / (targets * weight).sum()
        return np.asarray(np.repeat(weight, np.diff(bounds)) * is_target, dtype=np.float32)

    def _tail(self, total: int, dummy: int) -> int:
        """Tokens of the tail segment, which holds the dummy image's."""
        if self.pad_to is None and not dummy:
            return 0
        if self.pad_to is None:
            return int(round_up(np.array([dummy], dtype=np.int64), self.pad_multiple)[0])
        if total > self.pad_to:
            raise BatchError(
                f"the row has {total} tokens, more than `pad_to` {self.pad_to}; reduce `micro_batch_size` "
                "(`micro_batch_size` * `seq_len` must fit), or pack with `pad_multiple`"
            )
        return self.pad_to - total

    @staticmethod
    def _positions(row: EncodedRow, bounds: npt.NDArray[np.int32], real: Any) -> torch.Tensor:
        """int64 (1, T), or (4, 1, T) if the samples have M-RoPE positions; padding continues the count."""
        text = position_ids_from_cu_seqlens(bounds)
        if row.position_ids is None:
            return _row(text)
        rows = np.stack([text] * 4)
        rows[1:, real] = row.position_ids
        return torch.from_numpy(rows).unsqueeze(1)


def _without_target(row: EncodedRow) -> BatchError:
    named = ", ".join(map(str, row.ids))
    return BatchError(f"no token of {named} is a target; pack with another `loss_on` or remove these samples")


def _images(samples: Sequence[EncodedSample], dtype: torch.dtype | None) -> dict[str, torch.Tensor | None]:
    """What the vision tower reads of all images of a row."""
    pictured = [sample for sample in samples if sample.image_grid_thw is not None]
    if len({sample.patch_positions is None for sample in pictured}) > 1:
        raise BatchError("some samples with images have patch positions and some do not; use one encoder for all")
    positions = [torch.from_numpy(s.patch_positions) for s in pictured if s.patch_positions is not None]
    return {
        "pixel_values": _pixel_row(samples, dtype),
        "image_grid_thw": _joined([s.image_grid_thw for s in pictured if s.image_grid_thw is not None]),
        "patch_positions": _joined(positions),
    }


def _vision_inputs(samples: Sequence[EncodedSample], dtype: torch.dtype | None) -> dict[str, Any]:
    """Arguments of vision towers without patches and grids, and where each sample's are."""
    parts = [sample.vision_inputs for sample in samples if sample.vision_inputs is not None]
    if not parts:
        return {}
    if any(sample.image_grid_thw is not None for sample in samples) or len({tuple(p.dims.items()) for p in parts}) > 1:
        raise BatchError("images of different vision families cannot share a row; use one encoder for all samples")
    values, places = VisionInputs.joined(parts)
    if dtype is not None:
        values = {name: one.to(dtype) if one.is_floating_point() else one for name, one in values.items()}
    each = iter(places)
    return {
        "vision_inputs": values,
        "vision_dims": parts[0].dims,
        "vision_places": [None if sample.vision_inputs is None else next(each) for sample in samples],
    }


def _token_types(
    row: EncodedRow, real: Any, dummy: EncodedSample | None, bounds: npt.NDArray[np.int32]
) -> torch.Tensor | None:
    """int64 (1, T), 1 at image tokens, also of the dummy in the tail; None for models that do not take it."""
    of_dummy = None if dummy is None else dummy.token_type_ids
    if row.token_type_ids is None and of_dummy is None:
        return None
    types = np.zeros(int(bounds[-1]), dtype=np.int64)
    if row.token_type_ids is not None:
        types[real] = row.token_type_ids
    if of_dummy is not None:
        types[bounds[-2] : bounds[-2] + len(of_dummy)] = of_dummy
    return _row(types)


def _pixel_row(samples: Sequence[EncodedSample], dtype: torch.dtype | None) -> torch.Tensor | None:
    """Pixels of all samples, (patches, patch_dim)."""
    parts = [sample.pixel_values for sample in samples if sample.pixel_values is not None]
    if not parts:
        return None
    shapes = {tuple(part.shape[1:]) for part in parts}
    if len(shapes) > 1:
        raise BatchError(f"patches have different shapes, {sorted(shapes)}; use one encoder for all samples")
    if any(part.device.type != "cpu" for part in parts):
        return torch.cat([part.to(dtype=dtype) for part in parts])
    dtype = dtype or reduce(torch.promote_types, (part.dtype for part in parts))
    out = _empty((sum(part.shape[0] for part in parts), *shapes.pop()), dtype)
    start = 0
    for part in parts:
        out[start : start + len(part)].copy_(part)
        start += len(part)
    return out


def _empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor in memory of NumPy, which requests huge pages: filling it is up to four times as fast."""
    if dtype == torch.bfloat16:
        return torch.from_numpy(np.empty(shape, dtype=np.int16)).view(torch.bfloat16)
    if dtype == torch.float32:
        return torch.from_numpy(np.empty(shape, dtype=np.float32))
    return torch.empty(shape, dtype=dtype)


def _only(batches: Sequence[PackedBatch]) -> PackedBatch:
    """The one finished row among the features of a batch.

    Raises:
        BatchError: there are several.
    """
    if len(batches) > 1:
        raise BatchError(
            f"the data are finished rows, and {len(batches)} of them cannot share a batch: set the batch size of the "
            "trainer (`per_device_train_batch_size`) to 1, and `micro_batch_size` of the loader"
        )
    return batches[0]


def _row(array: Any) -> torch.Tensor:
    return torch.from_numpy(array).unsqueeze(0)


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    return torch.cat(list(parts)) if parts else None
