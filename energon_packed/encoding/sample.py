"""Model inputs of samples, before collation.

An encoder returns an EncodedSample for each conversation (arrays of one sample). A collator needs an EncodedRow: the
columns of several samples end to end, with their boundaries. A row of stored tokens is an EncodedRow from the start.
"""

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt

from energon_packed.encoding.vision.positions import ModelNeeds, VisionInputs
from energon_packed.errors import BatchError, Reason, RecordError
from energon_packed.records.columns import FILL, Columns, cut_columns, join_columns
from energon_packed.seqlens import cu_seqlens_from_lengths

if TYPE_CHECKING:
    import torch

IGNORE_INDEX = -100
"""Label of a token that is not a target; default `ignore_index` of torch.nn.CrossEntropyLoss."""


_TOKEN_COLUMNS = ("input_ids", "labels", "position_ids", "token_type_ids", "loss_weights")


class SampleSource(NamedTuple):
    """Origin of a sample.

    Attributes:
        dataset: path of the dataset or file.
        subflavors: labels of the dataset in a Metadataset or dataset.yaml.

    Examples:
        >>> PaddingFreeCollator().collate(PackedDataset("demo-out", encoder)[0]).sources[0]
        SampleSource(dataset='demo-out/webdataset', subflavors={})
    """

    dataset: str
    subflavors: dict[str, Any]


def targets_per_sample(labels: npt.NDArray[np.int64], cu_seqlens: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
    """Number of targets of each sample, int64 (S,).

    The first token of a sample is never a target: no token of the sample predicts it.

    Args:
        labels: int64 (T,), of samples end to end.
        cu_seqlens: (S+1,), their boundaries.
    """
    bounds = np.asarray(cu_seqlens)
    targets = (labels != IGNORE_INDEX).nonzero()[0]
    # The minimum is for empty samples: their second token would belong to the next sample.
    after_first = np.minimum(bounds[:-1] + 1, bounds[1:])
    return np.asarray(targets.searchsorted(bounds[1:]) - targets.searchsorted(after_first))


def join_values(columns: Sequence[tuple[npt.NDArray[Any] | None, int]], default: np.generic) -> Any:
    """Join the columns of samples, (column or None, number of tokens) each; None if no sample has the column.

    Tokens of samples without the column get the value `default`.
    """
    if all([column is None for column, _ in columns]):
        return None
    return np.concatenate([np.full(size, default) if column is None else column for column, size in columns])


def weight_checksums(
    labels: npt.NDArray[np.int64], loss_weights: npt.NDArray[np.float32] | None, cu_seqlens: npt.NDArray[np.integer]
) -> npt.NDArray[np.int64]:
    """Checksum of the loss weights of each sample, int64 (S,); 0 if all its targets have the weight 1.

    It is the sum, modulo 2**63, of a hash of label and weight of every other target. The checksums of the fragments of
    a sample therefore sum to the checksum of the sample.

    Args:
        labels: int64 (T,), of samples end to end.
        loss_weights: float32 (T,), loss weight of each token; None if all weights are 1.
        cu_seqlens: (S+1,), their boundaries.
    """
    bounds = np.asarray(cu_seqlens)
    if loss_weights is None:
        return np.zeros(len(bounds) - 1, dtype=np.int64)
    is_other = (labels != IGNORE_INDEX) & (loss_weights != 1)
    is_other[bounds[:-1][np.diff(bounds) > 0]] = False  # first tokens are never targets
    keys = labels.astype(np.uint64) << np.uint64(32) | loss_weights.astype(np.float32).view(np.uint32)
    sums = np.zeros(len(keys) + 1, dtype=np.uint64)
    np.cumsum(_mixed(keys) * is_other, out=sums[1:])
    return (np.diff(sums[bounds]) & np.uint64(2**63 - 1)).view(np.int64)


def column_checksums(
    labels: npt.NDArray[np.int64], columns: Columns, cu_seqlens: npt.NDArray[np.integer]
) -> npt.NDArray[np.int64]:
    """Checksum of the columns of each sample, int64 (S,); 0 if all targets have `FILL` in all columns.

    As `weight_checksums`, it is a sum over targets: the checksums of fragments sum to the checksum of the sample.

    Args:
        labels: int64 (T,), of samples end to end.
        columns: columns by name, (T,) or (T, k).
        cu_seqlens: (S+1,), boundaries of the samples.
    """
    bounds = np.asarray(cu_seqlens)
    is_target = labels != IGNORE_INDEX
    is_target[bounds[:-1][np.diff(bounds) > 0]] = False
    sums = np.zeros(len(labels) + 1, dtype=np.uint64)
    for name, column in columns.items():
        # float64 has all values of all dtypes, so that a dtype that a row widens has the same checksum.
        values = column.reshape(len(column), -1).astype(np.float64)
        places = np.arange(values.shape[1], dtype=np.uint64) + np.uint64(zlib.crc32(name.encode()) << 16)
        keys = _mixed(values.view(np.uint64) ^ _mixed(labels.astype(np.uint64))[:, None] ^ _mixed(places))
        sums[1:] += (keys * (values != FILL)).sum(axis=1, dtype=np.uint64) * is_target
    np.cumsum(sums, out=sums)
    return (np.diff(sums[bounds]) & np.uint64(2**63 - 1)).view(np.int64)


def _mixed(keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The output function of SplitMix64 (Steele, Lea and Flood, 2014), so that no change cancels another."""
    keys = (keys ^ keys >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    keys = (keys ^ keys >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return keys ^ keys >> np.uint64(31)


def _first(values: Iterable[Any]) -> Any:
    """First value that is not None, or None."""
    return next((value for value in values if value is not None), None)


@dataclass(frozen=True, kw_only=True, eq=False)
class EncodedSample:
    """One encoded sample of L tokens.

    Attributes:
        input_ids: int64 (L,); an image is a run of the vision family's image token.
        labels: int64 (L,), unshifted: `input_ids` if supervised, else -100.
        loss_weights: float32 (L,), loss weight of each token, which counts only at targets; None if all weights are 1.
        columns: further columns of its tokens by name, each (L,) or (L, k); None without columns.
        group: key of the samples of the same pack or item that share a row with it, or None.
        role: its role in the group, such as `chosen`, or None.
        label: label of the whole sample, a value or a value for each class, or None.
        id: sample name in reports.
        image_token_id: token that represents image features, or None.
        pixel_values: float32 (patches, patch_dim) of all images, or None.
        image_grid_thw: int64 (images, 3), patches of each image in time, height and width, or None.
        video_token_id: token that represents video features, or None.
        pixel_values_videos: float32 (patches, patch_dim) of all video files, or None.
        video_grid_thw: int64 (videos, 3), patches of each video file in time, height and width, or None.
        second_per_grid_ts: float64 (videos,), seconds of each step of the grid in time, for models with this
            argument, or None.
        position_ids: int64 (axes, L), M-RoPE positions, usually t, h and w; None if the model uses 0..L-1.
        patch_positions: int64 (patches, 3), position of each patch as (t, h, w), or None.
        vision_inputs: arguments of a vision tower other than pixel_values and image_grid_thw, or None.
        audio_token_id: token that represents features of audio, or None.
        audio_inputs: arguments of the audio encoder, such as input_features, or None.
        token_type_ids: int64 (L,), 1 at image tokens, for models with such an argument, or None.
        needs: what its model needs of a row with images, or None.
        source: dataset that it comes from, or None.
        dummy: a minimal image sample of its encoder's vision family, which a collator puts into rows without images,
            or None.

    Examples:
        >>> sample = EncodedSample(input_ids=np.array([5, 6, 7]), labels=np.array([-100, 6, 7]))
        >>> len(sample), sample.num_supervised, sample.truncated(2).labels.tolist()
        (3, 2, [-100, 6])
    """

    input_ids: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    id: str | None = None
    image_token_id: int | None = None
    pixel_values: "torch.Tensor | None" = None
    image_grid_thw: "torch.Tensor | None" = None
    video_token_id: int | None = None
    pixel_values_videos: "torch.Tensor | None" = None
    video_grid_thw: "torch.Tensor | None" = None
    second_per_grid_ts: npt.NDArray[np.float64] | None = None
    position_ids: npt.NDArray[np.int64] | None = None
    patch_positions: npt.NDArray[np.int64] | None = None
    vision_inputs: VisionInputs | None = None
    audio_token_id: int | None = None
    audio_inputs: VisionInputs | None = None
    token_type_ids: npt.NDArray[np.int64] | None = None
    needs: ModelNeeds | None = None
    loss_weights: npt.NDArray[np.float32] | None = None
    columns: Columns | None = None
    group: str | None = None
    role: str | None = None
    label: tuple[float, ...] | None = None
    source: SampleSource | None = None
    dummy: "EncodedSample | None" = None

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def num_images(self) -> int:
        """Number of images."""
        if self.vision_inputs is not None:
            return self.vision_inputs.images
        return 0 if self.image_grid_thw is None else len(self.image_grid_thw)

    @property
    def num_videos(self) -> int:
        """Number of video files; families without a video token count their frames as images."""
        if self.vision_inputs is not None:
            return self.vision_inputs.videos
        return 0 if self.video_grid_thw is None else len(self.video_grid_thw)

    @property
    def num_audios(self) -> int:
        """Number of audio files."""
        return 0 if self.audio_inputs is None else self.audio_inputs.images

    @property
    def num_patches(self) -> int:
        """Number of patches of its images and video files."""
        return sum([int(g.prod(dim=1).sum()) for g in (self.image_grid_thw, self.video_grid_thw) if g is not None])

    @property
    def num_supervised(self) -> int:
        """Number of targets, as `targets_per_sample` counts them."""
        return int(targets_per_sample(self.labels, np.array([0, len(self)]))[0])

    @property
    def weight_checksum(self) -> int:
        """Sum of the checksums of its loss weights and columns, modulo 2**63."""
        bounds = np.array([0, len(self)])
        checksum = int(weight_checksums(self.labels, self.loss_weights, bounds)[0])
        if self.columns:
            checksum += int(column_checksums(self.labels, self.columns, bounds)[0])
        return checksum % 2**63

    def of(self, source: SampleSource | None) -> "EncodedSample":
        """Return the same sample with this `source`; arrays and pixels are shared, not copied."""
        if source is None:
            return self
        made = object.__new__(type(self))  # `replace` would call __init__ for each sample of each batch
        vars(made).update(vars(self), source=source)
        return made

    def in_group(self, group: str | None, role: str | None, label: tuple[float, ...] | None) -> "EncodedSample":
        """Return the same sample with this group, role and label; arrays and pixels are shared, not copied."""
        if group is None and role is None and label is None:
            return self
        made = object.__new__(type(self))
        vars(made).update(vars(self), group=group, role=role, label=label)
        return made

    def token_columns(self, tokens: slice) -> dict[str, Any]:
        """The fields with an entry for each token, by name, of some tokens; fields that are None are left out."""
        fields = {name: getattr(self, name) for name in _TOKEN_COLUMNS}
        cut: dict[str, Any] = {name: values[..., tokens] for name, values in fields.items() if values is not None}
        return cut if self.columns is None else {**cut, "columns": cut_columns(self.columns, tokens)}

    def truncated(self, max_length: int) -> "EncodedSample":
        """Truncate to the first `max_length` tokens; return the sample itself if it is short enough.

        Raises:
            RecordError: `overlong`, if truncation would remove part of an image, a video or audio;
                `no_supervised_tokens`, if no target remains.
        """
        if len(self) <= max_length:
            return self
        # An image is removed as a whole or not at all: its pixels would have more features than tokens.
        tokens = {"an image": self.image_token_id, "a video": self.video_token_id, "audio": self.audio_token_id}
        for kind, token in tokens.items():
            if token is not None and (self.input_ids[max_length:] == token).any():
                raise RecordError(
                    Reason.OVERLONG, f"{len(self)} tokens; truncation to {max_length} would remove part of {kind}"
                )
        cut = replace(self, **self.token_columns(slice(max_length)))
        if cut.num_supervised == 0:
            raise RecordError(
                Reason.NO_SUPERVISED_TOKENS, f"{len(self)} tokens; the first {max_length} contain no target"
            )
        return cut


@dataclass(kw_only=True, eq=False)
class EncodedRow(Sequence[EncodedSample]):
    """S samples end to end: a sequence of EncodedSample, and the columns of all of them.

    A stored row is collated by its columns. Its samples, views of the columns, are created at the first access.

    Attributes:
        ids: names of the S samples.
        input_ids: int64 (T,).
        labels: int64 (T,), -100 if not supervised.
        cu_seqlens: integers (S+1,), boundaries of the samples.
        position_ids: int64 (axes, T), M-RoPE positions, or None.
        token_type_ids: int64 (T,), 1 at image tokens, or None.
        needs: what the model needs of a row with images, or None.
        loss_weights: float32 (T,), loss weight of each token, which counts only at targets; None if all weights are 1.
        columns: further columns of the tokens by name, each (T,) or (T, k); None without columns.
        image_token_id: token that represents image features, or None.
        video_token_id, audio_token_id: tokens that represent features of videos and audio, or None.
        dummy: of the first sample that has a dummy, or None.
        sources: datasets that the S samples come from, or None each.
        groups: key of the group of each sample, or None; None if no sample has a group.
        roles, sample_labels: role and label of each sample, in the same way.
    """

    ids: Sequence[str | None]
    input_ids: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    cu_seqlens: npt.NDArray[np.integer]
    position_ids: npt.NDArray[np.int64] | None = None
    token_type_ids: npt.NDArray[np.int64] | None = None
    needs: ModelNeeds | None = None
    loss_weights: npt.NDArray[np.float32] | None = None
    columns: Columns | None = None
    image_token_id: int | None = None
    video_token_id: int | None = None
    audio_token_id: int | None = None
    dummy: EncodedSample | None = None
    sources: Sequence[SampleSource | None]
    groups: Sequence[str | None] | None = None
    roles: Sequence[str | None] | None = None
    sample_labels: Sequence[tuple[float, ...] | None] | None = None
    _joined: Sequence[EncodedSample] | None = field(default=None, repr=False)

    @classmethod
    def of(cls, samples: Sequence[EncodedSample]) -> "EncodedRow":
        """Return the columns of any samples; an EncodedRow is returned unchanged.

        Raises:
            BatchError: some samples have M-RoPE positions and some do not, or columns do not match.
        """
        if isinstance(samples, EncodedRow):
            return samples
        return cls(
            ids=[sample.id for sample in samples],
            cu_seqlens=np.cumsum([0, *map(len, samples)]),
            sources=[sample.source for sample in samples],
            groups=_given([sample.group for sample in samples]),
            roles=_given([sample.role for sample in samples]),
            sample_labels=_given([sample.label for sample in samples]),
            _joined=samples,
            **joined_columns(samples),
        )

    @classmethod
    def joined(cls, rows: Sequence[Sequence[EncodedSample]]) -> Sequence[EncodedSample]:
        """Return the samples of all rows; stored rows are joined by their columns, into an EncodedRow.

        Groups of two rows stay apart, also if they have the same key.

        Raises:
            BatchError: some of the stored rows have M-RoPE positions and some do not.
        """
        if len(rows) == 1:
            return rows[0]
        stored = [row for row in rows if isinstance(row, EncodedRow) and row._joined is None]
        if not rows or len(stored) < len(rows):
            return [sample for number, row in enumerate(rows) for sample in _apart(row, number)]
        return cls(
            ids=[ident for row in stored for ident in row.ids],
            cu_seqlens=cu_seqlens_from_lengths(np.concatenate([np.diff(row.cu_seqlens) for row in stored])),
            sources=[source for row in stored for source in row.sources],
            groups=_given([_keyed(key, n) for n, row in enumerate(stored) for key in row.groups or [None] * len(row)]),
            roles=_given([role for row in stored for role in row.roles or [None] * len(row)]),
            sample_labels=_given([label for row in stored for label in row.sample_labels or [None] * len(row)]),
            **joined_columns(stored),
        )

    @cached_property
    def _samples(self) -> Sequence[EncodedSample]:
        if self._joined is not None:
            return self._joined
        shared = {
            name: getattr(self, name)
            for name in ("image_token_id", "video_token_id", "audio_token_id", "needs", "dummy")
        }
        samples = []
        bounds = pairwise(self.cu_seqlens.tolist())
        for ident, source, (start, end) in zip(self.ids, self.sources, bounds, strict=True):
            sample = object.__new__(EncodedSample)  # a third of the time of the dataclass's __init__
            fields = vars(sample)
            fields.update(shared, id=ident, source=source)
            fields.update(input_ids=self.input_ids[start:end], labels=self.labels[start:end])
            if self.position_ids is not None:
                fields["position_ids"] = self.position_ids[:, start:end]
            if self.token_type_ids is not None:
                fields["token_type_ids"] = self.token_type_ids[start:end]
            if self.loss_weights is not None:
                fields["loss_weights"] = self.loss_weights[start:end]
            if self.columns is not None:
                fields["columns"] = cut_columns(self.columns, slice(start, end))
            samples.append(sample)
        for name, values in (("group", self.groups), ("role", self.roles), ("label", self.sample_labels)):
            for sample, value in zip(samples, values or (), strict=False):
                vars(sample)[name] = value
        return samples

    @property
    def num_images(self) -> list[int]:
        """Images of each sample."""
        return [0] * len(self) if self._joined is None else [sample.num_images for sample in self._joined]

    @property
    def num_videos(self) -> list[int]:
        """Video files of each sample, as `EncodedSample.num_videos`."""
        return [0] * len(self) if self._joined is None else [sample.num_videos for sample in self._joined]

    @property
    def num_audios(self) -> list[int]:
        """Audio files of each sample."""
        return [0] * len(self) if self._joined is None else [sample.num_audios for sample in self._joined]

    @property
    def pictured(self) -> Sequence[EncodedSample]:
        """All samples, if any of them has inputs of a vision tower or an audio encoder; else an empty tuple."""
        samples = self._joined or ()
        for sample in samples:
            # Loops over names would be several times slower, for every row of text.
            if not (sample.image_grid_thw is None and sample.pixel_values is None and sample.vision_inputs is None):
                return samples
            if not (sample.video_grid_thw is None and sample.pixel_values_videos is None):
                return samples
            if sample.audio_inputs is not None:
                return samples
        return ()

    def __len__(self) -> int:
        return len(self.ids)

    @overload
    def __getitem__(self, index: int) -> EncodedSample: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[EncodedSample]: ...

    def __getitem__(self, index: int | slice) -> EncodedSample | Sequence[EncodedSample]:
        return self._samples[index]

    def __iter__(self) -> Iterator[EncodedSample]:
        return iter(self._samples)  # Sequence.__iter__ would call `__getitem__` for each sample


def _given(values: list[Any]) -> list[Any] | None:
    """The values, or None if all of them are None."""
    return None if values.count(None) == len(values) else values


def _keyed(group: str | None, row: int) -> str | None:
    return None if group is None else f"{row}:{group}"


def _apart(row: Sequence[EncodedSample], number: int) -> Iterator[EncodedSample]:
    """Yield the samples of a row, with keys of groups that no other row has; samples of other types as they are."""
    for sample in row:
        group = getattr(sample, "group", None)
        yield sample if group is None else sample.in_group(_keyed(group, number), sample.role, sample.label)


def joined_columns(parts: Sequence[EncodedSample | EncodedRow]) -> dict[str, Any]:
    """Columns of a row, from the columns of its samples or of shorter rows.

    Raises:
        BatchError: some parts have M-RoPE positions and some do not.
    """
    positions = [part.position_ids for part in parts if part.position_ids is not None]
    if positions and len(positions) < len(parts):
        raise BatchError("some samples have M-RoPE positions and some do not; use one encoder for all")
    return {
        "input_ids": np.concatenate([part.input_ids for part in parts], dtype=np.int64),
        "labels": np.concatenate([part.labels for part in parts], dtype=np.int64),
        "position_ids": np.concatenate(positions, axis=1) if positions else None,
        # A sample without types has only text, which has type 0.
        "token_type_ids": join_values([(part.token_type_ids, len(part.input_ids)) for part in parts], np.int64(0)),
        "loss_weights": join_values([(part.loss_weights, len(part.input_ids)) for part in parts], np.float32(1)),
        "columns": join_columns([(part.columns, len(part.input_ids)) for part in parts]),
        "image_token_id": _first(part.image_token_id for part in parts),
        "video_token_id": _first(part.video_token_id for part in parts),
        "audio_token_id": _first(part.audio_token_id for part in parts),
        "needs": _first(part.needs for part in parts),
        "dummy": _first(part.dummy for part in parts),
    }
