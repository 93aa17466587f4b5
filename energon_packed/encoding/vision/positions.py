"""Media inside a sample: their tokens (ImageRun, MediaSize), their tensors (Pixels, VisionInputs), and positions.

`expanded` puts the tokens of each image into the ids of a sample. `VisionInputs.joined` joins the inputs of several
samples for a row, each argument along its own dimension:

    pixel_values   (images, 3, H, W)          joined along the images, padded to the largest H and W
    image_sizes    (images, 2)                joined along the images
    pixel_values   (1, tiles, 3, H, W)        joined along the tiles, as in a batch of a single row

`mrope_positions` computes a (t, h, w) triple per token, as in Qwen2-VL and its successors:

    tokens     A  B  [image 1 x 2 x 3 merged]  C
    t          0  1   2 2 2 2 2 2              5
    h          0  1   2 2 2 3 3 3              5
    w          0  1   2 3 4 2 3 4              5

Text positions increase by one in all three rows. An image starts at the current position in each row and spans its
grid; the text after it starts at start + max(height, width) of the merged grid. Source: P. Wang et al., "Qwen2-VL",
2024, section 2.1; tests compare with `get_rope_index` of Qwen2VLModel in Transformers.

A video spans its grid in time as well: t increases by one per step of the grid, or in Qwen2.5-VL by the tokens per
second of its model. The text after it starts at start + max(height, width) too, as in Transformers since 5.0.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from energon_packed.records import AudioClip, Conversation, FrameSelection

if TYPE_CHECKING:
    import torch

Int64 = npt.NDArray[np.int64]
UInt8 = npt.NDArray[np.uint8]
Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
NO_IMAGES: Int64 = np.zeros((0, 3), dtype=np.int64)
Place = tuple[slice, ...]
"""Slices of the tensor of a row that contain the tensor of a sample."""


@dataclass(frozen=True, slots=True, eq=False)
class MediaTokens:
    """Media of a sample among its tokens: what M-RoPE positions depend on beside the token ids.

    Attributes:
        image_token_id: token that represents image features.
        grids: int64 (images, 3), patches of each image in t, h and w before merging; or the tensor `ModelClass.grids`.
        video_token_id: token that represents video features; None without videos.
        video_grids: int64 (videos, 3), as `grids`.
        second_per_grid_ts: float64 (videos,), seconds of each step of the grid of a video, or None.
        audio_frames: int64 (audio files,), frames of features of each file; None without audio.
        has_tracks: whether tokens of videos contain the tokens of their audio tracks.
    """

    image_token_id: int
    grids: Int64 = field(default_factory=lambda: NO_IMAGES)
    video_token_id: int | None = None
    video_grids: Int64 = field(default_factory=lambda: NO_IMAGES)
    second_per_grid_ts: Float64 | None = None
    audio_frames: Int64 | None = None
    has_tracks: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class VisionInputs:
    """Arguments of the model for the images of one sample.

    Attributes:
        values: tensors by argument, as the family's processor returns them; it may leave out some of `dims`.
        dims: dimension along which each tensor is joined; all others are padded with zeros to the largest.
        images: number of images.
        videos: number of videos.
    """

    values: "dict[str, torch.Tensor]"
    dims: dict[str, int]
    images: int
    videos: int = 0

    @classmethod
    def joined(cls, parts: "Sequence[VisionInputs]") -> "tuple[dict[str, torch.Tensor], list[dict[str, Place]]]":
        """Join the arguments of the samples of a row.

        Returns:
            (arguments of the row, slices of each sample in them by argument).
        """
        rows: dict[str, torch.Tensor] = {}
        places: list[dict[str, Place]] = [{} for _ in parts]
        for name, dim in parts[0].dims.items():
            # Some processors return a tensor for images of some sizes only.
            having = [at for at, part in enumerate(parts) if name in part.values]
            if not having:
                continue
            tensors = [parts[at].values[name] for at in having]
            shape = [max(sizes) for sizes in zip(*(tensor.shape for tensor in tensors), strict=True)]
            shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
            rows[name] = tensors[0].new_zeros(shape)
            start = 0
            for tensor, place in zip(tensors, [places[at] for at in having], strict=True):
                slices = [slice(0, size) for size in tensor.shape]
                slices[dim] = slice(start, start := start + tensor.shape[dim])
                place[name] = tuple(slices)
                rows[name][place[name]] = tensor
        return rows, places


class Clip(NamedTuple):
    """A video with its decoded frames.

    Attributes:
        frames: the selection.
        pixels: RGB, uint8 (frames, height, width, 3).
    """

    frames: FrameSelection
    pixels: UInt8


@dataclass(frozen=True, slots=True)
class ModelNeeds:
    """What a model needs of a row with images, besides positions and boundaries.

    Attributes:
        types: name of its argument for the types of tokens, such as `token_type_ids`; None without such an argument.
        one_sample: whether it is wrong for rows of several samples with images.
        one_audio: whether it is wrong for rows of several samples with audio.
    """

    types: str | None = None
    one_sample: bool = False
    one_audio: bool = False


@dataclass(frozen=True, slots=True)
class ImageRun:
    """The tokens of an image or of a video.

    Attributes:
        length: number of tokens.
        make: returns their ids, int64 (length,); None if all are the family's image token, or its video token. A
            function, because the planner needs only lengths, and the ids of some families cost a call of their
            processor.
        is_video: they are the tokens of a video.
        edges: plain text before and after them, if it depends on the image or video; part of the text of the
            conversation, as a tokenizer may merge it with the text around.
    """

    length: int
    make: Callable[[], Int64] | None = None
    is_video: bool = False
    edges: tuple[str, str] = ("", "")

    def features(self, token: int | None) -> int:
        """Number of image tokens or video tokens among them, which the features of the vision tower replace."""
        return self.length if self.make is None else int((self.make() == token).sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioSize:
    """Audio files of a conversation as the planner needs them.

    Attributes:
        runs: tokens of each file, in the order of the text.
        tracks: number of tokens of the audio track of each video by its index, for all videos or none.
        clips: the samples of each file.
        track_clips: the samples of each of `tracks`.
        num_bytes: bytes of the files, as `stored_bytes`.
        notes: what was decided for them, for the counts of a run.
        inputs: arguments of the model; None if they were only measured.
    """

    runs: Sequence[ImageRun] = ()
    tracks: Mapping[int, int] = field(default_factory=dict)
    clips: Sequence[AudioClip] = ()
    track_clips: Sequence[AudioClip] = ()
    num_bytes: int = 0
    notes: tuple[str, ...] = ()
    inputs: VisionInputs | None = None

    @property
    def frames(self) -> Int64 | None:
        """Frames of features of each file, int64 (files,), by the mask of Omni models; None without it."""
        mask = None if self.inputs is None else self.inputs.values.get("feature_attention_mask")
        return None if mask is None else mask.sum(-1).numpy().astype(np.int64)


_SILENT = AudioSize()


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaSize:
    """Media of a conversation as the planner needs them.

    Attributes:
        runs: tokens of each image and video, in the order of the text.
        num_bytes: bytes of its images, videos and .npy files.
        decoded: number of images whose pixels were decoded, because the header is not enough.
        frames: the selected frames of each video file.
        notes: what was decided for its images and videos, for the counts of a run.
        spelled: the conversation to render in place of the measured one, with timestamps, and with the coordinates
            that the family writes; None if it has none.
        audio: its audio files.
    """

    runs: Sequence[ImageRun] = ()
    num_bytes: int = 0
    decoded: int = 0
    frames: Sequence[FrameSelection] = ()
    notes: tuple[str, ...] = ()
    spelled: Conversation | None = None
    audio: AudioSize = _SILENT


@dataclass(frozen=True, slots=True, kw_only=True)
class Pixels(MediaSize):
    """Pixels of the images and videos of a conversation, with their tokens; bytes and counts are not computed.

    Attributes:
        values: float32 (patches, patch_dim) tensor, or None without images.
        grids_tensor: int64 (images, 3) tensor, patches in t, h and w.
        grids: the same as an array.
        inputs: arguments that replace values and grids in some families, or None.
        video_values: as `values`, of the videos of families with a video token.
        video_grids: int64 (videos, 3) tensor, patches in t, h and w, or None.
        second_per_grid_ts: float64 (videos,), seconds of each step of a grid in time, or None.
    """

    values: Any = None
    grids_tensor: Any = None
    grids: Int64 = field(default_factory=lambda: NO_IMAGES)
    inputs: VisionInputs | None = None
    video_values: Any = None
    video_grids: Any = None
    second_per_grid_ts: Float64 | None = None

    @classmethod
    def joined(cls, parts: "Sequence[Pixels]") -> "Pixels":
        """Join the pixels of images, of a family without `inputs`."""
        import torch

        return cls(
            values=torch.cat([part.values for part in parts]),
            grids_tensor=torch.cat([part.grids_tensor for part in parts]),
            grids=np.concatenate([part.grids for part in parts]),
            runs=[run for part in parts for run in part.runs],
        )

    @property
    def patches(self) -> list[int]:
        """Patches of each image."""
        return [int(count) for count in self.grids.prod(axis=1)]


def expanded(ids: Int64, labels: Int64, tokens: Sequence[int | None], runs: Sequence[ImageRun]) -> tuple[Int64, Int64]:
    """Replace each image token and video token by the tokens of its image or video.

    Args:
        ids: int64 (n,), with one of `tokens` for each run.
        labels: int64 (n,), -100 at these tokens.
        tokens: tokens that represent image features and video features; None for a token that the family lacks.
        runs: tokens of each image and video, in the order of the text.

    Returns:
        (ids, labels), int64 (L,) each.
    """
    repeats = np.ones(len(ids), dtype=np.int64)
    at = np.flatnonzero(np.isin(ids, [token for token in tokens if token is not None]))
    repeats[at] = lengths = [run.length for run in runs]
    ends = np.cumsum(repeats)[at]
    ids, labels = np.repeat(ids, repeats), np.repeat(labels, repeats)
    for run, end, length in zip(runs, ends.tolist(), lengths, strict=True):
        if run.make is not None:
            ids[end - length : end] = run.make()
    return ids, labels


def mrope_positions(input_ids: Int64, media: MediaTokens, merge_size: int, time_steps: Float32 | None = None) -> Int64:
    """Compute the M-RoPE positions of a sample.

    Args:
        input_ids: int64 (L,).
        media: images and videos of the sample.
        merge_size: patches merged along each side into one token.
        time_steps: float32 (videos,), positions in t from one step of the grid to the next, rounded down; None for 1.

    Returns:
        int64 (3, L): rows t, h, w.

    Raises:
        ValueError: the number of image or video tokens does not match the grids.
    """
    places = [(*place, 1.0) for place in _places(input_ids, media.image_token_id, media.grids, merge_size, "image")]
    if media.video_token_id is not None:
        steps = np.ones(len(media.video_grids), dtype=np.float32) if time_steps is None else time_steps
        videos = _places(input_ids, media.video_token_id, media.video_grids, merge_size, "video")
        places += [(*place, step) for place, step in zip(videos, steps, strict=True)]
        places.sort(key=lambda place: place[0])
    positions = np.empty((3, len(input_ids)), dtype=np.int64)
    done = 0  # tokens with a position so far
    position = 0  # of the next token
    for start, (t, h, w), step in places:
        text = start - done
        positions[:, done:start] = position + np.arange(text)
        position += text
        done = start + t * h * w
        steps_in_time, rows, columns = np.indices((t, h, w)).reshape(3, -1)
        if step != 1:
            steps_in_time = (steps_in_time.astype(np.float32) * step).astype(np.int64)
        positions[:, start:done] = position + np.stack([steps_in_time, rows, columns])
        position += max(h, w)
    positions[:, done:] = position + np.arange(len(input_ids) - done)
    return positions


def _places(
    input_ids: Int64, token: int, grids: Int64, merge_size: int, kind: str
) -> list[tuple[int, tuple[int, int, int]]]:
    """First token and merged grid of each image or video."""
    merged = grids // np.array([1, merge_size, merge_size])
    counts = merged.prod(axis=1)
    at = np.flatnonzero(input_ids == token)
    if len(at) != counts.sum():
        raise ValueError(f"`input_ids` has {len(at)} {kind} tokens, but `grids` require {counts.sum()}")
    # Tokens of image i follow the tokens of the images before it; text may be between images, not inside them.
    starts = at[(np.cumsum(counts) - counts)]
    return list(zip(starts.tolist(), map(tuple, merged.tolist()), strict=True))
