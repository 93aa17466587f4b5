"""VisionFamily: image and video preprocessing of a model: sizes -> token counts, RGB images -> pixels and positions.

The built-in families are at the end. To add a family, register a small class with its configuration names and its
differences from the base class:

    @register_vision
    class MyVision(VisionFamily):
        names = ("myvl",)
        patch_size = 16
"""

import copy
import json
import sys
from abc import ABC
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from energon_packed.encoding.vision.positions import ImageRun, MediaTokens, ModelNeeds, Pixels, mrope_positions
from energon_packed.encoding.vision.video_file import MAX_FRAME_PIXELS
from energon_packed.encoding.vision.video_sampling import (
    FRAME_SETTINGS,
    PIXEL_SETTINGS,
    FramePatches,
    VideoSettings,
    arange_indices,
    duration_indices,
    enlarged,
    frame_limit,
    linspace_indices,
    resized_pixels,
    resized_size,
    rounded_size,
    uniform_indices,
)
from energon_packed.errors import ConfigError, Reason, RecordError
from energon_packed.records import IMAGE_PLACEHOLDER, Conversation, FrameSelection
from energon_packed.records.media.reference import IMAGE_SETTINGS

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from PIL import Image

    from energon_packed.encoding.vision.video_file import VideoInfo

Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]
UInt8 = npt.NDArray[np.uint8]
PatchOrder = Literal["auto", "row", "block"]


class BoxFormat(NamedTuple):
    """Text of the names and boxes of `objects` in a conversation.

    Attributes:
        ref: text of a name, which replaces `{}`.
        box: text of a box, whose points `(x,y)`, separated by commas, replace `{}`.
        scale: coordinate of the right and lower edge of an image; None for pixels of the resized image.
    """

    ref: str
    box: str
    scale: int | None

    def of_box(self, box: Sequence[int]) -> str:
        """Return the text of a box of (x, y) or (x, y, x, y)."""
        return self.box.format(",".join([f"({x},{y})" for x, y in zip(box[::2], box[1::2], strict=True)]))


class VisionFamily(ABC):
    """Image preprocessing of a model family, based on a Transformers image processor such as Qwen2VLImageProcessor.

    Attributes:
        names: model types of this family, in lower case without punctuation; with `Processor` or `ImageProcessor`
            behind, names of its processors. The most specific name of a folder must be one of them.
        image_token: token whose run represents an image.
        placeholder: text of an image in a conversation, with a single `image_token`.
        reserved: tokens that text must not contain.
        needs: what the model needs of a row with images, or None.
        takes_patch_positions: whether the vision tower uses patch positions; otherwise they are only validated.
        adjacent_images: whether the positions of two images, or two videos, without a token between them are right.
        gap: pattern of text after an image that gets a space in front; "" for none.
        takes_clips: `preprocess` gets videos with all their frames, as `Clip`, among the images of a sample.
        writes_timestamps: whether `fps` of a record with images becomes timestamps in its text.
        patch_size, default_merge, temporal_patch_size, image_mean, image_std, min_pixels, max_pixels: used if there is
            no processor folder; limits as in the preprocessor_config.json of the published models.
        layouts: (patch size, merge size) of the published models of this family; `factor` selects among them.
        ambiguous_layouts: pairs (patch size, merge size) that `factor` may mean, if there are several: lengths are
            the same for all of them, pixels are not, so an error is raised when pixels are needed.
        patch_order: order of patches in .npy files: `row`, `block`, or `auto` (by the content of the file).
        boxes: text of names and boxes of records; None if no trainer defines it, so that such records are rejected.
        image_options: names of the settings of an image that records can set, of `IMAGE_SETTINGS`. A family that has
            them returns pixels along the images, which do not depend on each other.
        places_audio: whether `position_ids` places the audio of a sample.
        video_token: token whose run represents a video file; None if its frames are images of the family.
        video_placeholder: text of a video in a conversation, with a single `video_token`.
        videos: settings that select and resize the frames of video files; by default as in the published models.
        video_options: names of the settings of `videos` that users and records can set.
        video_normalization: (mean, standard deviation, rescale factor) of frames if images have other values.
        video_problem: reason why the settings of the processor folder cannot be used for videos, or "".
        warnings: decisions made while it was loaded, for the user.
        infos: effects of sizes and limits that the user set, for a verbose run.

    Examples:
        >>> patches = encoder.vision.num_patches(height=448, width=448)
        >>> patches, encoder.vision.num_tokens(patches)
        (1024, 256)
    """

    names: ClassVar[tuple[str, ...]]
    image_token: ClassVar[str] = "<|image_pad|>"
    placeholder: ClassVar[str] = "<|vision_start|><|image_pad|><|vision_end|>"
    reserved: ClassVar[tuple[str, ...]] = ("<|image_pad|>", "<|video_pad|>")
    needs: ModelNeeds | None = None
    takes_patch_positions: ClassVar[bool] = False
    adjacent_images: bool = True
    gap: str = ""
    takes_clips: bool = False
    places_audio: bool = False
    writes_timestamps: ClassVar[bool] = False
    patch_size: ClassVar[int] = 14
    default_merge: ClassVar[int] = 2
    temporal_patch_size: ClassVar[int] = 2
    layouts: ClassVar[tuple[tuple[int, int], ...]] = ((14, 2), (16, 2))
    image_mean: ClassVar[tuple[float, float, float]] = (0.48145466, 0.4578275, 0.40821073)  # CLIP
    image_std: ClassVar[tuple[float, float, float]] = (0.26862954, 0.26130258, 0.27577711)
    min_pixels: ClassVar[int] = 56 * 56
    max_pixels: ClassVar[int] = 28 * 28 * 16384
    ambiguous_layouts: tuple[tuple[int, int], ...] = ()
    patch_order: PatchOrder = "auto"
    boxes: ClassVar[BoxFormat | None] = None
    image_options: ClassVar[tuple[str, ...]] = ()
    video_token: ClassVar[str | None] = None
    video_placeholder: ClassVar[str] = ""
    # Without a video processor, there is nothing to be equal to: a frame per second, as many as LLaVA-OneVision has.
    videos: VideoSettings = VideoSettings(fps=1.0, max_frames=32)
    video_options: ClassVar[tuple[str, ...]] = FRAME_SETTINGS
    video_normalization: tuple[tuple[float, ...], tuple[float, ...], float] | None = None
    video_problem: str = ""
    warnings: tuple[str, ...] = ()
    infos: tuple[str, ...] = ()

    def __init__(self, image_processor: Any) -> None:
        self.image_processor = image_processor
        self.merge_size = int(image_processor.merge_size)

    @property
    def name(self) -> str:
        """Name in messages."""
        return type(self).__name__

    @cached_property
    def template_token(self) -> str:
        """Text that a chat template writes for a content part of type `image`; a family can set another text."""
        return self.placeholder

    @classmethod
    def from_folder(cls, folder: "Path") -> "VisionFamily | None":
        """Load the family from a processor folder; overridden if its image processor differs from Qwen2-VL's.

        A family that overrides it has no `factor`, `patch_size`, `merge_size`, `min_pixels` and `max_pixels`.

        Returns:
            The family; None (the default) to load AutoImageProcessor with these options.
        """
        return None

    def num_patches(self, height: int, width: int) -> int:
        """Number of patches of an image of `height` x `width` pixels, before merging.

        Raises:
            RecordError: `corrupt_image`, for a size that the image processor rejects.
        """
        try:
            return int(self.image_processor.get_number_of_image_patches(height, width, {}))
        except ValueError as error:
            raise RecordError(Reason.CORRUPT_IMAGE, f"{width}x{height} pixels: {error}") from error

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Patches of an image of `height` x `width` pixels along each side, (in height, in width)."""
        processor, side = self.image_processor, int(self.image_processor.patch_size)
        # The function of the installed processor, so that the grid equals the grid of the processor.
        resized = sys.modules[type(processor).__module__].smart_resize(
            height,
            width,
            factor=side * self.merge_size,
            min_pixels=processor.size["shortest_edge"],
            max_pixels=processor.size["longest_edge"],
        )
        return resized[0] // side, resized[1] // side

    def with_settings(self, settings: Mapping[str, int]) -> tuple["VisionFamily", tuple[int, int] | None]:
        """Return the family with the limits of an image that has its own settings.

        Args:
            settings: settings of the record for the image, by the names of `IMAGE_SETTINGS`.

        Returns:
            (family, (height, width) to which the image is resized first, or None).

        Raises:
            RecordError: `unsupported_field`, if the family does not have a setting, or if the limits are invalid.
        """
        if not_used := [name for name in settings if name not in self.image_options]:
            detail = f"{self.name} has no setting `{not_used[0]}` for an image. Remove it"
            raise RecordError(Reason.UNSUPPORTED_FIELD, detail)
        size, resized = self.image_processor.size, None
        least = settings.get("min_pixels", int(size["shortest_edge"]))
        most = settings.get("max_pixels", int(size["longest_edge"]))
        if "resized_height" in settings:
            side = int(self.image_processor.patch_size)
            try:
                high, wide = self.grid(settings["resized_height"], settings["resized_width"])
            except ValueError as error:
                raise RecordError(Reason.UNSUPPORTED_FIELD, f"resized_height and resized_width: {error}") from error
            resized = high * side, wide * side
            least = most = resized[0] * resized[1]  # the processor leaves an image of this size as it is
        if least > most:
            detail = f"min_pixels of an image must be at most max_pixels {most}, got {least}. Set both for the image"
            raise RecordError(Reason.UNSUPPORTED_FIELD, detail)
        if least > MAX_FRAME_PIXELS:  # memory for the resized image
            detail = f"min_pixels of an image must be at most {MAX_FRAME_PIXELS:,}, got {least:,}. Lower it"
            raise RecordError(Reason.UNSUPPORTED_FIELD, detail)
        limited, processor = copy.copy(self), copy.copy(self.image_processor)
        processor.size = type(size)(shortest_edge=least, longest_edge=most)
        limited.image_processor = processor
        return limited, resized

    def num_tokens(self, patches: int) -> int:
        """Number of tokens of an image with this many patches."""
        return patches // self.merge_size**2

    def pixels(self, images: "list[Image.Image]") -> "tuple[torch.Tensor, torch.Tensor]":
        """Return pixel_values, float32 (patches, patch_dim), and image_grid_thw, int64 (images, 3), of RGB images.

        Calls the installed image processor. A family that overrides this method uses its own pixels everywhere.
        """
        out = self.image_processor(images=images, return_tensors="pt")
        return out["pixel_values"], out["image_grid_thw"]

    def image_token_run(self, height: int, width: int) -> ImageRun:
        """Tokens of an image of `height` x `width` pixels. Raises the errors of `num_patches`."""
        return ImageRun(self.num_tokens(self.num_patches(height, width)))

    def numbered(self, runs: list[ImageRun]) -> list[ImageRun]:
        """Return the tokens of the images of a sample, in the order of the text; some families write their indices."""
        return runs

    def preprocess(self, images: "Iterable[Any]") -> Pixels:
        """Return pixels and tokens of all images of a sample, RGB images, and with `takes_clips` of its videos."""
        return self._with_runs(*self.pixels(list(images)))

    def smallest(self) -> Pixels:
        """Return `preprocess` of a grey image of a single token, whatever the limits of the processor.

        A family with its own `pixels` returns the pixels and tokens of a black image of 64 x 64 pixels.
        """
        import torch
        from PIL import Image

        values, grids = self.pixels([Image.new("RGB", (64, 64))])
        if type(self).pixels is VisionFamily.pixels:
            # The processor would resize to at least `min_pixels`; dtype and patch_dim of its result are right.
            m = self.merge_size
            values = values.new_zeros((m * m, *values.shape[1:]))
            grids = torch.tensor([[1, m, m]], dtype=torch.int64)
        return self._with_runs(values, grids)

    def _with_runs(self, values: "torch.Tensor", grids: "torch.Tensor") -> Pixels:
        array = grids.numpy().astype(np.int64)
        runs = [ImageRun(self.num_tokens(int(n))) for n in array.prod(axis=1)]
        return Pixels(values=values, grids_tensor=grids, grids=array, runs=runs)

    def set_model(self, vision_config: Mapping[str, Any]) -> None:  # noqa: B027 - by default none are used
        """Set the values of the model that positions depend on, from `vision_config` of its config.json."""

    def set_videos(self, folder: Mapping[str, Any] | None, options: Mapping[str, Any]) -> None:
        """Set `videos` from the settings of a processor folder and explicit options.

        Args:
            folder: settings of the video processor in a folder; None if it has none.
            options: values by the names of `VideoSettings`; they win over the folder.

        Raises:
            ConfigError: an invalid value, or an option that the family does not have.
        """
        try:
            videos = self.folder_videos(folder) if folder is not None else type(self).videos
        except ConfigError:
            raise
        except (TypeError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"the processor folder has invalid settings of videos: {error}. Correct them."
            ) from error
        if not_used := [name for name in options if name not in self.video_options]:
            option = not_used[0] if not_used[0] == "total_pixels" else f"video_{not_used[0]}"
            raise ConfigError(
                f"`{option}` must not be set for {self.name}, whose frames are images. "
                "Set `min_pixels` and `max_pixels`."
            )
        self.videos = videos.updated(options)

    def folder_videos(self, folder: Mapping[str, Any]) -> VideoSettings:
        """Settings of videos from the video processor in a folder; the default ignores the folder."""
        return type(self).videos

    def select_frames(self, info: "VideoInfo", settings: Mapping[str, Any] | None = None) -> FrameSelection:
        """Select the frames of a video file that a sample has.

        Args:
            info: the file.
            settings: settings of the record, by the names of `VideoSettings`; they win over `videos`.

        Raises:
            RecordError: `unsupported_video`, if the family cannot use a video of this length, size or these times;
                `unsupported_field`, for settings of the record that are invalid or that the family does not have.
            ConfigError: the settings of the processor folder cannot be used for videos.
        """
        if self.video_problem:
            raise ConfigError(self.video_problem)
        settings = settings or {}
        if not_used := [name for name in settings if name not in self.video_options]:
            detail = f"{self.name} has no setting `{not_used[0]}` for a video. Remove it"
            raise RecordError(Reason.UNSUPPORTED_FIELD, detail)
        try:
            resolved = self.videos.updated(settings)
        except ConfigError as error:
            raise RecordError(Reason.UNSUPPORTED_FIELD, f"video settings: {error}") from error
        try:
            indices = self.frame_indices(info.num_frames, info.fps, resolved)
            resized = self.resized_frame(len(indices), info.height, info.width, resolved)
            if resized is not None and resized[0] * resized[1] > MAX_FRAME_PIXELS:
                detail = f"frames resized to {resized[1]}x{resized[0]} have more than {MAX_FRAME_PIXELS:,} pixels"
                raise ValueError(f"{detail}. Lower `min_pixels` or `max_pixels` of the video")
        except ConfigError:
            raise
        except ValueError as error:
            raise RecordError(Reason.UNSUPPORTED_VIDEO, str(error)) from error
        times = np.asarray(info.timestamps, dtype=np.float64)
        before = np.maximum(indices - 1, 0)
        is_second = info.by_time & (indices > 0) & (times[indices] == times[before]) & ~np.isin(before, indices)
        if is_second.any():  # the decoder would return the frame before it
            index = indices[is_second][0]
            detail = f"frames {index - 1} and {index} have the same time, {times[index]:.3f} s"
            raise RecordError(Reason.UNSUPPORTED_VIDEO, f"{detail}. Convert the video to a constant frame rate")
        return replace(info.selection(indices), resized=resized, settings=resolved.plain())

    def media_problem(self, conversation: Conversation) -> str:
        """Reason why the media of a conversation cannot be in the same sample, or ""."""
        return ""

    def check_selection(self, frames: FrameSelection) -> None:
        """Check that stored frames have a size that this family can use.

        Raises:
            RecordError: `unsupported_media`, if they were selected for a family that resizes frames in another way.
        """
        is_resized = type(self).resized_frame is not VisionFamily.resized_frame
        if is_resized and frames.resized is not None:
            factor = int(self.image_processor.patch_size) * self.merge_size
            if not any(side % factor for side in frames.resized):
                return
        elif not is_resized and frames.resized is None:
            return
        size = "not resized" if frames.resized is None else f"resized to {frames.resized[1]}x{frames.resized[0]}"
        detail = f"the stored frames of a video are {size}, which {self.name} cannot use"
        raise RecordError(Reason.UNSUPPORTED_MEDIA, f"{detail}; pack the original video files with its processor")

    def frame_indices(self, num_frames: int, fps: float, settings: VideoSettings) -> Int64:
        """Indices of the selected frames, int64 (frames,), of a file with `num_frames` at `fps` frames per second.

        Raises:
            ValueError: the family cannot use a video of this length.
        """
        return uniform_indices(num_frames, fps, settings)

    def resized_frame(self, frames: int, height: int, width: int, settings: VideoSettings) -> tuple[int, int] | None:
        """(height, width) to which `frames` selected frames are resized; None if they are preprocessed as images.

        Raises:
            ValueError: the family cannot use frames of this size.
        """
        return None

    def frames_text(self, frames: FrameSelection) -> str:
        """Text of a video in a family without a video token, with an image placeholder for each selected frame."""
        return IMAGE_PLACEHOLDER * len(frames.indices)

    def video_grid(self, frames: FrameSelection) -> tuple[int, int, int]:
        """Patches of a video in time, height and width."""
        assert frames.resized is not None, "families with a video token resize videos"
        side = int(self.image_processor.patch_size)
        steps = -(-len(frames.indices) // int(self.image_processor.temporal_patch_size))
        return steps, frames.resized[0] // side, frames.resized[1] // side

    def video_token_run(self, frames: FrameSelection) -> ImageRun:
        """Tokens of a video, which replace its single `video_token`."""
        return ImageRun(self.num_tokens(int(np.prod(self.video_grid(frames)))))

    def preprocess_video(
        self, frames: FrameSelection, images: Iterable[UInt8]
    ) -> "tuple[torch.Tensor, tuple[int, int, int]]":
        """Resize and normalize the selected frames, one at a time.

        Args:
            frames: the selection.
            images: its frames in order, upright RGB, uint8 (height, width, 3).

        Returns:
            (pixel_values_videos, float32 (patches, patch_dim), patches in time, height and width).

        Raises:
            ValueError: `images` yields fewer or more frames.
        """
        assert frames.resized is not None, "families with a video token resize videos"
        mean, std, rescale_factor = self._normalization
        patches = FramePatches(
            len(frames.indices),
            frames.resized,
            patch_size=int(self.image_processor.patch_size),
            merge_size=self.merge_size,
            temporal_patch_size=int(self.image_processor.temporal_patch_size),
            mean=mean,
            std=std,
            rescale_factor=rescale_factor,
        )
        for image in images:
            patches.add(image)
        return patches.values(), patches.grid

    @property
    def _normalization(self) -> tuple[tuple[float, ...], tuple[float, ...], float]:
        """Mean, standard deviation and rescale factor of the frames of videos."""
        if self.video_normalization is not None:
            return self.video_normalization
        processor = self.image_processor
        return tuple(processor.image_mean), tuple(processor.image_std), float(processor.rescale_factor)

    def second_per_grid_ts(self, frames: Sequence[FrameSelection]) -> Float64 | None:
        """Seconds of each step of the grid of each video, float64 (videos,); None for models that do not use it."""
        return None

    def position_ids(self, input_ids: Int64, media: MediaTokens) -> Int64 | None:
        """M-RoPE positions of a sample, int64 (axes, L), usually 3 axes, or None for models that use 0..L-1.

        Args:
            input_ids: int64 (L,).
            media: images, videos and audio of the sample.
        """
        return None

    def token_type_ids(self, input_ids: Int64) -> Int64 | None:
        """Types of the tokens of a sample, int64 (L,), for a model with an argument for them; else None."""
        return None

    def frame_image(self, frames: FrameSelection, pixels: UInt8) -> "Image.Image":
        """Return a frame of a video as the image that `preprocess` gets, in a family without a video token.

        Args:
            frames: the selection.
            pixels: the frame, upright RGB, uint8 (height, width, 3).
        """
        from PIL import Image

        return Image.fromarray(pixels)

    def patch_positions(self, grids: Int64, times: Int64 | None = None) -> Int64 | None:
        """Patch positions, int64 (patches, 3) as (t, h, w), or None for vision towers without them.

        Args:
            grids: int64 (images, 3), patches in t, h and w.
            times: int64 (images,), t of the first frame of each image; None for 0.
        """
        return None

    def check_tokenizer(self, tokenizer: Any) -> None:
        """Check that a tokenizer writes images as this family expects.

        Args:
            tokenizer: `tokenizers.Tokenizer`.

        Raises:
            ConfigError: it has no `image_token`, or produces other tokens for an image.
        """
        if tokenizer.token_to_id(self.image_token) is None:
            raise ConfigError(
                f"the tokenizer has no {self.image_token} token, which {self.name} needs; "
                "use the tokenizer of the vision model"
            )

    def config(self) -> dict[str, Any]:
        """Settings that determine lengths and pixels, for fingerprints; only lengths if `ambiguous_layouts`."""
        if self.ambiguous_layouts:
            return self.length_config()
        return {
            "family": type(self).__name__,
            "image_processor": json.loads(self.image_processor.to_json_string()),
            "patch_order": self.patch_order,
        }

    def video_config(self) -> dict[str, Any]:
        """Settings of videos that differ from the published models, for fingerprints; {} if none does."""
        own, published = asdict(self.videos), asdict(type(self).videos)
        config: dict[str, Any] = {name: value for name, value in own.items() if value != published[name]}
        if self.video_normalization is not None:
            config["normalization"] = self.video_normalization
        return config

    def length_config(self) -> dict[str, Any]:
        """Settings that determine lengths: the same for all patch and merge sizes with the same `factor`."""
        processor = self.image_processor
        return {
            "factor": int(processor.patch_size) * self.merge_size,
            "limits": [int(processor.size[name]) for name in ("shortest_edge", "longest_edge")],
            "placeholder": self.placeholder,
            "image_token": self.image_token,
        }

    def check_decided(self) -> None:
        """Raise an error if `factor` has several meanings, before pixels are computed.

        Raises:
            ConfigError: the message lists the candidates.
        """
        if self.ambiguous_layouts:
            raise ConfigError(
                f"`factor` {ambiguous(self.ambiguous_layouts)}, and pixels and patch positions depend on it; pass "
                "`patch_size`, `merge_size` or `vision_family`, or the processor folder of the model as `processor`"
            )


# As ms-swift writes them, unless its QWENVL_BBOX_FORMAT is set.
_QWEN_BOXES = BoxFormat("<|object_ref_start|>{}<|object_ref_end|>", "<|box_start|>{}<|box_end|>", scale=1000)
_FAMILIES: list[type[VisionFamily]] = []


def ambiguous(layouts: tuple[tuple[int, int], ...]) -> str:
    """Text such as `48 is 16 x 3 or 24 x 2 (patch size x merge size)`, for messages."""
    products = " or ".join(f"{patch} x {merge}" for patch, merge in layouts)
    return f"{layouts[0][0] * layouts[0][1]} is {products} (patch size x merge size)"


def register_vision(family: type[VisionFamily]) -> type[VisionFamily]:
    """Register a family under its names (class decorator)."""
    _FAMILIES.append(family)
    return family


@register_vision
class Qwen2VLVision(VisionFamily):
    """Qwen2-VL: 14-pixel patches, 2 x 2 merged, M-RoPE, and videos in temporal patches of two frames.

    Frames of video files are selected as `Qwen2VLVideoProcessor(do_sample_frames=True, fps=2)` does, and limited in
    size as with `cap_pixels_per_frame=True`: these are the limits of qwen_vl_utils, with which the published models
    were trained and are evaluated. The processor itself selects all frames by default.
    """

    names: ClassVar[tuple[str, ...]] = ("qwen2vl",)
    boxes = _QWEN_BOXES
    image_options = IMAGE_SETTINGS
    video_token = "<|video_pad|>"
    video_placeholder = "<|vision_start|><|video_pad|><|vision_end|>"
    video_options: ClassVar[tuple[str, ...]] = (*FRAME_SETTINGS, *PIXEL_SETTINGS)
    videos = VideoSettings(
        fps=2.0,
        min_frames=4,
        max_frames=768,
        min_pixels=128 * 28 * 28,
        max_pixels=768 * 28 * 28,
        total_pixels=int(128_000 * 28 * 28 * 0.9),
    )
    _text_tokenizer: Any = None

    def folder_videos(self, folder: Mapping[str, Any]) -> VideoSettings:
        """Settings of videos from the video processor in a folder, with the defaults of the processor.

        Raises:
            ConfigError: an invalid value.
        """
        published, processor = type(self).videos, self.image_processor
        expected = {"do_resize": True, "do_rescale": True, "do_normalize": True, "resample": 3}  # 3: bicubic
        expected |= {name: getattr(processor, name) for name in ("patch_size", "merge_size", "temporal_patch_size")}
        for name, value in expected.items():
            if folder.get(name, value) != value:
                self.video_problem = (
                    f"`{name}` of the video processor must be {value} for {self.name}, got {folder[name]}. "
                    "Correct the processor folder."
                )
        images = tuple(processor.image_mean), tuple(processor.image_std), float(processor.rescale_factor)
        own = tuple(folder.get("image_mean") or images[0]), tuple(folder.get("image_std") or images[1])
        normalization = (*own, float(folder.get("rescale_factor") or images[2]))
        self.video_normalization = None if normalization == images else normalization
        frames = {name: folder[name] for name in FRAME_SETTINGS if folder.get(name) is not None}
        size = {name: value for name, value in (folder.get("size") or {}).items() if value is not None}
        for name, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
            if folder.get(name) is not None:  # the processors of Qwen2-VL prefer it
                size[edge] = folder[name]
        return replace(published.updated(frames), **self._limits(size, folder))

    def _limits(self, size: Mapping[str, Any], folder: Mapping[str, Any]) -> dict[str, Any]:
        """Limits in pixels by the names of `VideoSettings`, from `size` of the video processor in a folder."""
        published = type(self).videos
        total = int(folder.get("max_video_tokens", 128_000) * self._factor**2 * 0.9)
        return {
            "min_pixels": size.get("shortest_edge", published.min_pixels),
            "max_pixels": size.get("longest_edge", published.max_pixels),
            "total_pixels": total if folder.get("cap_pixels_per_frame") else None,
        }

    def frame_indices(self, num_frames: int, fps: float, settings: VideoSettings) -> Int64:
        """Indices of the selected frames, int64 (frames,)."""
        return arange_indices(num_frames, fps, settings, int(self.image_processor.temporal_patch_size))

    def resized_frame(self, frames: int, height: int, width: int, settings: VideoSettings) -> tuple[int, int]:
        """(height, width) of the resized frames, as Qwen2VLVideoProcessor.resize computes it."""
        least, most = settings.min_pixels or 1, settings.max_pixels or sys.maxsize
        if settings.total_pixels is not None:
            share = settings.total_pixels * int(self.image_processor.temporal_patch_size) // frames
            most = frame_limit(share, least, most)
        return resized_size(height, width, self._factor, min_pixels=least, max_pixels=most)

    @property
    def _factor(self) -> int:
        return int(self.image_processor.patch_size) * self.merge_size

    def check_tokenizer(self, tokenizer: Any) -> None:
        """Check that the tokenizer has the image token; videos need the video token as well."""
        super().check_tokenizer(tokenizer)
        self._text_tokenizer = tokenizer

    def video_token_run(self, frames: FrameSelection) -> ImageRun:
        """Tokens of a video.

        Raises:
            ConfigError: the tokenizer has no `video_token`.
        """
        if self._text_tokenizer is not None and self._text_tokenizer.token_to_id(self.video_token) is None:
            raise ConfigError(
                f"the tokenizer has no {self.video_token} token, which videos need. "
                "Use the tokenizer of the vision model."
            )
        return super().video_token_run(frames)

    def position_ids(self, input_ids: Int64, media: MediaTokens) -> Int64:
        """M-RoPE positions, int64 (3, L); for text, all three rows increase by one."""
        return mrope_positions(input_ids, media, self.merge_size)


@register_vision
class Qwen25VLVision(Qwen2VLVision):
    """Qwen2.5-VL: as Qwen2-VL, with the seconds of a video in its M-RoPE positions.

    Attributes:
        tokens_per_second: positions in time per second of video; `vision_config` of config.json.
    """

    names = ("qwen25vl",)
    boxes = _QWEN_BOXES._replace(scale=None)
    tokens_per_second: float = 2

    def set_model(self, vision_config: Mapping[str, Any]) -> None:
        """Set `tokens_per_second`; 4 by default, as in Transformers."""
        self.tokens_per_second = vision_config.get("tokens_per_second", 4)

    def second_per_grid_ts(self, frames: Sequence[FrameSelection]) -> Float64:
        """Seconds of each step of the grid of each video, float64 (videos,), as Qwen2_5_VLProcessor computes them."""
        size = int(self.image_processor.temporal_patch_size)
        # In the order of operations of VideoMetadata.sampled_fps.
        rates = [len(video.indices) / video.num_frames * video.fps for video in frames]
        return np.array([size / rate for rate in rates], dtype=np.float64)

    def position_ids(self, input_ids: Int64, media: MediaTokens) -> Int64:
        """M-RoPE positions, int64 (3, L); a step of a video in time is `tokens_per_second` times its seconds."""
        seconds = np.ones(len(media.video_grids)) if media.second_per_grid_ts is None else media.second_per_grid_ts
        # Batches and processors store the seconds as float32, and the model multiplies them in float32.
        steps = np.asarray(seconds, dtype=np.float32) * np.float32(self.tokens_per_second)
        return mrope_positions(input_ids, media, self.merge_size, steps)

    def config(self) -> dict[str, Any]:
        """Settings that determine lengths and pixels; of Qwen2-VL, as the families differ only in positions."""
        config = super().config()
        return config | {"family": Qwen2VLVision.__name__} if "family" in config else config


@register_vision
class Qwen3VLVision(Qwen2VLVision):
    """Qwen3-VL and Qwen3.5: as Qwen2-VL, with 16-pixel patches, other pixel statistics and timestamps in videos.

    Each temporal patch of a video is `<1.5 seconds><|vision_start|>`, its tokens and `<|vision_end|>`. As in
    Transformers since 5.12, these tokens replace only the video token: another pair of vision tokens stays around the
    whole video.
    """

    names = ("qwen3vl", "qwen3vlmoe", "qwen35", "qwen35moe")
    patch_size = 16
    image_mean = (0.5, 0.5, 0.5)
    image_std = (0.5, 0.5, 0.5)
    min_pixels = 256 * 256
    max_pixels = 4096 * 4096
    videos = VideoSettings(
        fps=2.0, min_frames=4, max_frames=768, min_total_pixels=4 * 32 * 32, max_total_pixels=24_576 * 32 * 32
    )

    def _limits(self, size: Mapping[str, Any], folder: Mapping[str, Any]) -> dict[str, Any]:
        tokens = folder.get("max_video_tokens", 768)
        return {
            # Defaults of the processor class; the published folders have other values.
            "min_total_pixels": size.get("shortest_edge", 128 * 32 * 32),
            "max_total_pixels": size.get("longest_edge", 768 * 32 * 32),
            "max_pixels": tokens * self._factor**2 if folder.get("cap_pixels_per_frame") else None,
        }

    def __init__(self, image_processor: Any) -> None:
        super().__init__(image_processor)
        self._timestamp_ids: dict[str, list[int]] = {}

    def frame_indices(self, num_frames: int, fps: float, settings: VideoSettings) -> Int64:
        """Indices of the selected frames, int64 (frames,)."""
        return linspace_indices(num_frames, fps, settings, int(self.image_processor.temporal_patch_size))

    def resized_frame(self, frames: int, height: int, width: int, settings: VideoSettings) -> tuple[int, int]:
        """(height, width) of the resized frames, as Qwen3VLVideoProcessor.resize computes it for all frames."""
        size = int(self.image_processor.temporal_patch_size)
        least, most = settings.min_total_pixels or 1, settings.max_total_pixels or sys.maxsize
        if (settings.total_pixels, settings.max_pixels, settings.min_pixels) != (None, None, None):
            share = most // frames if settings.total_pixels is None else settings.total_pixels * size // frames
            most = frame_limit(share, settings.min_pixels or least, settings.max_pixels) * frames
            least = max(least, (settings.min_pixels or 0) * frames)
        return resized_size(
            *enlarged(height, width, self._factor),
            self._factor,
            min_pixels=least,
            max_pixels=most,
            frames=frames,
            temporal_patch_size=size,
        )

    def video_token_run(self, frames: FrameSelection) -> ImageRun:
        """Tokens of a video: for each temporal patch its time as text, and its video tokens between vision tokens."""
        tokens = super().video_token_run(frames).length
        texts = [self._ids_of_timestamp(text) for text in self._timestamps(frames)]
        length = tokens + sum(len(ids) + 2 for ids in texts)

        def make() -> Int64:
            start, pad, end = self._special_ids()
            run = [pad] * (tokens // len(texts))
            return np.array([i for ids in texts for i in (*ids, start, *run, end)], dtype=np.int64)

        return ImageRun(length, make)

    def _timestamps(self, frames: FrameSelection) -> list[str]:
        """Text of the time of each temporal patch: the mean of its first and last frame.

        A time is index / fps, as in Qwen3VLProcessor, also for files with a variable frame rate.
        """
        size = int(self.image_processor.temporal_patch_size)
        indices = [*frames.indices, *[frames.indices[-1]] * (-len(frames.indices) % size)]
        times = [index / frames.fps for index in indices]
        return [f"<{(times[i] + times[i + size - 1]) / 2:.1f} seconds>" for i in range(0, len(times), size)]

    def _ids_of_timestamp(self, text: str) -> list[int]:
        # Special tokens are on both sides, so that the ids do not depend on the text around.
        if text not in self._timestamp_ids:
            self._timestamp_ids[text] = self._checked_tokenizer().encode(text, add_special_tokens=False).ids
        return self._timestamp_ids[text]

    def _special_ids(self) -> list[int]:
        tokenizer = self._checked_tokenizer()
        return [tokenizer.token_to_id(token) for token in ("<|vision_start|>", self.video_token, "<|vision_end|>")]

    def _checked_tokenizer(self) -> Any:
        if self._text_tokenizer is None:
            raise ConfigError(
                "videos of Qwen3-VL have timestamps as text. Call `check_tokenizer` with the tokenizer first."
            )
        return self._text_tokenizer

    def position_ids(self, input_ids: Int64, media: MediaTokens) -> Int64:
        """M-RoPE positions, int64 (3, L); each temporal patch of a video is an image, since text is between them."""
        patches = np.repeat(media.video_grids, media.video_grids[:, 0], axis=0)
        patches[:, 0] = 1
        return super().position_ids(input_ids, replace(media, video_grids=patches))


class OnevisionVision(VisionFamily):
    """Base class of LLaVA-OneVision-1.5 and -2: sequential text positions, (t, h, w) per patch for the vision tower.

    A patch covers a single frame. Records of frames are encoded as the trainer of both models does: `fps` becomes
    timestamps in the text. Source: `Qwen2VLTaskEncoder.process_sft_qa` of EvolvingLMMs-Lab/LLaVA-OneVision-2.
    """

    takes_patch_positions = True
    writes_timestamps = True
    image_options = IMAGE_SETTINGS
    temporal_patch_size = 1
    max_pixels = 2000 * 2000

    def patch_positions(self, grids: Int64, times: Int64 | None = None) -> Int64:
        """Patch positions, int64 (patches, 3), in the order of `pixel_values`: merged blocks in row-major order."""
        m = self.merge_size
        starts = np.zeros(len(grids), dtype=np.int64) if times is None else times
        images = []
        for (t, h, w), start in zip(grids, starts, strict=True):
            grid = np.moveaxis(np.indices((t, h, w)), 0, -1) + np.array([start, 0, 0])
            blocks = grid.reshape(t, h // m, m, w // m, m, 3).transpose(0, 1, 3, 2, 4, 5)
            images.append(blocks.reshape(-1, 3))
        return np.concatenate(images) if images else np.zeros((0, 3), dtype=np.int64)


@register_vision
class LlavaOnevision2Vision(OnevisionVision):
    """LLaVA-OneVision-2: frames of a video are images after `<1.5 seconds>`, with their index as t of the patches.

    Its models have four layouts; without a `factor`, 16-pixel patches, 3 x 3 merged. Source:
    `llava_onevision2_config.py`, `merge_ov2/variants` and `transformers_impl/llavaonevision2` of
    EvolvingLMMs-Lab/LLaVA-OneVision-2. Videos are as of its processor; its class selects up to 384 frames unless
    `max_frames` is set, and its frame extraction for training, like this family, up to 32.
    """

    names: ClassVar[tuple[str, ...]] = ("llavaonevision2", "llavaonevision2moe")
    patch_size = 16
    default_merge = 3
    layouts: ClassVar[tuple[tuple[int, int], ...]] = ((16, 3), (14, 2), (16, 2), (14, 3))
    videos = VideoSettings(max_frames=32)
    video_options: ClassVar[tuple[str, ...]] = (*FRAME_SETTINGS, "min_pixels", "max_pixels")

    def frame_indices(self, num_frames: int, fps: float, settings: VideoSettings) -> Int64:
        """Indices of the selected frames, int64 (frames,)."""
        return duration_indices(num_frames, fps, settings)

    def resized_frame(self, frames: int, height: int, width: int, settings: VideoSettings) -> tuple[int, int]:
        """(height, width) of the resized frames; by default, with the limits of images."""
        limits = self.image_processor.size
        return rounded_size(
            height,
            width,
            int(self.image_processor.patch_size) * self.merge_size,
            min_pixels=settings.min_pixels or int(limits["shortest_edge"]),
            max_pixels=settings.max_pixels or int(limits["longest_edge"]),
        )

    def frames_text(self, frames: FrameSelection) -> str:
        """Text of a video: the time of each frame and its placeholder; a time is index / fps, with one decimal."""
        times = [_to_microseconds(index / frames.fps) for index in frames.indices]
        return "".join([f"<{time:.1f} seconds>{IMAGE_PLACEHOLDER}" for time in times])

    def frame_image(self, frames: FrameSelection, pixels: UInt8) -> "Image.Image":
        """Return a frame in its resized size, as torchvision's `resize` (bicubic, antialias) computes it."""
        assert frames.resized is not None, "this family resizes frames"
        return super().frame_image(frames, resized_pixels(pixels, frames.resized))


def _to_microseconds(seconds: float) -> float:
    """The value of a time that was written as minutes and seconds with six decimals, and read again."""
    minutes = int(seconds // 60)
    return minutes * 60 + float(f"{seconds - minutes * 60:.6f}")


@register_vision
class LlavaOnevision15Vision(OnevisionVision):
    """LLaVA-OneVision-1.5: 14-pixel patches, 2 x 2 merged; frames of a video file are images, without timestamps."""

    names: ClassVar[tuple[str, ...]] = ("llavaonevision15", "llavaov15", "llavaov")
    boxes = _QWEN_BOXES
    layouts: ClassVar[tuple[tuple[int, int], ...]] = ((14, 2),)


def vision_families() -> tuple[type[VisionFamily], ...]:
    """All registered families, in the order of registration."""
    return tuple(_FAMILIES)
