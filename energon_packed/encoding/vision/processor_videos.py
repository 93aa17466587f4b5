"""ProcessorVision: images and videos for any Transformers processor of text with images.

    sample_frames of the video processor    ─►  indices of the frames                           (measure)
    processor(text=video token, blank clip) ─►  text of a video of this size and these times    (measure)
    processor(text=video token, clip)       ─►  text of the video, tensors for the model        (encode)
    get_rope_index of the model's class     ─►  M-RoPE positions                                (encode)

Like `ProcessorImages`, it has no knowledge of single families. Small clips are processed when a family is loaded. If
the output breaks a rule on which this class depends, videos of the family are refused with the reason, and images are
not. Without a video processor, the frames of a video are images of the family.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from energon_packed.encoding.vision.model_class import ModelClass
from energon_packed.encoding.vision.positions import (
    Clip,
    Float64,
    ImageRun,
    Int64,
    MediaTokens,
    Pixels,
    UInt8,
    VisionInputs,
    expanded,
)
from energon_packed.encoding.vision.processors import (
    CONTEXTS,
    OF_TEXT,
    OF_TYPES,
    ProcessorImages,
    bound,
    release,
    to_tensor,
)
from energon_packed.encoding.vision.video_sampling import VideoSettings
from energon_packed.errors import ConfigError, Reason, RecordError
from energon_packed.records import Conversation, FrameSelection

if TYPE_CHECKING:
    import torch
    from PIL import Image

    from energon_packed.encoding.vision.video_file import VideoInfo

# (frames, height, width). The first two differ in size alone, the first and the last in the number of frames alone.
_CLIPS = ((4, 112, 168), (4, 168, 112), (6, 112, 168))
_FPS, _STEP = 10.0, 5  # of these clips; their frames are every fifth of the file
_TRIED = {"fps": (0.5, 1.0), "num_frames": (4, 8)}  # two values of each option, which must select other frames
_MAX_CLIP_PIXELS = 1 << 29  # processors get all frames of a video at once: 1.5 GiB as RGB, 6 GiB as float32
_KEPT_CLIPS = 1024  # cache size
_SECONDS = "video_second_per_grid"  # tensor of Omni processors: seconds of each step of the grid, by the option `fps`
_FAILURES = (TypeError, ValueError, AttributeError, LookupError, RuntimeError)
_Tensors = dict[str, "torch.Tensor"]


class ProcessorVision(ProcessorImages):
    """Preprocess images and videos with a Transformers processor; for folders that no registered family matches."""

    names: ClassVar[tuple[str, ...]] = ()

    def __init__(self, processor: Any, model: ModelClass | None = None) -> None:
        """Find the text, tokens and joining rules of the processor with a few small images and clips.

        Raises:
            ConfigError: the processor has a behavior for images that this class does not support.
        """
        self._video_types: dict[int, int] = {}  # read by `token_type_ids`
        super().__init__(processor, model)
        self._clips: dict[tuple[Any, ...], tuple[ImageRun, dict[str, Any]]] = {}
        self._equal_frames, self._is_mixed, self._several = False, True, True
        if getattr(processor, "video_processor", None) is None:
            return
        try:
            self._learn_videos()
        except ConfigError as error:
            self._refuse_videos(str(error))
            return
        except RecordError as error:
            self._refuse_videos(error.detail)
            return
        except _FAILURES as error:
            self._refuse_videos(f"{release()} does not call it with videos, {' '.join(str(error).split())[:200]}")
            return
        if (tried := self._trial("video") or "").startswith("refused: "):
            self._refuse_videos(tried.removeprefix("refused: "))

    def _refuse_videos(self, reason: str) -> None:
        self.video_problem = (
            f"{self.name}: videos are not supported, {reason}. Pass the frames of each video as "
            "images, or remove the videos."
        )

    # --- learning --------------------------------------------------------------------------------------------------

    def _learn_videos(self) -> None:
        """Find the rules of the tensors and of the text of videos.

        Raises:
            ConfigError: the processor has a behavior for videos that this class does not support.
        """
        token = getattr(self.processor, "video_token", None)
        if token is None or token not in self.processor.tokenizer.get_added_vocab():
            raise ConfigError("its tokenizer has no token for a video")
        if token in (self.template_token, self.image_token):
            raise ConfigError(f"images and videos have the same token {token}")
        self._video = str(token)
        axes = 0 if self.model is None else self.model.position_axes
        if self.model is not None and (reason := self.model.video_problem):
            raise ConfigError(reason)
        clips = [_noise(*sides) for sides in _CLIPS]
        outputs = [self._process_media([clip]) for clip in clips]
        first, second, longer = (tensors for tensors, _ in outputs)
        text = outputs[0][1][0]
        if self._process_media([_blank(clips[0].frames)])[1][0] != text:
            raise ConfigError("the number of tokens of a video depends on its pixels")
        both, texts = self._process_media(clips[:2])
        if texts != [text, outputs[1][1][0]]:
            raise ConfigError("the text of a video depends on the other videos of the sample")
        dims = self._video_dims(first, second, both)
        of_images = frozenset(self._dims)
        self._equal_frames = not self._can_join(dims, clips[0], clips[2], first, longer)
        try:
            self._several = self._process_media([clips[0], clips[2]])[1] == [text, outputs[2][1][0]]
        except _FAILURES:  # its tensors cannot be joined by the processor, but as the samples of a row
            self._several = True
        self._dims.update(dims)  # the same object as in all samples
        ids = self._ids_of(text)
        # With one token for images and videos, the model cannot find the tokens of two tensors.
        is_shared = bool((ids == self._feature).any()) and not first.keys() & of_images
        self._is_mixed = self._can_mix(clips[0], first) and not is_shared and self._number is None
        self._set_video_types(clips[0])
        self._check_video_texts(clips[0], text)
        placeholder = self._check_video_positions(clips[0], text) if axes else token
        self._used = tuple(name for name in _TRIED if self._has_effect(name))
        self.video_token, self.video_placeholder = token, placeholder  # type: ignore[misc]
        self.reserved = (token,)  # type: ignore[misc]
        self.takes_clips = True
        self.videos = VideoSettings()

    def _video_dims(self, first: _Tensors, second: _Tensors, both: _Tensors) -> dict[str, int]:
        """Find the dimension along which each tensor of two videos joins; tensors of images have theirs."""
        if not first.keys() == second.keys() == both.keys():
            raise ConfigError("the names of the tensors of a video depend on the other videos of the sample")
        dims: dict[str, int] = {}
        for name in both:
            sizes = [tuple(values[name].shape) for values in (first, second, both)]
            fitting = [dim for dim, (a, b, joined) in enumerate(zip(*sizes, strict=False)) if a + b == joined]
            if name not in self._dims and len(fitting) != 1:
                raise ConfigError(f"{name} of two videos cannot be joined, {sizes}")
            dims[name] = self._dims.get(name, fitting[0] if fitting else -1)
        if (different := _difference([first, second], dims, both)) is not None:
            raise ConfigError(f"{different} of two videos differs from {different} of each video alone")
        return dims

    def _can_join(self, dims: dict[str, int], clip: Clip, longer: Clip, first: _Tensors, second: _Tensors) -> bool:
        """Whether videos with different numbers of frames can be in a row."""
        padded = [
            name
            for name, dim in dims.items()
            for at, sizes in enumerate(zip(first[name].shape, second[name].shape, strict=True))
            if at != dim and sizes[0] != sizes[1]
        ]
        if not padded:
            return True
        try:
            both, _ = self._process_media([clip, longer])
        except _FAILURES:
            return False
        return _difference([first, second], dims, both) is None

    def _can_mix(self, clip: Clip, of_clip: _Tensors) -> bool:
        """Whether the tensors of a sample with an image and a video are the tensors of each alone.

        Raises:
            ConfigError: an image and a video would be padded to the same size in a row, and the processor does not.
        """
        image = _picture()
        of_image, of_both = self._process_media([image])[0], list[_Tensors]()
        orders: tuple[list[Image.Image | Clip], ...] = ([image, clip], [clip, image])
        for media in orders:
            try:
                of_both.append(self._process_media(media)[0])
            except _FAILURES:
                break
        parts = ([of_image, of_clip], [of_clip, of_image])
        if [_difference(two, self._dims, both) for two, both in zip(parts, of_both, strict=False)] == [None, None]:
            return True
        for name in of_image.keys() & of_clip.keys():
            shapes = [tuple(values[name].shape) for values in (of_image, of_clip)]
            rest = [[side for at, side in enumerate(shape) if at != self._dims[name]] for shape in shapes]
            if rest[0] != rest[1]:
                raise ConfigError(f"{name} of an image and of a video cannot be joined, {shapes}")
        return False

    def _set_video_types(self, clip: Clip) -> None:
        """Find the types of the tokens of a video, if the model has an argument for types."""
        if self.needs is None or self.needs.types is None:
            return
        ids, types = self._called(f"a {self._video} b", clip, "input_ids", self.needs.types)
        found = set(zip(ids.tolist(), types.tolist(), strict=True))
        self._video_types = {token: kind for token, kind in found if kind}
        shared = [token for token in self._typed.tolist() if self._video_types.get(token, 1) != 1]
        if shared or len(dict(found)) != len(found):
            raise ConfigError(f"its {self.needs.types} do not follow from the token ids")

    def _check_video_texts(self, clip: Clip, text: str) -> None:
        """Compare the tokens of text with a video with the tokens of the processor, for several strings around it."""
        before, after = self._edges(text)
        run = ImageRun(len(self._ids_of(text)), lambda: self._ids_of(text))
        token = self.processor.tokenizer.convert_tokens_to_ids(self._video)
        for left, right in CONTEXTS:
            [ids] = self._called(left + self._video + right, clip, "input_ids")
            written = left + before + self._video + after + right
            plain = np.array(self.processor.tokenizer(written, add_special_tokens=False)["input_ids"])
            if expanded(plain, plain, [token], [run])[0].tolist() != ids.tolist():
                raise ConfigError(
                    f"its tokens of a video in {left + self._video + right!r} depend on the text around it"
                )

    def _check_video_positions(self, clip: Clip, text: str) -> str:
        """Return the text of a video with which its tokens have the type of videos, and find adjacent videos.

        GLM-4.1V has the same token for images and videos: the type of a token depends on the tags around the video,
        which its chat template writes. Positions of Omni models depend on their tags.
        """
        tags = [getattr(self.processor, name, None) for name in ("video_start_id", "video_end_id")]
        convert = self.processor.tokenizer.convert_ids_to_tokens
        before, after = ("" if tag is None else str(convert(tag)) for tag in tags)
        feature = Counter(self._ids_of(text).tolist()).most_common(1)[0][0]
        for placeholder in dict.fromkeys([self._video.join(self._tags()), before + self._video + after]):
            [ids] = self._called(placeholder, clip, "input_ids")
            types = np.asarray(self.processor.create_mm_token_type_ids([ids.tolist()])[0])
            if (types[ids == feature] == 2).all():
                if ids[0] == ids[-1]:
                    self.adjacent_images = False
                return placeholder
        raise ConfigError("its tokens of a video do not have the type of a video")

    def _has_effect(self, name: str) -> bool:
        """Whether the video processor uses an option: two values of it select different frames."""
        found = []
        for value in _TRIED[name]:
            try:
                found.append(self._sampled(600, 30.0, {name: value}).tolist())
            except _FAILURES:
                return False
        return bool(found[0] != found[1])

    # --- calls of the processor ------------------------------------------------------------------------------------

    def _process_media(self, media: "Sequence[Image.Image | Clip]") -> tuple[_Tensors, list[str]]:
        """Return the tensors of the processor, and its text of each image and clip."""
        tokens = [self._video if isinstance(item, Clip) else self.template_token for item in media]
        out = self._call(" ".join(tokens), media, return_text_replacement_offsets=True)
        texts = [replaced["replacement"] for replaced in out.pop("text_replacement_offsets")[0]]
        import torch

        names = sorted(out.keys() - OF_TEXT - set(OF_TYPES))
        return {name: to_tensor(out[name], torch) for name in names}, texts

    def _called(self, text: str, clip: Clip, *names: str) -> list[Int64]:
        """Outputs of the processor for a text with a clip, each int64 (L,)."""
        out = self._call(text, [clip], add_special_tokens=False)
        return [np.asarray(out[name][0]).astype(np.int64) for name in names]

    def _call(self, text: str, media: "Sequence[Image.Image | Clip]", **options: Any) -> dict[str, Any]:
        clips = [item for item in media if isinstance(item, Clip)]
        images = [item for item in media if not isinstance(item, Clip)]
        if clips:
            options |= {
                "videos": [clip.pixels for clip in clips],
                "video_metadata": [_metadata(clip.frames) for clip in clips],
                "do_sample_frames": False,
                "return_metadata": True,  # some processors need it for the times in their text
            }
            if (fps := clips[0].frames.settings.get("fps")) is not None and _SECONDS in self._dims:
                options["fps"] = fps
        out = super()._call(text, images, **options)
        out.pop("video_metadata", None)
        return out

    def _sampled(self, num_frames: int, fps: float, options: Mapping[str, Any]) -> Int64:
        """Indices of the frames that the video processor selects, called with all its settings as it calls itself."""
        selection = FrameSelection(indices=(), timestamps=(), fps=fps, num_frames=num_frames, height=1, width=1)
        processor = self.processor.video_processor
        names = getattr(getattr(processor, "valid_kwargs", None), "__annotations__", ())
        settings = {name: value for name in names if (value := getattr(processor, name, None)) is not None}
        found = processor.sample_frames(metadata=_metadata(selection), **{**settings, **options})
        return np.asarray(found).astype(np.int64)

    # --- VisionFamily ----------------------------------------------------------------------------------------------

    def set_videos(self, folder: Mapping[str, Any] | None, options: Mapping[str, Any]) -> None:
        """Set explicit options of videos; the folder's settings are in its video processor.

        Raises:
            ConfigError: an invalid value, or an option that the video processor does not use.
        """
        if not self.takes_clips:
            super().set_videos(folder, options)
            return
        self.video_options = self._used  # type: ignore[misc]
        for name in options:
            if name not in self._used:
                option = name if name == "total_pixels" else f"video_{name}"
                raise ConfigError(
                    f"`{option}` must not be set for {self.name}, whose video processor does not "
                    "use it. Change the settings of the video processor in its folder."
                )
        self.videos = VideoSettings().updated(options)

    def select_frames(self, info: "VideoInfo", settings: Mapping[str, Any] | None = None) -> FrameSelection:
        """Select frames by `sample_frames` of the video processor; otherwise as `VisionFamily.select_frames`."""
        frames = super().select_frames(info, settings)
        if not self.takes_clips:
            return frames
        pixels = len(frames.indices) * frames.height * frames.width
        if pixels > _MAX_CLIP_PIXELS:
            detail = (
                f"{len(frames.indices)} frames of {frames.width}x{frames.height} have more than {_MAX_CLIP_PIXELS:,} "
                "pixels. Set `video_num_frames` or `video_fps`"
            )
            raise RecordError(Reason.UNSUPPORTED_VIDEO, detail)
        return replace(
            frames, settings={name: frames.settings[name] for name in self._used if name in frames.settings}
        )

    def media_problem(self, conversation: Conversation) -> str:
        """Reason why the media of a conversation cannot be in the same sample, or ""."""
        name = self.name
        if not self._is_mixed and conversation.images and conversation.videos:
            return f"images and videos in one record, which {name} does not join"
        if not self._several and len(conversation.videos) > 1:
            return f"several videos in one record, whose tokens depend on each other for {name}"
        return ""

    def check_selection(self, frames: FrameSelection) -> None:
        """Check that the family supports videos. Raises the errors of `select_frames`."""
        if self.video_problem:
            raise ConfigError(self.video_problem)
        super().check_selection(frames)

    def frame_indices(self, num_frames: int, fps: float, settings: VideoSettings) -> Int64:
        """Indices of the selected frames, int64 (frames,).

        Raises:
            ValueError: the video processor cannot use a video of this length.
            ConfigError: it needs a number or rate of frames.
        """
        if not self.takes_clips:
            return super().frame_indices(num_frames, fps, settings)
        options = {name: value for name in self._used if (value := getattr(settings, name)) is not None}
        name = self.name
        try:
            indices = self._sampled(num_frames, fps, options)
        except TypeError as error:  # its own settings are None
            named = " or ".join(f"`video_{option}`" for option in self._used)
            remedy = f"Set {named}" if named else "Add `num_frames` and `fps` to its settings in the folder"
            raise ConfigError(f"the video processor of {name} has no number or rate of frames. {remedy}.") from error
        if not len(indices) or indices[0] < 0 or indices[-1] >= num_frames or (np.diff(indices) < 0).any():
            raise ValueError(f"{name} does not select increasing frames of the {num_frames} in the file")
        if self._equal_frames:
            needed_frames = settings.num_frames or getattr(self.processor.video_processor, "num_frames", None)
            if needed_frames is None:
                raise ConfigError(
                    f"{name} joins only videos with the same number of frames in a row. Set `video_num_frames`."
                )
            if len(indices) != needed_frames:
                raise ValueError(
                    f"{name} selects {len(indices)} frames, and a row needs {needed_frames} of each video"
                )
        return indices

    def video_token_run(self, frames: FrameSelection) -> ImageRun:
        """Tokens of a video."""
        return self._measured_clip(frames)[0]

    def heard_run(self, frames: FrameSelection, audio_tokens: int) -> ImageRun:
        """Tokens of a video with its audio track, in the order of time."""
        text = self.processor.replace_video_with_audio_token(
            self._measured_clip(frames)[1],
            0,
            {"num_audio_tokens": [audio_tokens]},
            0,
            position_id_per_seconds=self.processor.position_id_per_seconds,
            seconds_per_chunk=self.processor.seconds_per_chunk,
        )
        ids = self._ids_of(text)
        return ImageRun(len(ids), lambda: ids, is_video=True)

    def _measured_clip(self, frames: FrameSelection) -> tuple[ImageRun, dict[str, Any]]:
        """Tokens of a video, its grid and seconds: a blank clip with these times is processed once."""
        key = (*frames.settings.items(), frames.height, frames.width, frames.indices, frames.fps, frames.num_frames)
        if key not in self._clips:
            bound(self._clips, _KEPT_CLIPS)
            run, values = self._run(_blank(frames))
            kept = {}
            if _SECONDS in values:  # positions follow from the rate, so that they are checked for each
                before, after = (self._ids_of(tag) for tag in self._tags())
                ids = np.concatenate([before, run.make() if run.make else before[:0], after])
                grids = values["video_grid_thw"].numpy()
                media = MediaTokens(self._feature, video_grids=grids, second_per_grid_ts=_seconds(values))
                self.position_ids(ids, media)
                kept = {"video_grid_thw": grids, _SECONDS: values[_SECONDS].tolist()}
            self._clips[key] = run, kept
        return self._clips[key]

    def _run(self, clip: Clip) -> tuple[ImageRun, _Tensors]:
        """Tokens of a clip, and its tensors."""
        try:
            values, [text] = self._process_media([clip])
        except (ValueError, ZeroDivisionError, IndexError, RuntimeError) as error:
            raise RecordError(Reason.UNSUPPORTED_VIDEO, " ".join(str(error).split())[:200]) from error
        ids = self._ids_of(text)
        return ImageRun(len(ids), lambda: ids, is_video=True, edges=self._edges(text)), values

    def video_grid(self, frames: FrameSelection) -> tuple[int, int, int]:
        """Patches of a video in time, height and width, if a frame is a single row of patches, one of each token."""
        steps = len(frames.indices)
        return steps, 1, -(-self.video_token_run(frames).length // steps)

    def preprocess(self, images: "Iterable[Image.Image | Clip]") -> Pixels:
        """Return tokens and vision tower arguments for the images and videos of a sample, in the order of the text.

        Each video and each group of images is processed alone and joined as the samples of a row.

        Raises:
            RecordError: `corrupt_image`, `unsupported_video`: the processor does not accept it.
        """
        media = list(images)
        if not any(isinstance(item, Clip) for item in media):
            return super().preprocess(item for item in media if not isinstance(item, Clip))
        groups = groupby(enumerate(media), key=lambda item: item[0] if isinstance(item[1], Clip) else -1)
        parts = [self._part([item for _, item in group]) for _, group in groups]
        inputs = [part.inputs for part in parts if part.inputs is not None]
        values, _ = VisionInputs.joined(inputs)
        grids = [part.grids for part in parts]
        return Pixels(
            runs=[run for part in parts for run in part.runs],
            inputs=VisionInputs(
                values, self._dims, sum(part.images for part in inputs), sum(part.videos for part in inputs)
            ),
            grids=np.concatenate(grids),
            video_grids=values.get("video_grid_thw"),
            second_per_grid_ts=_seconds(values),
        )

    def _part(self, media: "list[Image.Image | Clip]") -> Pixels:
        clip = media[0]
        if not isinstance(clip, Clip):
            return super().preprocess(item for item in media if not isinstance(item, Clip))
        run, values = self._run(clip)
        return Pixels(runs=[run], inputs=VisionInputs(values, self._dims, 0, 1))

    def position_ids(self, input_ids: Int64, media: MediaTokens) -> Int64 | None:
        """Positions by the class of the model, int64 (axes, L); None for 0..L-1. Raises the errors of `ModelClass`."""
        if self.model is None or not len(media.video_grids):
            return super().position_ids(input_ids, media)
        # Some processors decide by the text whether the same token is of an image or of a video.
        types = np.asarray(self.processor.create_mm_token_type_ids([input_ids.tolist()])[0])
        return self.model.position_ids(input_ids, media, types)

    def token_type_ids(self, input_ids: Int64) -> Int64 | None:
        """Types of tokens, int64 (L,), for a model with an argument for them; else None."""
        types = super().token_type_ids(input_ids)
        if types is not None:
            for token, kind in self._video_types.items():
                types[input_ids == token] = kind
        return types

    def video_config(self) -> dict[str, Any]:
        """Settings of videos, for fingerprints; {} for a family without videos."""
        if not self.takes_clips:
            return super().video_config()
        options = {name: getattr(self.videos, name) for name in self._used}
        return {"video_processor": json.loads(self.processor.video_processor.to_json_string()), **options}


def _difference(parts: Sequence[_Tensors], dims: dict[str, int], both: _Tensors) -> str | None:
    """Name of a tensor that differs between a call with two media and the joined tensors of each; None if none does.

    Dimensions of the batch may differ: a processor may return (videos, frames, ...) for (1, frames of all, ...).
    """
    joined, _ = VisionInputs.joined([VisionInputs(values, dims, 1) for values in parts])
    for name in joined.keys() | both.keys():
        if name not in joined or name not in both or joined[name].numel() != both[name].numel():
            return name
        if not bool((joined[name].reshape(both[name].shape) == both[name]).all()):
            return name
    return None


def _seconds(values: _Tensors) -> Float64 | None:
    """Seconds of each step of the grid of each video, float64 (videos,); None if the processor does not return it."""
    found = values.get(_SECONDS)
    return None if found is None else found.double().numpy()


def _metadata(frames: FrameSelection) -> Any:
    from transformers.video_utils import VideoMetadata

    return VideoMetadata(
        total_num_frames=frames.num_frames,
        fps=frames.fps,
        width=frames.width,
        height=frames.height,
        duration=frames.num_frames / frames.fps,
        frames_indices=list(frames.indices),
    )


def _clip(frames: int, height: int, width: int, fill: Callable[[tuple[int, ...]], UInt8]) -> Clip:
    indices = tuple(range(0, frames * _STEP, _STEP))
    selection = FrameSelection(
        indices=indices,
        timestamps=tuple(index / _FPS for index in indices),
        fps=_FPS,
        num_frames=frames * _STEP,
        height=height,
        width=width,
    )
    return Clip(selection, fill((frames, height, width, 3)))


def _noise(frames: int, height: int, width: int) -> Clip:
    rng = np.random.default_rng(frames * height)
    return _clip(frames, height, width, lambda shape: rng.integers(0, 256, shape, dtype=np.uint8))


def _blank(frames: FrameSelection) -> Clip:
    return Clip(frames, np.zeros((len(frames.indices), frames.height, frames.width, 3), dtype=np.uint8))


def _picture() -> "Image.Image":
    from PIL import Image

    return Image.fromarray(_noise(1, 112, 140).pixels[0])
