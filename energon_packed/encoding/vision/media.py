"""Media of a conversation: images, videos and .npy files -> token counts and bytes, or pixels and positions.

Token counts come from the headers of images and from the packets of videos, without decoding. The frames of a video
are those that were selected when it was packed, or else those that the family selects now. For a family without a
video token, frames are images.

Patch positions are .npy files of integers (patches, 3) as (t, h, w): a file per image, or a single file for all frames
of a video. Patches are in one of two orders:

    row     patch after patch of a row of the image, as the tools of LLaVA-OneVision-2 write them
    block   merged blocks in row-major order, m x m patches each, as pixel_values and the vision tower need them

Files are stored unchanged and put into block order when they are loaded, as the trainer of LLaVA-OneVision-2 does
(`convert_positions_to_block_layout`). It also joins all files of a sample, so their number does not matter. `auto`
detects the order from the content: in the correct order, every m x m rows are a square of a single frame. Source of
the file format: NEP 1.
"""

import io
import re
import struct
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Literal, TypeVar

import numpy as np
import numpy.typing as npt
from PIL import Image

from energon_packed.encoding.vision.families import PatchOrder, VisionFamily
from energon_packed.encoding.vision.images import ImageHeader, check_as_jpeg, load_image, read_header
from energon_packed.encoding.vision.positions import Clip, ImageRun, Int64, MediaSize, Pixels
from energon_packed.encoding.vision.timestamps import has_timestamps, with_timestamps
from energon_packed.encoding.vision.video_file import decode_frames, read_video_info
from energon_packed.errors import ConfigError, Reason, RecordError
from energon_packed.libraries import calls
from energon_packed.records import (
    IMAGE_PLACEHOLDER,
    VIDEO_PLACEHOLDER,
    Conversation,
    FrameSelection,
    MediaReference,
    VideoReference,
)
from energon_packed.records.objects import BOX_REMEDY
from energon_packed.system import raise_resource_error

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
UInt8 = npt.NDArray[np.uint8]
_Medium = MediaReference | tuple[VideoReference, FrameSelection]
_PLACEHOLDERS = re.compile(f"{IMAGE_PLACEHOLDER}|{VIDEO_PLACEHOLDER}")
AUDIO_IGNORED = "audio track of a video: not used"
"""Note of a conversation with such a video."""
ImageCheck = Literal["header", "full", "convert"]
# Exceptions that NumPy raises for a corrupt header.
_HEADER_ERRORS = (ValueError, SyntaxError, TypeError, EOFError, LookupError, struct.error, tokenize.TokenError)


def check_patch_positions(references: Sequence[MediaReference], patches: Sequence[int]) -> int:
    """Validate the headers of the .npy files of a sample without reading their data.

    Args:
        references: .npy files: one per image, or fewer files that contain the patches of all images together.
        patches: number of patches of each image.

    Returns:
        Their size in bytes.

    Raises:
        RecordError: `missing_patch_positions`, if a file is missing or does not match its image.
    """
    headers = [_header(reference) for reference in references]
    if len(references) == len(patches):
        for reference, (rows, _), count in zip(references, headers, patches, strict=True):
            if rows != count:
                raise _mismatch(reference, f"has shape ({rows}, 3); the image needs integers of shape ({count}, 3)")
    elif (rows := sum(count for count, _ in headers)) != sum(patches):
        raise _mismatch(
            references[0],
            f"has shape ({headers[0][0]}, 3): {len(references)} patch_positions with {rows} rows for {len(patches)} "
            f"images with {sum(patches)} patches; one per image is needed, or one for all frames",
        )
    return sum(size for _, size in headers)


def load_patch_positions(
    references: Sequence[MediaReference], grids: Sequence[tuple[int, int]], merge_size: int, order: PatchOrder
) -> Int64:
    """Positions in the order of `pixel_values`, int64 (patches, 3).

    Args:
        references: .npy files, as in `check_patch_positions`.
        grids: patches of each image in height and width.
        merge_size: patches merged along each side into one token.
        order: patch order of the files; `auto` detects it from their content.

    Raises:
        RecordError: `missing_patch_positions`, also if `auto` cannot detect the order.
    """
    counts = [h * w for h, w in grids]
    check_patch_positions(references, counts)  # the header is checked first: it bounds the memory of read_array
    files = [np.lib.format.read_array(io.BytesIO(ref.read()), allow_pickle=False) for ref in references]
    rows = np.asarray(np.concatenate(files), dtype=np.int64)
    ends = np.cumsum(counts)
    return np.concatenate(
        [
            _blocks(rows[end - h * w : end], (h, w), merge_size, order, references[0].label)
            for (h, w), end in zip(grids, ends, strict=True)
        ]
    )


def _blocks(rows: Int64, grid: tuple[int, int], m: int, order: PatchOrder, label: str) -> Int64:
    """The positions of one image in block order."""
    (h, w) = grid
    blocks = rows[np.arange(h * w).reshape(h // m, m, w // m, m).transpose(0, 2, 1, 3).ravel()]
    # Images of a single block are the same in both orders; `rows` wins, so that nothing is permuted needlessly.
    if order == "row" or (order == "auto" and not _are_squares(rows, m) and _are_squares(blocks, m)):
        return blocks
    if order == "auto" and not _are_squares(rows, m):
        raise RecordError(
            Reason.MISSING_PATCH_POSITIONS,
            f"{label} is neither row by row nor in blocks of {m} x {m} patches of one frame; set `patch_order` to "
            "'row' or 'block'",
        )
    return rows


def _are_squares(rows: Int64, m: int) -> bool:
    """Whether every m x m rows are m x m neighbors of a single frame."""
    squares = rows.reshape(-1, m * m, 3)
    steps = np.stack([np.zeros(m * m, dtype=np.int64), *np.divmod(np.arange(m * m), m)], axis=1)
    return bool((squares == squares[:, :1] + steps).all())


def _header(reference: MediaReference) -> tuple[int, int]:
    """(rows, bytes) of a file."""
    try:
        with reference.open() as stream:
            version = np.lib.format.read_magic(stream)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            with calls("numpy", is_parser=True):
                shape, _, dtype = read(stream)
            start, size = stream.tell(), stream.seek(0, 2)
    except RecordError as error:
        raise RecordError(Reason.MISSING_PATCH_POSITIONS, error.detail) from error
    except ConfigError:
        raise
    except (*_HEADER_ERRORS, OSError) as error:
        raise_resource_error(error, reference.label)
        raise _mismatch(reference, f"is damaged: {error}") from error
    if len(shape) != 2 or shape[1] != 3 or dtype.kind not in "iu" or size - start != shape[0] * 3 * dtype.itemsize:
        raise _mismatch(reference, f"has dtype {dtype} and shape {shape}; integers of shape (patches, 3) are needed")
    return shape[0], size


def _mismatch(reference: MediaReference, problem: str) -> RecordError:
    return RecordError(Reason.MISSING_PATCH_POSITIONS, f"{reference.label} {problem}")


def measure_media(vision: VisionFamily, conversation: Conversation) -> MediaSize:
    """Compute tokens and bytes from the headers of the images and the packets of the videos.

    Raises:
        RecordError: an image, video or .npy file is missing, damaged or of a size that the family rejects.
    """
    is_ordered = conversation.input_ids is None or vision.video_token is not None or not conversation.images
    if not is_ordered and any([video.images_before is None for video in conversation.videos]):
        detail = "token ids with images and video files, whose order is unknown; pass the frames as images"
        raise RecordError(Reason.UNSUPPORTED_MEDIA, detail)
    headers = [read_header(image) for image in conversation.images]
    fitted = [
        _fitted(vision, image, header.height, header.width)
        for image, header in zip(conversation.images, headers, strict=True)
    ]
    image_runs = [
        _token_run(image, family, *size) for image, (family, size) in zip(conversation.images, fitted, strict=True)
    ]
    num_bytes = sum(header.num_bytes for header in headers)
    selected = [_selected(vision, video) for video in conversation.videos]
    frames = [selection for selection, _, _ in selected]
    num_bytes += sum(size for _, size, _ in selected)
    notes = (AUDIO_IGNORED,) if any([has_audio for _, _, has_audio in selected]) else ()
    is_timed, positions = vision.writes_timestamps and has_timestamps(conversation), None
    if conversation.patch_positions:
        vision.check_decided()
        patches = [family.num_patches(*size) for family, size in fitted]
        num_bytes += check_patch_positions(conversation.patch_positions, patches)
        if vision.takes_patch_positions and (vision.patch_order == "auto" or is_timed):
            # Read the data now: an order that cannot be detected must reject the record before training.
            grids = [family.grid(*size) for family, size in fitted]
            positions = _in_blocks(vision, conversation, grids)
    decoded = sum([header.decoded for header in headers])
    boxed = _with_boxes(vision, conversation, headers)
    conversation = boxed or conversation
    if is_timed:
        spelled, runs = _with_timestamps(vision, conversation, image_runs, positions)
        return MediaSize(runs=runs, num_bytes=num_bytes, decoded=decoded, spelled=spelled)
    runs = vision.numbered(
        _in_text_order(conversation, image_runs, [video_runs(vision, selection) for selection in frames])
    )
    return MediaSize(runs=runs, num_bytes=num_bytes, decoded=decoded, frames=frames, notes=notes, spelled=boxed)


def _token_run(image: MediaReference, family: VisionFamily, height: int, width: int) -> ImageRun:
    """Return `image_token_run` of a size, whose errors name the image: a record may have several."""
    try:
        return family.image_token_run(height, width)
    except RecordError as error:
        raise error.at(image.label, "replace the image") from error


def _with_boxes(
    vision: VisionFamily, conversation: Conversation, headers: Sequence[ImageHeader]
) -> Conversation | None:
    """Return the conversation with the coordinates of boxes that the family writes; None without boxes.

    Raises:
        RecordError: `unsupported_field`, if the family has no format of boxes.
    """
    if (objects := conversation.objects) is None:
        return None
    if vision.boxes is None:
        detail = f"{vision.name} has no known text of the boxes of objects: {BOX_REMEDY}"
        raise RecordError(Reason.UNSUPPORTED_FIELD, detail)
    boxes = []
    for box, place in zip(objects["bbox"], objects["image_id"], strict=True):
        image, header = conversation.images[place], headers[place]
        own = (1, 1) if objects["bbox_type"] == "norm1" else (header.width, header.height)
        written = (vision.boxes.scale, vision.boxes.scale)
        if vision.boxes.scale is None:
            family, size = _fitted(vision, image, header.height, header.width)
            side = int(family.image_processor.patch_size)
            rows, columns = family.grid(*size)
            written = columns * side, rows * side
        # In the order of operations of ms-swift.
        boxes.append([round(n / own[at % 2] * written[at % 2]) for at, n in enumerate(box)])
    return replace(conversation, objects={**objects, "bbox": boxes})


def _fitted(
    vision: VisionFamily, image: MediaReference, height: int, width: int
) -> tuple[VisionFamily, tuple[int, int]]:
    """Return the family with the settings of an image, and the (height, width) of the image that it gets."""
    if not image.settings:
        return vision, (height, width)
    family, resized = vision.with_settings(image.settings)
    return family, resized or (height, width)


def _with_timestamps(
    vision: VisionFamily, conversation: Conversation, runs: Sequence[ImageRun], positions: Int64 | None
) -> tuple[Conversation, list[ImageRun]]:
    """`with_timestamps`, with patch positions in block order: the patches of a token are consecutive."""
    return with_timestamps(conversation, runs, None if positions is None else positions[:: vision.merge_size**2, 0])


def _selected(vision: VisionFamily, video: VideoReference) -> tuple[FrameSelection, int, bool]:
    """Return the frames of a video, its size in bytes, and whether the file has audio, as far as it is read."""
    # The packed content is trained, whatever the settings of this family are.
    if video.frames is not None:
        vision.check_selection(video.frames)
        return video.frames, sum([file.num_bytes() for file in video.files]), False
    assert video.file is not None, "a video without a file has its frames"
    info = read_video_info(video.file)
    try:
        frames = vision.select_frames(info, video.settings)
    except RecordError as error:
        if error.reason is not Reason.UNSUPPORTED_VIDEO:
            raise
        raise RecordError(error.reason, f"{video.file.label}: {error.detail}") from error
    return frames, info.num_bytes, info.has_audio


def video_runs(vision: VisionFamily, frames: FrameSelection) -> list[ImageRun]:
    """Return the run of a video, or the runs of its frames for a family without a video token."""
    if vision.video_token is None:
        return [vision.image_token_run(*(frames.resized or (frames.height, frames.width)))] * len(frames.indices)
    return [replace(vision.video_token_run(frames), is_video=True)]


def _in_text_order(conversation: Conversation, images: Sequence[T], videos: Sequence[Sequence[T]]) -> list[T]:
    """Order the values of the images, and the values of each video, as their placeholders in the text."""
    if not videos:
        return list(images)
    if conversation.input_ids is not None:  # stored tokens have no placeholders
        ordered: list[T] = []
        placed = 0
        for video, values in zip(conversation.videos, videos, strict=True):
            before = len(images) if video.images_before is None else max(placed, video.images_before)
            ordered += [*images[placed:before], *values]
            placed = before
        return [*ordered, *images[placed:]]
    of_images, of_videos = iter(images), iter(videos)
    names = [name for text in _texts(conversation) for name in _PLACEHOLDERS.findall(text)]
    return list(
        chain.from_iterable([[next(of_images)] if name == IMAGE_PLACEHOLDER else next(of_videos) for name in names])
    )


def with_image_counts(conversation: Conversation) -> Conversation:
    """Set `images_before` of each video from the placeholders, for tokens, which do not have them."""
    if not conversation.images or conversation.input_ids is not None:
        return conversation
    order = _in_text_order(conversation, [None] * len(conversation.images), [[video] for video in conversation.videos])
    before = [order[:place].count(None) for place, video in enumerate(order) if video is not None]
    videos = zip(conversation.videos, before, strict=True)
    return replace(conversation, videos=tuple([replace(video, images_before=count) for video, count in videos]))


def _texts(conversation: Conversation) -> list[str]:
    return [conversation.text] if conversation.text is not None else [m.content for m in conversation.messages]


def with_frames_as_images(
    conversation: Conversation, vision: VisionFamily, frames: Sequence[FrameSelection]
) -> Conversation:
    """Return a conversation whose videos are images, one for each selected frame, to render its text.

    Only the number of the images of a video counts: they refer to its file.
    """
    selections = iter(frames)

    def spelled(text: str) -> str:
        return re.sub(VIDEO_PLACEHOLDER, lambda _: vision.frames_text(next(selections)), text)

    files = [
        [video.files[0]] * len(selection.indices) for video, selection in zip(conversation.videos, frames, strict=True)
    ]
    return replace(
        conversation,
        messages=tuple([message._replace(content=spelled(message.content)) for message in conversation.messages]),
        text=None if conversation.text is None else spelled(conversation.text),
        images=tuple(_in_text_order(conversation, conversation.images, files)),
        videos=(),
        patch_positions=(),
        video=True,
    )


def num_images(vision: VisionFamily | None, conversation: Conversation, frames: Sequence[FrameSelection]) -> int:
    """Return the images of a conversation for the model: without a video token, frames of videos are images too.

    Args:
        vision: the family, or None.
        conversation: the conversation.
        frames: the selected frames of each of its videos.
    """
    has_frames = vision is not None and vision.video_token is None
    return len(conversation.images) + sum([len(selection.indices) for selection in frames if has_frames])


def check_pixels(conversation: Conversation, how: ImageCheck) -> int:
    """Decode images, and images that are frames, to find damage that a header does not show.

    Args:
        conversation: with any number of images and videos; `check_video` checks video files.
        how: `header` decodes nothing, `full` all images, `convert` the images that `as_jpeg` converts.

    Returns:
        Number of decoded images.

    Raises:
        RecordError: an image is missing or cannot be decoded.
    """
    if how == "header":
        return 0
    if how == "convert":
        return sum([check_as_jpeg(image.read()) for image in conversation.images])
    for image in conversation.images:
        load_image(image)
    for video in conversation.videos:
        for frame in video.images:
            load_image(frame)
    return len(conversation.images)


def read_pixels(vision: VisionFamily, conversation: Conversation) -> Pixels:
    """Decode and preprocess the images and videos of a conversation. Raises the errors of `measure_media`."""
    vision.check_decided()
    videos = [(video, _selected(vision, video)[0]) for video in conversation.videos]
    frames = [selection for _, selection in videos]
    boxed = None
    if conversation.objects is not None:
        boxed = _with_boxes(vision, conversation, [read_header(image) for image in conversation.images])
        conversation = boxed or conversation
    if vision.video_token is None or vision.takes_clips:
        # Frames and images are preprocessed in one call: in some families, tensors depend on all images of a sample.
        ordered: list[_Medium] = _in_text_order(conversation, conversation.images, [[video] for video in videos])
        pixels = replace(_preprocessed(vision, ordered), frames=frames)
        if vision.writes_timestamps and has_timestamps(conversation):
            positions = patch_positions(vision, conversation, pixels) if conversation.patch_positions else None
            spelled, runs = _with_timestamps(vision, conversation, pixels.runs, positions)
            return replace(pixels, runs=runs, spelled=spelled)
        return replace(pixels, spelled=boxed)
    pixels = _preprocessed(vision, conversation.images) if conversation.images else Pixels()
    pixels = replace(pixels, spelled=boxed)
    if not videos:
        return pixels
    import torch

    values, grids = zip(
        *[vision.preprocess_video(selection, video_frames(video, selection)) for video, selection in videos],
        strict=True,
    )
    return replace(
        pixels,
        runs=_in_text_order(conversation, pixels.runs, [video_runs(vision, selection) for selection in frames]),
        frames=frames,
        video_values=values[0] if len(values) == 1 else torch.cat(values),  # without a copy of a single video
        video_grids=torch.tensor(np.array(grids, dtype=np.int64)),
        second_per_grid_ts=vision.second_per_grid_ts(frames),
    )


def _preprocessed(vision: VisionFamily, media: Sequence[_Medium]) -> Pixels:
    """Pixels of images and frames; an image with settings is preprocessed alone."""
    if not any([isinstance(item, MediaReference) and item.settings for item in media]):
        return vision.preprocess(_decoded(vision, media))
    parts = []
    for item in media:
        settings = item.settings if isinstance(item, MediaReference) else None
        family = vision.with_settings(settings)[0] if settings else vision
        parts.append(family.preprocess(_decoded(vision, [item])))
    return Pixels.joined(parts)


def _decoded(vision: VisionFamily, media: Sequence[_Medium]) -> Iterator[Image.Image | Clip]:
    """Yield images, and videos as clips, or their frames as images."""
    for item in media:
        if isinstance(item, tuple):
            video, frames = item
            if vision.takes_clips:
                pixels = np.empty((len(frames.indices), frames.height, frames.width, 3), dtype=np.uint8)
                for slot, frame in zip(pixels, video_frames(video, frames), strict=True):
                    slot[...] = frame
                yield Clip(frames, pixels)
                continue
            yield from (vision.frame_image(frames, pixels) for pixels in video_frames(video, frames))
            continue
        image = load_image(item)
        family, (height, width) = _fitted(vision, item, image.height, image.width)
        if (height, width) != (image.height, image.width):
            image = image.resize((width, height), Image.Resampling.BICUBIC)
        _token_run(item, family, height, width)  # rejects sizes that would crash the processor
        yield image


def video_frames(video: VideoReference, selection: FrameSelection) -> Iterator[UInt8]:
    """Yield the selected frames of a video, upright RGB, uint8 (height, width, 3) each."""
    if video.file is not None:
        yield from decode_frames(video.file, selection)
    for frame in video.images:
        yield np.array(load_image(frame))  # a copy, which is writable


def patch_positions(vision: VisionFamily, conversation: Conversation, pixels: Pixels) -> Int64 | None:
    """Patch positions, int64 (patches, 3), from the .npy files or the family; None if its vision tower has none.

    Raises:
        RecordError: `missing_patch_positions`.
    """
    # The t of a frame of a video file is its index in the file; an image has t = 0, or the t in its .npy file.
    times: list[int | None] = [None] * len(pixels.grids)
    if pixels.frames and vision.video_token is None:
        frames = [selection.indices for selection in pixels.frames]
        times = _in_text_order(conversation, [None] * len(conversation.images), frames)
        positions = vision.patch_positions(pixels.grids, np.array([t or 0 for t in times], dtype=np.int64))
    else:
        positions = vision.patch_positions(pixels.grids)
    if not conversation.patch_positions:
        return positions
    is_image = np.array([t is None for t in times], dtype=bool)
    grids = [(int(h), int(w)) for _, h, w in pixels.grids[is_image]]
    if not vision.takes_patch_positions or positions is None:
        check_patch_positions(conversation.patch_positions, [h * w for h, w in grids])
        return positions
    positions[np.repeat(is_image, pixels.patches)] = _in_blocks(vision, conversation, grids)
    return positions


def trained_grids(vision: VisionFamily, conversation: Conversation, grids: "torch.Tensor") -> "torch.Tensor":
    """image_grid_thw of a sample: a single grid of all images if a record has patch positions for the vision tower.

    LLaVA-OneVision-2's trainer joins them (`process_sft_qa`). Its vision tower attends within windows of four steps of
    a grid, so that frames in grids of their own would not attend to each other. Images of different sizes stay apart.
    """
    if not (conversation.patch_positions and vision.takes_patch_positions) or conversation.videos:
        return grids
    if not bool((grids == grids[0]).all()):
        return grids
    joined = grids[:1].clone()
    joined[0, 0] = grids[:, 0].sum()
    return joined


def _in_blocks(vision: VisionFamily, conversation: Conversation, grids: Sequence[tuple[int, int]]) -> Int64:
    return load_patch_positions(conversation.patch_positions, grids, vision.merge_size, vision.patch_order)
