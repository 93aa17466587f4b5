"""Batches: the tensors of one packed row in, the arguments of a training framework out.

| from a PackedBatch | to |
|---|---|
| `transformers_inputs()` | a Hugging Face model |
| `megatron_inputs()`, `packed_seq_params()` | Megatron-LM and Megatron-Bridge |
| `loss()`, `loss_by_source()` | a training loop that computes the loss itself |
| `sample_logps()`, `sample_sums()`, `last_tokens()` | losses over samples, see losses.py |
| `split()` | the encoded samples, the inverse of collating |

`step_targets` returns the divisor of the loss for all micro batches and ranks of an optimizer step.

`PaddingFreeCollator` makes them; `to` and `pin_memory` move them.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import field, fields
from itertools import accumulate, pairwise
from typing import Any, Literal

import torch
from megatron.energon import Batch, edataclass

from energon_packed.encoding import IGNORE_INDEX, EncodedSample, SampleSource
from energon_packed.encoding.vision.positions import ModelNeeds, VisionInputs
from energon_packed.errors import BatchError
from energon_packed.loading.collation.cross_entropy import cross_entropy, in_float32, pieces
from energon_packed.loading.dataflow.transport import send_by_value
from energon_packed.loading.notebook import shown_row
from energon_packed.loading.ranks import all_reduce_mean
from energon_packed.records.columns import FILL

Signal = Literal["loss", "entropy", "gradient_norm"]
_PIXELS = ("pixel_values", "pixel_values_videos", "input_features")
_IMAGE_ARGUMENTS = ("pixel_values", "image_grid_thw", "patch_positions")
_VIDEO_ARGUMENTS = ("pixel_values_videos", "video_grid_thw", "second_per_grid_ts")


@send_by_value
@edataclass
class PackedBatch(Batch):
    """One row of T tokens with S samples; several packs of a micro batch are concatenated into one row.

        sample       |-- 0 --|- 1 -|---- 2 ----|(tail)
        cu_seqlens   0       3     5           9      T
        position_ids 0 1 2   0 1   0 1 2 3     0 ..

    Attributes:
        input_ids: int64 (1, T).
        labels: int64 (1, T), unshifted, -100 for unsupervised tokens; the first token of a sample is never a target,
            because no token of the same sample predicts it.
        loss_mask: float32 (1, T), weight of each target, 0 elsewhere: the product of the loss weight in its record and
            of the weight by the collator's `loss_weighting`, both 1 by default.
        loss_mask_scale: factor by which `loss_weighting` multiplied the weights of this row, so that they sum to its
            targets. Divided by it, the weights of different rows are comparable.
        position_ids: int64 (1, T), restarting at 0 in each sample; (1 + axes, 1, T) for M-RoPE models:
            the text row, then the axes, usually t, h and w.
        cu_seqlens: int32 (S+1,), without padding between samples; a padding tail counts as one more segment.
        max_seqlen: tokens of the longest segment, padding included.
        cu_seqlens_padded: int32, same shape as `cu_seqlens`, segment boundaries in the padded row; None without
            padding between samples.
        padding_mask: bool (1, T), True at padding; None with a collator that does not pad. A collator that pads sets
            it for every row, because Megatron's ranks must agree on whether it exists.
        pixel_values: (patches, patch_dim) of all images in order, float32 or the collator's `pixel_dtype`; or None.
        image_grid_thw: int64 (images, 3), or None.
        pixel_values_videos: (patches, patch_dim) of all video files in order, of the dtype of `pixel_values`; or None.
        video_grid_thw: int64 (videos, 3), or None.
        second_per_grid_ts: float32 (videos,), seconds of each step of the grid in time, for models with this argument;
            or None.
        patch_positions: int64 (patches, 3), or None.
        ids: names of the S samples.
        sources: dataset and subflavors of each sample, None if unknown.
        num_images: images of each sample.
        num_videos: video files of each sample; those whose frames are images for the model count as images.
        num_audios: audio files of each sample; [] without audio.
        image_token_id, video_token_id, audio_token_id: tokens that represent features of media, or None.
        vision_inputs: arguments of vision towers with inputs other than `pixel_values` (patches, patch_dim) and
            `image_grid_thw`, by name; or None.
        vision_dims: the dimension along which the tensors of the samples are joined, by name of the argument.
        vision_places: slices of each sample in `vision_inputs`, by name of the argument; none without images.
        audio_inputs: arguments of the audio encoder by name, such as `input_features` and `feature_attention_mask`; or
            None.
        audio_dims, audio_places: as `vision_dims` and `vision_places`, of `audio_inputs`.
        token_type_ids: int64 (1, T), 1 at image tokens, for models with an argument for them; or None.
        needs: what the model needs of a row with images, or None.
        loss_weights: float32 (1, T), loss weight of each token in its record, a factor of `loss_mask`; None if all
            weights are 1.
        columns: further columns of the tokens by name, each (1, T) or (1, T, k), of the dtype in the record.
        groups: int32 (S,), index of the group of each sample in this row, in order of their first samples; a sample
            without a group is a group of its own. None if no sample has a group.
        roles: role of each sample in its group, such as `chosen`, or None; [] if no sample has one.
        sample_labels: float32 (S,), or (S, C) with C classes, label of each sample, NaN without one; None if no sample
            has a label.
        has_targets: False for a row of `without_targets`. Known without reading `loss_mask`, which may be on a device.

    Examples:
        >>> a, b = (EncodedSample(input_ids=np.full(n, n), labels=np.full(n, n)) for n in (3, 2))
        >>> batch = PaddingFreeCollator().collate([a, b])
        >>> batch.position_ids.tolist(), batch.cu_seqlens.tolist(), batch.max_seqlen
        ([[0, 1, 2, 0, 1]], [0, 3, 5], 3)
        >>> batch.transformers_inputs()["labels"].tolist()
        [[-100, 3, 3, -100, 2]]
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    max_seqlen: int
    ids: list[str | None]
    cu_seqlens_padded: torch.Tensor | None = None
    padding_mask: torch.Tensor | None = None
    pixel_values: torch.Tensor | None = None
    image_grid_thw: torch.Tensor | None = None
    patch_positions: torch.Tensor | None = None
    sources: list[SampleSource | None] = field(default_factory=list)
    num_images: list[int] = field(default_factory=list)
    vision_inputs: dict[str, torch.Tensor] | None = None
    vision_dims: dict[str, int] = field(default_factory=dict)
    vision_places: list[dict[str, tuple[slice, ...]]] = field(default_factory=list)
    token_type_ids: torch.Tensor | None = None
    needs: ModelNeeds | None = None
    loss_weights: torch.Tensor | None = None
    loss_mask_scale: float = 1.0
    has_targets: bool = True
    pixel_values_videos: torch.Tensor | None = None
    video_grid_thw: torch.Tensor | None = None
    second_per_grid_ts: torch.Tensor | None = None
    num_videos: list[int] = field(default_factory=list)
    image_token_id: int | None = None
    video_token_id: int | None = None
    audio_inputs: dict[str, torch.Tensor] | None = None
    audio_dims: dict[str, int] = field(default_factory=dict)
    audio_places: list[dict[str, tuple[slice, ...]]] = field(default_factory=list)
    num_audios: list[int] = field(default_factory=list)
    audio_token_id: int | None = None
    columns: dict[str, torch.Tensor] = field(default_factory=dict)
    groups: torch.Tensor | None = None
    roles: list[str | None] = field(default_factory=list)
    sample_labels: torch.Tensor | None = None

    @property
    def input_features(self) -> torch.Tensor | None:
        """The features of `audio_inputs`, (audio files, mel bins, frames) for most models; None without audio."""
        return (self.audio_inputs or {}).get("input_features")

    @property
    def num_samples(self) -> int:
        """Number of samples S; a padding tail does not count."""
        return len(self.ids)

    @property
    def num_tokens(self) -> int:
        """Number of real tokens, without padding."""
        # From the mask, as a padding tail is a segment of `cu_seqlens`, too.
        padding = 0 if self.padding_mask is None else int(self.padding_mask.sum())
        return self.input_ids.shape[1] - padding

    def to(
        self,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        non_blocking: bool = False,
    ) -> "PackedBatch":
        """Return a copy of this batch with all tensors on a device.

        Args:
            device: target device; None keeps the present device.
            dtype: floating-point type of pixels and of features of audio; ids, labels, boundaries, columns and
                positions keep their types, and `loss_mask` stays float32, since it is summed.
            non_blocking: copy from pinned memory without waiting.

        Raises:
            BatchError: `dtype` is not a floating-point type.
        """
        if dtype is not None and not dtype.is_floating_point:
            raise BatchError(f"`dtype` must be a floating-point type, got {dtype}. It converts only pixels.")

        def moved(name: str, tensor: torch.Tensor) -> torch.Tensor:
            is_pixels = name in _PIXELS and tensor.is_floating_point()
            return tensor.to(device, dtype if is_pixels else None, non_blocking=non_blocking)

        return self._with_tensors(moved)

    def without_targets(self) -> "PackedBatch":
        """Return the same row without targets and sample names, for a rank that has no row in a step."""
        # The tokens stay, so that the rank runs the same forward and backward pass as the others; its loss is 0.
        batch = copy(self)
        batch.labels, batch.loss_mask = torch.full_like(self.labels, IGNORE_INDEX), torch.zeros_like(self.loss_mask)
        batch.columns = {name: torch.full_like(column, FILL) for name, column in self.columns.items()}
        batch.has_targets = False
        batch.ids = [None] * len(self.ids)
        return batch

    def pin_memory(self) -> "PackedBatch":
        """Return a copy with all tensors in pinned memory; DataLoaders with `pin_memory=True` call it."""
        return self._with_tensors(lambda name, tensor: tensor.pin_memory())

    def _with_tensors(self, change: Callable[[str, torch.Tensor], torch.Tensor]) -> "PackedBatch":
        changed = copy(self)
        for attribute in fields(self):
            value = getattr(self, attribute.name)
            if isinstance(value, torch.Tensor):
                setattr(changed, attribute.name, change(attribute.name, value))
        if self.vision_inputs is not None:
            changed.vision_inputs = {name: change(name, value) for name, value in self.vision_inputs.items()}
        if self.audio_inputs is not None:
            changed.audio_inputs = {name: change(name, value) for name, value in self.audio_inputs.items()}
        changed.columns = {name: change("columns", value) for name, value in self.columns.items()}
        return changed

    def transformers_inputs(
        self,
        *,
        weighted_loss: bool = False,
        logits: Literal["all", "targets"] = "all",
        columns: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Arguments for a Hugging Face causal language model or Qwen-VL model.

        Labels are unshifted; Transformers shifts them. The attention mask is absent and the cache is disabled, because
        only then does Transformers derive a block-diagonal mask from restarting positions. `cu_seq_lens_*` and
        `max_length_*` are for flash attention and gated delta rules. `seq_idx`, int32 (1, T), the segment index of
        each token, is for convolutions and state spaces; it is present if the row has several segments.
        Some models ignore these boundaries: see `check_isolation`.

        If the row has images and videos, the images are passed as 1-step videos, and `input_ids` has video tokens
        in place of image tokens. Features, logits and gradients are the same, and the model runs its vision tower once
        for each row, as FSDP and ZeRO-3 require of all ranks.

        The loss that Transformers computes from `labels` is the mean over the targets of this row, all with the same
        weight. For several micro batches or ranks, set `num_items_in_batch` to `step_targets(batches)`. For other
        weights, use
        `batch.loss(model(**batch.transformers_inputs(weighted_loss=True)).logits, targets=step_targets(batches))`.

        Args:
            weighted_loss: the caller computes the loss from `loss_mask`, as `loss` does, and not from `labels`.
            logits: `targets` adds `logits_to_keep`, int64 (N,), the tokens whose next token is a target, and
                `shift_labels`, int64 (1, N), these targets. Logits are then (1, N, vocabulary), and the loss is the
                same, in models that use both arguments: most causal language models and vision-language models.
            columns: columns to add under their names, (1, T) or (1, T, k), for a trainer with such arguments.

        Raises:
            BatchError: targets have weights other than 1, and `weighted_loss` is not set; several samples and an
                image, for a model that is wrong for such rows (Gemma 3); or a column that the row does not have.
        """
        if not weighted_loss and (self.loss_weights is not None or self.loss_mask_scale != 1):
            raise BatchError(
                "`weighted_loss` must be True with loss weights other than 1, got False: a model's own loss ignores "
                "`loss_mask`. Use batch.loss(model(**batch.transformers_inputs(weighted_loss=True)).logits), or "
                "PackedTrainer."
            )
        bounds = padded_bounds(self)
        has_images = (
            any(self.num_images)
            or any(self.num_videos)
            or (self.token_type_ids is not None and bool(self.token_type_ids.any()))
        )
        if self._needs.one_sample and len(bounds) > 2 and has_images:
            raise BatchError(
                f"A row with images must have 1 segment for this model family, got {len(bounds) - 1}: Transformers "
                "does not keep the samples of such a row apart. Pack with `max_samples_per_pack=1`, and train with "
                "one pack per batch and without `pad_to`."
            )
        if self._needs.one_audio and len(bounds) > 2 and any(self.num_audios):
            raise BatchError(
                f"A row with audio must have 1 segment for this model family, got {len(bounds) - 1}: the clips of a "
                "row affect each other. Pack with `max_samples_per_pack=1`, and train with one pack per batch and "
                "without `pad_to`."
            )
        inputs: dict[str, Any] = {
            "input_ids": self.input_ids,
            "labels": self.labels,
            "position_ids": self._positions(len(bounds) - 1),
            "use_cache": False,
            "cu_seq_lens_q": bounds,
            "cu_seq_lens_k": bounds,
            "max_length_q": self.max_seqlen,
            "max_length_k": self.max_seqlen,
        }
        if not self.has_targets:
            inputs["num_items_in_batch"] = 1  # the sum of no loss, 0, instead of its mean, NaN
        # Models without the kernel for `seq_idx` refuse the argument, and a row of 1 segment does not need it.
        if len(bounds) > 2:
            tokens = self.input_ids.shape[1]  # known, so that the host need not wait for a GPU
            inputs["seq_idx"] = torch.repeat_interleave(bounds.diff(), output_size=tokens)[None]
        if logits == "targets":
            inputs |= _of_targets(self.labels)
        inputs |= self._named_columns(columns)
        return inputs | {name: value for name, value in self._in_one_call().items() if value is not None}

    def _named_columns(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        if missing := [name for name in names if name not in self.columns]:
            raise BatchError(
                f"`columns` must be names of columns of the row ({', '.join(self.columns) or 'none'}), got "
                f"{', '.join(missing)}. No sample of this row has such a column."
            )
        return {name: self.columns[name] for name in names}

    def _positions(self, segments: int) -> torch.Tensor:
        """`position_ids`; without the text row for a model that is right for rows of one sample, and may refuse it."""
        has_no_text = self._needs.one_sample and segments == 1 and self.position_ids.ndim == 3
        return self.position_ids[1:] if has_no_text else self.position_ids

    def loss(self, logits: torch.Tensor, *, targets: torch.Tensor | float | None = None) -> torch.Tensor:
        """Cross entropy weighted by `loss_mask`: sum(loss * loss_mask) / sum(loss_mask), a scalar.

        Args:
            logits: (1, T, vocabulary), model output for this row; or (1, N, vocabulary), of its N targets alone.
            targets: `step_targets` of all micro batches of the optimizer step, which replaces the sum of this row.
                The gradients of the micro batches then sum to the gradient of the mean over the step.
        """
        # If all weights are 1, this is the mean of Transformers.
        losses, weights = self._losses(logits)
        if targets is not None:
            # A number is not made a tensor: the host would wait for its copy.
            divisor = targets.to(logits.device) if isinstance(targets, torch.Tensor) else targets
            return (losses * weights).sum() / divisor / self.loss_mask_scale
        total = weights.sum()
        return (losses * weights).sum() / torch.where(total > 0, total, 1.0)  # 0 without targets, instead of NaN

    def loss_by_source(self, logits: torch.Tensor, signal: Signal = "loss") -> dict[str, torch.Tensor]:
        """Compute `loss` for each dataset over its samples only: a scalar for each name in `sources`.

        Samples without a source count as "unknown"; a dataset without a target in this row is missing.

        Args:
            logits: (1, T, V), or (1, N, V) of the N targets alone.
            signal: mean of the targets in place of their loss, as `target_signals` computes it: `entropy` of the
                predicted distribution, or `gradient_norm`, the norm of the gradient of the loss by the logits.
        """
        weights, bounds, names = self.loss_mask[0, 1:], padded_bounds(self), source_names(self.sources)
        # The datasets with a target are found on the device of the batch: the host need not wait for the logits.
        has_targets = (sums_by_source(weights, weights, bounds, names)[1][1] > 0).tolist()
        values = target_signals(logits, self.labels, signal)
        datasets, sums = sums_by_source(values, weights.to(logits.device), bounds, names)
        means = zip(datasets, sums[0] / sums[1], has_targets, strict=True)
        return {name: mean for name, mean, has_target in means if has_target}

    def sample_logps(self, logits: torch.Tensor) -> torch.Tensor:
        """Log probability of the targets of each sample, (S,), without weights.

        Args:
            logits: (1, T, V), or (1, N, V) of the N targets alone.
        """
        return self._sums_of_targets(-target_signals(logits, self.labels))

    def sample_sums(self, values: torch.Tensor) -> torch.Tensor:
        """Sum of the values of the targets of each sample, (S,).

        Args:
            values: (1, T), a value of each token, such as a column with log probabilities.
        """
        is_target = self.labels[0, 1:].to(values.device) != IGNORE_INDEX
        return self._sums_of_targets(torch.where(is_target, values[0, 1:], 0))

    def last_tokens(self, values: torch.Tensor) -> torch.Tensor:
        """Values of the last token of each sample, (S, ...).

        Args:
            values: (1, T, ...), values of each token, such as hidden states or scores.
        """
        ends = padded_bounds(self)[: self.num_samples] + self.cu_seqlens.diff()[: self.num_samples]
        return values[0, (ends - 1).long().to(values.device)]

    def _sums_of_targets(self, values: torch.Tensor) -> torch.Tensor:
        """Sums by sample of values of the targets at 1..T-1, (T-1,), which are 0 for other tokens."""
        samples = _samples_of_targets(values, padded_bounds(self), self.num_samples)
        return values.new_zeros(self.num_samples + 1).index_add(0, samples, values)[:-1]

    def split(self) -> list[EncodedSample]:
        """Return the S samples without padding, the inverse of collating.

        Pixels are views of the row. The label of a first token is -100, as it is never a target.
        """
        starts, lengths = padded_bounds(self).tolist(), self.cu_seqlens.diff().tolist()
        types, weights, columns = self.token_type_ids, self.loss_weights, self.columns
        groups, labels = self._group_keys(), self._labels()
        images = _media_slices(self.image_grid_thw, self.num_images, len(self.ids))
        videos = _media_slices(self.video_grid_thw, self.num_videos, len(self.ids))
        samples = []
        for index, ident in enumerate(self.ids):
            row = slice(starts[index], starts[index] + lengths[index])
            (image_grids, image_patches), (video_grids, video_patches) = images[index], videos[index]
            samples.append(
                EncodedSample(
                    id=ident,
                    input_ids=self.input_ids[0, row].cpu().numpy(),
                    labels=self.labels[0, row].cpu().numpy(),
                    image_token_id=self.image_token_id,
                    pixel_values=_part(self.pixel_values, image_patches),
                    image_grid_thw=_part(self.image_grid_thw, image_grids),
                    video_token_id=self.video_token_id,
                    pixel_values_videos=_part(self.pixel_values_videos, video_patches),
                    video_grid_thw=_part(self.video_grid_thw, video_grids),
                    second_per_grid_ts=_array(_part(self.second_per_grid_ts, video_grids), torch.float64),
                    position_ids=self.position_ids[1:, 0, row].cpu().numpy() if self.position_ids.ndim == 3 else None,
                    patch_positions=_array(_part(self.patch_positions, image_patches)),
                    vision_inputs=self._vision_inputs_of(index),
                    audio_token_id=self.audio_token_id,
                    audio_inputs=self._audio_inputs_of(index),
                    token_type_ids=None if types is None else types[0, row].cpu().numpy(),
                    needs=self.needs,
                    loss_weights=None if weights is None else weights[0, row].cpu().numpy(),
                    columns={name: column[0, row].cpu().numpy() for name, column in columns.items()} or None,
                    source=self.sources[index],
                ).in_group(groups[index], self.roles[index] if self.roles else None, labels[index])
            )
        return samples

    def _repr_html_(self) -> str:
        return shown_row("PackedBatch", self.split(), self.input_ids.shape[1])

    def _group_keys(self) -> list[str | None]:
        """Key of the group of each sample: its index, and the name of its first sample."""
        if self.groups is None:
            return [None] * len(self.ids)
        first: dict[int, str] = {}
        return [
            first.setdefault(group, f"{ident}/{group}")
            for group, ident in zip(self.groups.tolist(), self.ids, strict=True)
        ]

    def _labels(self) -> list[tuple[float, ...] | None]:
        if self.sample_labels is None:
            return [None] * len(self.ids)
        rows = self.sample_labels.reshape(len(self.ids), -1).tolist()
        return [None if all(map(math.isnan, row)) else tuple(row) for row in rows]

    def _vision_inputs_of(self, index: int) -> VisionInputs | None:
        """Arguments of the vision tower for the images of one sample."""
        if self.vision_inputs is None or not (self.num_images[index] or self.num_videos[index]):
            return None
        values = {name: self.vision_inputs[name][part] for name, part in self.vision_places[index].items()}
        return VisionInputs(values, self.vision_dims, self.num_images[index], self.num_videos[index])

    def _audio_inputs_of(self, index: int) -> VisionInputs | None:
        """Arguments of the audio encoder for one sample."""
        if self.audio_inputs is None or not self.num_audios or not self.num_audios[index]:
            return None
        values = {name: self.audio_inputs[name][part] for name, part in self.audio_places[index].items()}
        return VisionInputs(values, self.audio_dims, self.num_audios[index])

    @property
    def _needs(self) -> ModelNeeds:
        """What the model needs of this row; samples of other encoders may have types of tokens alone."""
        has_types = self.token_type_ids is not None
        return self.needs or (ModelNeeds("token_type_ids", one_sample=True) if has_types else ModelNeeds())

    def _losses(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cross entropy and weight of the targets at 1..T-1, each (T-1,)."""
        return target_signals(logits, self.labels), self.loss_mask[0, 1:].to(logits.device)

    def megatron_inputs(self, *, columns: Sequence[str] = ()) -> dict[str, Any]:
        """Arguments for Megatron, with labels and loss mask shifted within each sample; the same on every stage.

        Boundaries are in `cu_seqlens_*`, so M-RoPE positions are (3, 1, T), without the text row.
        Token t gets the label and the weight of token t + 1 of the same sample; the last token of a sample gets -100.

        Args:
            columns: columns to add under their names, shifted as labels are; the last token of a sample gets 0.

        Raises:
            BatchError: the row does not have a column.
        """
        # Shifting the whole row is enough: the first token of a sample is never a target, so no label crosses a
        # boundary. Megatron does not shift, unlike Transformers.
        inputs: dict[str, Any] = {
            "tokens": self.input_ids,
            "labels": _shifted(self.labels, IGNORE_INDEX),
            "loss_mask": _shifted(self.loss_mask, 0),
            "position_ids": self.position_ids[1:] if self.position_ids.ndim == 3 else self.position_ids,
            **self._thd_metadata(),
            "total_tokens": self.input_ids.shape[1],
            "padding_mask": self.padding_mask,
            **self._vision_arguments(),
            **{name: self._shifted_column(column) for name, column in self._named_columns(columns).items()},
        }
        return {name: value for name, value in inputs.items() if value is not None}

    def _shifted_column(self, column: torch.Tensor) -> torch.Tensor:
        """Shift a column left within each sample."""
        shifted = _shifted(column, FILL)
        # Unlike a label, the value of a first token may be any number.
        shifted[:, padded_bounds(self)[1:].long() - 1] = FILL
        return shifted

    def packed_seq_params(self) -> Any:
        """`megatron.core.packed_seq_params.PackedSeqParams` of this row, `qkv_format="thd"`.

        With a release of megatron-core that knows `total_tokens`, it is set too; Mamba layers need it.

        Raises:
            BatchError: megatron-core is not installed.
        """
        try:
            from megatron.core.packed_seq_params import PackedSeqParams
        except ImportError as error:
            raise BatchError(
                "packed_seq_params requires megatron-core; run pip install 'energon-packed[megatron]'"
            ) from error
        known = {attribute.name for attribute in fields(PackedSeqParams)}  # fields differ between releases
        return PackedSeqParams(
            **({"total_tokens": self.input_ids.shape[1]} if "total_tokens" in known else {}),
            qkv_format="thd",
            **self._thd_metadata(),
        )

    def _vision_arguments(self) -> dict[str, torch.Tensor | None]:
        """Arguments of vision-language and audio models, None for those that this row does not have."""
        arguments = {name: getattr(self, name) for name in _IMAGE_ARGUMENTS + _VIDEO_ARGUMENTS}
        if self._needs.types is not None:
            arguments[self._needs.types] = self.token_type_ids
        return arguments | (self.vision_inputs or {}) | (self.audio_inputs or {})

    def _in_one_call(self) -> dict[str, torch.Tensor | None]:
        """`_vision_arguments` with which the model runs the vision tower once, also for images and videos in a row.

        Qwen-VL models run the tower for the images of a row, and again for its videos. Ranks whose rows have different
        kinds of media would then run different numbers of collective operations (FSDP, ZeRO-3). An image is a video of
        one step to the tower, and only the features replace the tokens. In a row with both, images are therefore
        passed as videos, in the order of the tokens.
        """
        arguments = self._vision_arguments()
        image, video = self.image_token_id, self.video_token_id
        pixels, grids = arguments["pixel_values"], arguments["image_grid_thw"]
        videos, video_grids = arguments["pixel_values_videos"], arguments["video_grid_thw"]
        if image is None or video is None or self.patch_positions is not None:
            return arguments
        if self.vision_inputs is not None:
            return arguments | self._with_one_token(self.vision_inputs, video)
        if pixels is None or grids is None or videos is None or video_grids is None:
            return arguments
        is_image, is_video = self.input_ids[0] == image, self.input_ids[0] == video
        patches = [grid.prod(dim=1) for grid in (grids, video_grids)]
        merged = torch.cat(patches).sum() // (is_image.sum() + is_video.sum())  # patches of a token
        first = [
            flags.nonzero()[:, 0][(counts.cumsum(0) - counts) // merged]
            for flags, counts in zip((is_image, is_video), patches, strict=True)
        ]
        order = torch.cat(first).argsort()  # of the media, by their first tokens
        pieces = zip((pixels, videos), patches, strict=True)
        parts = [part for values, counts in pieces for part in torch.split(values, counts.tolist())]
        seconds = self.second_per_grid_ts
        if seconds is not None:  # the value for an image has no effect, as it has a single step
            seconds = torch.cat([seconds.new_ones(len(grids)), seconds])[order]
        return arguments | {
            "input_ids": torch.where(is_image, video, self.input_ids),
            "pixel_values": None,
            "image_grid_thw": None,
            "pixel_values_videos": torch.cat([parts[index] for index in order.tolist()]),
            "video_grid_thw": torch.cat([grids, video_grids])[order],
            "second_per_grid_ts": seconds,
        }

    def _with_one_token(self, inputs: dict[str, torch.Tensor], video: int) -> dict[str, torch.Tensor | None]:
        """Arguments that pass images as videos, if features of both replace the same token, as in GLM-4.1V; else {}.

        Such a model counts this token for images, and again for videos. No sample has both kinds.
        """
        kinds = {"pixel_values": "pixel_values_videos", "image_grid_thw": "video_grid_thw"}
        if any(name not in inputs for pair in kinds.items() for name in pair) or bool((self.input_ids == video).any()):
            return {}
        arguments: dict[str, torch.Tensor | None] = dict.fromkeys(kinds)
        for pair in kinds.items():
            parts = [inputs[name][place[name]] for place in self.vision_places for name in pair if name in place]
            arguments[pair[1]] = torch.cat(parts)
        return arguments

    def _thd_metadata(self) -> dict[str, Any]:
        """Boundaries of the samples, as Megatron names them."""
        return {
            "cu_seqlens_q": self.cu_seqlens,
            "cu_seqlens_kv": self.cu_seqlens,
            "cu_seqlens_q_padded": self.cu_seqlens_padded,
            "cu_seqlens_kv_padded": self.cu_seqlens_padded,
            "max_seqlen_q": self.max_seqlen,
            "max_seqlen_kv": self.max_seqlen,
        }


def step_targets(batches: Iterable[PackedBatch | Mapping[str, Any]], *, group: Any = None) -> torch.Tensor:
    """Targets of an optimizer step, per rank: the divisor of a loss that averages over all targets of the step.

        batches = list(islice(iterator, 4))  # the micro batches of this rank in one optimizer step
        targets = step_targets(batches)
        for batch in batches:
            batch.loss(model(**batch.transformers_inputs()).logits, targets=targets).backward()
        optimizer.step()

    In a mean of the means of micro batches, a target has more weight if its micro batch has fewer targets. If the sum
    of each micro batch is divided by the same number, all targets of the step have the same weight, or, with
    `loss_weighting` "sample", all samples. The loss is then sum(loss * weight) / sum(weight) over all targets of all
    ranks.

    DDP, FSDP and ZeRO average the gradients of the ranks. The divisor is therefore the mean of the ranks, not their
    sum: sum(weight) / world size. Ranks with the same batches (tensor or context parallel) do not change it. A
    trainer that divides the loss by the number of micro batches as well needs `targets / number`.

    Args:
        batches: the micro batches of this rank, PackedBatch or the dicts of `transformers_inputs()`.
        group: process group; all processes by default. Every process of it must call this function, also if it has
            fewer micro batches. Without torch.distributed, the sum of this process.

    Returns:
        float32 scalar tensor, for `batch.loss(logits, targets=...)`, or `num_items_in_batch` of a Transformers model.
    """
    total = sum((target_weights(batch).sum() for batch in batches), torch.zeros(()))
    return all_reduce_mean(total, group)


def trainer_inputs(batch: PackedBatch, *, with_weights: bool = False) -> dict[str, Any]:
    """`transformers_inputs()` for a trainer.

    Args:
        batch: a row.
        with_weights: the trainer applies loss weights: unless all weights are 1, `loss_mask`, float32 (1, T), is
            added, with weights that are comparable between rows. So are the arguments for logits of targets alone.

    Raises:
        BatchError: weights other than 1 for a trainer that does not apply them.
    """
    inputs = batch.transformers_inputs(weighted_loss=True, logits="targets" if with_weights else "all")
    if batch.loss_mask_scale == 1 and torch.equal(batch.loss_mask, (batch.labels != IGNORE_INDEX).float()):
        return inputs
    if not with_weights:
        weights = target_weights(batch)[batch.labels[:, 1:] != IGNORE_INDEX].tolist()
        raise BatchError(
            "`loss_mask` must be 1 at every target, because the loss of a model ignores it, got weights from "
            f"{min(weights, default=0):.3g} to {max(weights, default=0):.3g}. Use PackedTrainer, or `batch.loss` with "
            "`step_targets`; prepare_loader and Consumed yield the batch with `to_inputs=lambda batch: batch`."
        )
    return inputs | {"loss_mask": batch.loss_mask / batch.loss_mask_scale}


def _of_targets(labels: torch.Tensor) -> dict[str, torch.Tensor]:
    """Arguments with which a model computes the logits of targets alone."""
    positions = (labels[0, 1:] != IGNORE_INDEX).nonzero()[:, 0]
    return {"logits_to_keep": positions, "shift_labels": labels[:, positions + 1]}


def target_signals(logits: torch.Tensor, labels: torch.Tensor, signal: Signal = "loss") -> torch.Tensor:
    """Return a value of each target at 1..T-1, float32 (T-1,), 0 for other tokens.

    Args:
        logits: (1, T, V), or (1, N, V) of the N targets alone (`transformers_inputs(logits="targets")`).
        labels: int64 (1, T), unshifted.
        signal: `loss`, the cross entropy; `entropy` of the predicted distribution p, in nats; `gradient_norm`, the
            norm of the gradient of the loss with respect to the logits, |p - onehot(target)|, between 0 and sqrt(2)
            (EL2N of M. Paul et al., "Deep Learning on a Data Diet", 2021).
    """
    targets = _shifted(labels.to(logits.device), IGNORE_INDEX)[0]
    if logits.shape[1] == labels.shape[1]:  # a slice of the logits would copy them in the backward pass
        return signals_of(logits.flatten(0, 1), targets, signal)[:-1]
    positions = (targets != IGNORE_INDEX).nonzero()[:, 0]
    values = signals_of(logits.flatten(0, 1), targets[positions], signal)
    return values.new_zeros(len(targets) - 1).index_copy(0, positions, values)


def signals_of(logits: torch.Tensor, targets: torch.Tensor, signal: Signal = "loss") -> torch.Tensor:
    """Return a value of each of N targets, float32 (N,), 0 for -100; `signal` as for `target_signals`.

    Only a piece of the logits is converted to float32 at a time.

    Args:
        logits: (N, V), by which the targets are predicted.
        targets: int64 (N,).
    """
    if signal == "loss":
        return cross_entropy(logits, targets)
    values = [_uncertainty(logits[piece], targets[piece], signal) for piece in pieces(logits)]
    return torch.cat(values) if values else logits.new_zeros(0, dtype=torch.float32)


def _uncertainty(logits: torch.Tensor, targets: torch.Tensor, signal: Signal) -> torch.Tensor:
    p = torch.softmax(in_float32(logits), dim=-1)
    if signal == "entropy":
        values = torch.special.entr(p).sum(-1)
    else:
        of_target = p.gather(-1, targets.clamp(min=0)[:, None])[:, 0]
        values = (p.square().sum(-1) - 2 * of_target + 1).clamp(min=0).sqrt()
    return torch.where(targets == IGNORE_INDEX, 0.0, values)


def padded_bounds(batch: PackedBatch) -> torch.Tensor:
    """Boundaries of the segments in the row, padding included; int32, same shape as `cu_seqlens`."""
    return batch.cu_seqlens if batch.cu_seqlens_padded is None else batch.cu_seqlens_padded


def source_names(sources: Sequence[SampleSource | None]) -> list[str]:
    """Return the dataset of each sample, "unknown" without a source."""
    return ["unknown" if source is None else source.dataset for source in sources]


def sums_by_source(
    losses: torch.Tensor, weights: torch.Tensor, bounds: torch.Tensor, names: Sequence[str]
) -> tuple[list[str], torch.Tensor]:
    """Sum the losses of a row by dataset.

    Args:
        losses: float32 (T-1,), losses of the targets at 1..T-1.
        weights: float32 (T-1,), their weights.
        bounds: int32 (S+1,) or longer, boundaries of the samples in the row.
        names: dataset of each of the S samples.

    Returns:
        The K datasets, and float32 (2, K): sum of loss * weight, and sum of weights.
    """
    datasets = sorted(set(names))
    # The tail of the row is not a sample: its losses go into a separate column, which is not returned.
    dataset_of_segment = torch.tensor([*map(datasets.index, names), len(datasets)], device=losses.device)
    dataset_of_loss = dataset_of_segment[_samples_of_targets(losses, bounds, len(names))]
    values = torch.stack([losses * weights, weights])
    sums = values.new_zeros(2, len(datasets) + 1).index_add(1, dataset_of_loss, values)
    return datasets, sums[:, :-1]


def _samples_of_targets(values: torch.Tensor, bounds: torch.Tensor, samples: int) -> torch.Tensor:
    """Index of the sample of each target at 1..T-1, int64 (T-1,); `samples` for tokens of the tail.

    Args:
        values: (T-1,), for its length and device.
        bounds: int32 (S+1,) or longer, boundaries of the segments in the row.
        samples: number of samples S.
    """
    # Value t is of the target at t + 1. Across a boundary it counts nothing: a first token is never a target.
    targets = torch.arange(1, len(values) + 1, device=values.device)
    return torch.searchsorted(bounds[1 : samples + 1].to(values.device).long(), targets, right=True)


def target_weights(batch: PackedBatch | Mapping[str, Any]) -> torch.Tensor:
    """Weights of the targets at 1..T-1, float32 (1, T-1), comparable between rows.

    Args:
        batch: a row, or its `trainer_inputs`.
    """
    if isinstance(batch, PackedBatch):
        return batch.loss_mask[:, 1:] / batch.loss_mask_scale
    mask: torch.Tensor = batch["loss_mask"] if "loss_mask" in batch else batch["labels"] != IGNORE_INDEX
    return mask[..., 1:].float()


def _media_slices(grids: torch.Tensor | None, counts: list[int], samples: int) -> list[tuple[slice, slice]]:
    """Slices of each sample in the grids and in the patches of a row; empty for samples without media.

    Args:
        grids: int64 (media, 3), or None.
        counts: images or video files of each sample; () without.
        samples: number of samples.
    """
    if grids is None or not any(counts):
        return [(slice(0, 0), slice(0, 0))] * samples
    # A grid is (time, height, width) in patches, so its product is the patches of the image.
    media = [0, *accumulate(counts)]
    patches = [0, *accumulate(grids.prod(dim=1).tolist())]
    return [(slice(start, stop), slice(patches[start], patches[stop])) for start, stop in pairwise(media)]


def _part(tensor: torch.Tensor | None, part: slice) -> torch.Tensor | None:
    """Slice of a tensor; None for an empty slice."""
    return None if tensor is None or part.start == part.stop else tensor[part]


def _array(tensor: torch.Tensor | None, dtype: torch.dtype | None = None) -> Any:
    """A tensor as an array, or None."""
    return None if tensor is None else tensor.cpu().to(dtype).numpy()


def _shifted(row: torch.Tensor, last: float) -> torch.Tensor:
    """Shift a row (1, T) or (1, T, k) left by a position and append `last`."""
    return torch.cat([row[:, 1:], torch.full_like(row[:, :1], last)], dim=1)
