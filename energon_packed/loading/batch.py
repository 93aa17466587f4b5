"""PackedBatch: one row of concatenated sub-samples, with conversions for training frameworks."""

from collections.abc import Callable
from copy import copy
from dataclasses import field, fields
from typing import Any

import torch
from megatron.energon import Batch, edataclass

from energon_packed.encoding import IGNORE_INDEX, EncodedSample, SampleSource
from energon_packed.encoding.vision.positions import VisionInputs
from energon_packed.errors import BatchError
from energon_packed.loading.dataflow.transport import send_by_value


@send_by_value
@edataclass
class PackedBatch(Batch):
    """One row of T tokens with S sub-samples; several packs of a micro batch are concatenated into one row.

        sub-sample   |-- 0 --|- 1 -|---- 2 ----|(tail)
        cu_seqlens   0       3     5           9      T
        position_ids 0 1 2   0 1   0 1 2 3     0 ..

    Attributes:
        input_ids: int64 (1, T).
        labels: int64 (1, T), unshifted, -100 where not supervised; the first token of a sub-sample is never a
            target, because no token of the same sub-sample predicts it.
        loss_mask: float32 (1, T), weight of each target (1 unless the collator sets `loss_weighting`), 0 elsewhere.
        position_ids: int64 (1, T), restarting at 0 in each sub-sample; (4, 1, T) for M-RoPE models: the text row,
            then t, h and w.
        cu_seqlens: int32 (S+1,), without padding between sub-samples; a padding tail counts as one more segment.
        max_seqlen: tokens of the longest segment, padding included.
        cu_seqlens_padded: int32, same shape as `cu_seqlens`, segment boundaries in the padded row; None without
            padding between sub-samples.
        padding_mask: bool (1, T), True at padding; None with a collator that does not pad. One that pads sets it
            for every row, because Megatron's ranks must agree on whether it exists.
        pixel_values: (patches, patch_dim) of all images in order, float32 or the collator's `pixel_dtype`; or None.
        image_grid_thw: int64 (images, 3), or None.
        patch_positions: int64 (patches, 3), or None.
        ids: names of the S sub-samples.
        sources: data set and subflavors of each sub-sample, None where they are not known.
        num_images: images of each sub-sample.
        vision_inputs: arguments of vision towers that take others than `pixel_values` (patches, patch_dim) and
            `image_grid_thw`, by name; or None.
        vision_dims, vision_places: along which dimension each is joined, and where those of each sub-sample are.
        token_type_ids: int64 (1, T), 1 at image tokens, for models that take it; or None.
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
    vision_places: list[dict[str, tuple[slice, ...]] | None] = field(default_factory=list)
    token_type_ids: torch.Tensor | None = None

    @property
    def num_samples(self) -> int:
        """Number of sub-samples S; a padding tail does not count."""
        return len(self.ids)

    @property
    def num_tokens(self) -> int:
        """Number of real tokens, without padding."""
        padding = 0 if self.padding_mask is None else int(self.padding_mask.sum())
        return self.input_ids.shape[1] - padding

    def to(
        self,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        non_blocking: bool = False,
    ) -> "PackedBatch":
        """This batch with all tensors on a device; the batch itself stays where it is.

        Args:
            device: None leaves the tensors where they are.
            dtype: of `pixel_values`, a floating-point one; ids, labels, boundaries and positions keep theirs, and
                `loss_mask` stays float32, since it is summed.
            non_blocking: copy from pinned memory without waiting.

        Raises:
            BatchError: a `dtype` that is not a floating-point one.
        """
        if dtype is not None and not dtype.is_floating_point:
            raise BatchError(f"`dtype` is {dtype}, and it is that of pixels: pass a floating-point one, or none")

        def moved(name: str, tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(device, dtype if name == "pixel_values" else None, non_blocking=non_blocking)

        return self._with_tensors(moved)

    def without_targets(self) -> "PackedBatch":
        """The same row without targets and names of samples, for a rank that has no row in a step."""
        found = copy(self)
        found.labels, found.loss_mask = torch.full_like(self.labels, IGNORE_INDEX), torch.zeros_like(self.loss_mask)
        found.ids = [None] * len(self.ids)
        return found

    def pin_memory(self) -> "PackedBatch":
        """This batch with all tensors in pinned memory; DataLoaders with `pin_memory=True` call it."""
        return self._with_tensors(lambda name, tensor: tensor.pin_memory())

    def _with_tensors(self, change: Callable[[str, torch.Tensor], torch.Tensor]) -> "PackedBatch":
        changed = copy(self)
        for one in fields(self):
            value = getattr(self, one.name)
            if isinstance(value, torch.Tensor):
                setattr(changed, one.name, change(one.name, value))
        if self.vision_inputs is not None:
            changed.vision_inputs = {name: change(name, value) for name, value in self.vision_inputs.items()}
        return changed

    def transformers_inputs(self) -> dict[str, Any]:
        """Arguments for a Hugging Face causal language model or Qwen-VL model.

        Labels are unshifted; Transformers shifts them. There is no attention mask and the cache is disabled, because
        only then does Transformers derive a block-diagonal mask from restarting positions. `cu_seq_lens_*` and
        `max_length_*` are for flash attention and gated delta rules; `seq_idx`, int32 (1, T), the number of each
        token's segment, is for convolutions and state spaces, and is there when the row has several segments.
        Not every model heeds them: see `check_isolation`.

        The loss that Transformers computes from `labels` weights all targets equally; with another `loss_weighting`,
        use `batch.loss(model(...).logits)`.

        Raises:
            BatchError: several samples and an image, for a model that takes `token_type_ids` (Gemma 3).
        """
        bounds = self._bounds()
        if self.token_type_ids is not None and len(bounds) > 2 and self.token_type_ids.any():
            raise BatchError(
                f"the row has {len(bounds) - 1} segments and images, and Transformers applies this family's attention "
                "within an image to the wrong tokens of a packed row: pack with `max_samples_per_pack=1`, and train "
                "with one pack in a batch and without `pad_to`"
            )
        inputs: dict[str, Any] = {
            "input_ids": self.input_ids,
            "labels": self.labels,
            "position_ids": self.position_ids,
            "use_cache": False,
            "cu_seq_lens_q": bounds,
            "cu_seq_lens_k": bounds,
            "max_length_q": self.max_seqlen,
            "max_length_k": self.max_seqlen,
        }
        if len(bounds) > 2:  # without a kernel, models refuse it, and a row of one segment needs none
            numbers = torch.arange(len(bounds) - 1, dtype=torch.int32, device=bounds.device)
            tokens = self.input_ids.shape[1]  # known, so that the host need not wait for a GPU
            inputs["seq_idx"] = torch.repeat_interleave(numbers, bounds.diff(), output_size=tokens)[None]
        optional = {"pixel_values": self.pixel_values, "image_grid_thw": self.image_grid_thw}
        optional |= {"token_type_ids": self.token_type_ids, **(self.vision_inputs or {})}
        if self.patch_positions is not None:
            optional["patch_positions"] = self.patch_positions
        return inputs | {name: value for name, value in optional.items() if value is not None}

    def loss(self, logits: torch.Tensor) -> torch.Tensor:
        """Cross entropy weighted by `loss_mask`: sum(loss * loss_mask) / sum(loss_mask), a scalar.

        Args:
            logits: (1, T, vocabulary), model output for this row.
        """
        losses, weights = self._losses(logits)
        return (losses * weights).sum() / weights.sum()

    def loss_by_source(self, logits: torch.Tensor) -> dict[str, torch.Tensor]:
        """As `loss`, over the sub-samples of each data set alone: a scalar for each name in `sources`.

        Sub-samples without a source are under "unknown"; a data set without a target in this row is missing.
        """
        losses, weights = self._losses(logits)
        names = ["unknown" if source is None else source.dataset for source in self.sources]
        places = torch.tensor([sorted(set(names)).index(name) for name in names], device=losses.device)
        bounds = self._bounds()[: len(names) + 1].to(losses.device).long()
        of_token = torch.repeat_interleave(places, bounds.diff())[1:]  # the target at t + 1
        losses, weights = losses[: len(of_token)], weights[: len(of_token)]
        totals = losses.new_zeros(len(set(names))).index_add(0, of_token, losses * weights)
        counts = weights.new_zeros(len(set(names))).index_add(0, of_token, weights)
        return {name: totals[i] / counts[i] for i, name in enumerate(sorted(set(names))) if counts[i] > 0}

    def split(self) -> list[EncodedSample]:
        """The S sub-samples again, without padding: the inverse of collating.

        Pixels are views of the row. The label of a first token is -100, as it is never a target.
        """
        starts, lengths = self._bounds().tolist(), self.cu_seqlens.diff().tolist()
        found, image, patch = [], 0, 0
        for number, ident in enumerate(self.ids):
            row = slice(starts[number], starts[number] + lengths[number])
            images = slice(image, image + self.num_images[number])
            grid = None if self.image_grid_thw is None or images.start == images.stop else self.image_grid_thw[images]
            patches = slice(patch, patch + (0 if grid is None else int(grid.prod(dim=1).sum())))
            image, patch = images.stop, patches.stop
            pixels, positions, types = self.pixel_values, self.patch_positions, self.token_type_ids
            found.append(
                EncodedSample(
                    id=ident,
                    input_ids=self.input_ids[0, row].cpu().numpy(),
                    labels=self.labels[0, row].cpu().numpy(),
                    pixel_values=None if grid is None or pixels is None else pixels[patches],
                    image_grid_thw=grid,
                    position_ids=self.position_ids[1:, 0, row].cpu().numpy() if self.position_ids.ndim == 3 else None,
                    patch_positions=None if grid is None or positions is None else positions[patches].cpu().numpy(),
                    vision_inputs=self._vision_part(number),
                    token_type_ids=None if types is None else types[0, row].cpu().numpy(),
                    source=self.sources[number],
                )
            )
        return found

    def _vision_part(self, number: int) -> VisionInputs | None:
        """Arguments of the vision tower for the images of one sub-sample."""
        place = self.vision_places[number] if number < len(self.vision_places) else None
        if place is None or self.vision_inputs is None or not self.num_images[number]:
            return None
        values = {name: self.vision_inputs[name][slices] for name, slices in place.items()}
        return VisionInputs(values, self.vision_dims, self.num_images[number])

    def _bounds(self) -> torch.Tensor:
        """Where segments begin and end in the row, padding included."""
        return self.cu_seqlens if self.cu_seqlens_padded is None else self.cu_seqlens_padded

    def _losses(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cross entropy and weight of the targets at 1..T-1, each (T-1,)."""
        targets, weights = self.labels[0, 1:], self.loss_mask[0, 1:].to(logits.device)
        losses = torch.nn.functional.cross_entropy(
            logits[0, :-1].float(), targets.to(logits.device), ignore_index=IGNORE_INDEX, reduction="none"
        )
        return losses, weights

    def megatron_inputs(self) -> dict[str, Any]:
        """Arguments for Megatron, with labels and loss mask shifted within each sub-sample; the same on every stage.

        Boundaries are in `cu_seqlens_*`, so M-RoPE positions are (3, 1, T), without the text row.
        Token t gets the label and the weight of token t + 1 of the same sub-sample; the last token of each gets none.
        """
        # The first token of a sub-sample is never a target, so no label crosses a boundary.
        inputs: dict[str, Any] = {
            "tokens": self.input_ids,
            "labels": _shifted(self.labels, IGNORE_INDEX),
            "loss_mask": _shifted(self.loss_mask, 0),
            "position_ids": self.position_ids[-3:] if self.position_ids.ndim == 3 else self.position_ids,
            "cu_seqlens_q": self.cu_seqlens,
            "cu_seqlens_kv": self.cu_seqlens,
            "cu_seqlens_q_padded": self.cu_seqlens_padded,
            "cu_seqlens_kv_padded": self.cu_seqlens_padded,
            "max_seqlen_q": self.max_seqlen,
            "max_seqlen_kv": self.max_seqlen,
            "total_tokens": self.input_ids.shape[1],
            "padding_mask": self.padding_mask,
            "pixel_values": self.pixel_values,
            "image_grid_thw": self.image_grid_thw,
            "patch_positions": self.patch_positions,
            "token_type_ids": self.token_type_ids,
            **(self.vision_inputs or {}),
        }
        return {name: value for name, value in inputs.items() if value is not None}

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
        known = {one.name for one in fields(PackedSeqParams)}
        return PackedSeqParams(
            **({"total_tokens": self.input_ids.shape[1]} if "total_tokens" in known else {}),
            qkv_format="thd",
            cu_seqlens_q=self.cu_seqlens,
            cu_seqlens_kv=self.cu_seqlens,
            cu_seqlens_q_padded=self.cu_seqlens_padded,
            cu_seqlens_kv_padded=self.cu_seqlens_padded,
            max_seqlen_q=self.max_seqlen,
            max_seqlen_kv=self.max_seqlen,
        )


def _shifted(row: torch.Tensor, last: float) -> torch.Tensor:
    """Shift a row (1, T) left by one position and append `last`."""
    return torch.cat([row[:, 1:], torch.full_like(row[:, :1], last)], dim=1)
