"""EncoderSettings: the settings of a ChatEncoder, declared once.

Each field is declared by `option(default, help=...)`; creating an instance checks the values. The options of `pack`,
`lengths` and `verify`, config files, `PackOptions`, `DataflowConfig`, its `processor_config`, the option tables in
docs/ and the types of keyword arguments (`keywords.pyi`) are made from this class.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from energon_packed.encoding.engines import EngineName
from energon_packed.encoding.rendering import LossOn
from energon_packed.encoding.vision.families import PatchOrder
from energon_packed.options import Options, option

TOKENS, IMAGES, VIDEOS, AUDIO = "Tokens", "Images", "Videos", "Audio"
_token_option = partial(option, group=TOKENS, decides="lengths")
_image_option = partial(option, group=IMAGES, decides="lengths")
_video_option = partial(option, group=VIDEOS, decides="lengths")
LongAudio = Literal["reject", "truncate"]


@dataclass(frozen=True, kw_only=True)
class EncoderSettings(Options):
    """Settings of a ChatEncoder. The processor folder or the family decides an image or video setting that is None.

    The order of the fields is their order in packing.json.

    Raises:
        ConfigError: when made with an invalid value.

    Examples:
        >>> settings = EncoderSettings(tokenizer=tokenizer, loss_on="last")
        >>> ChatEncoder.of(settings).settings.loss_on
        'last'
    """

    tokenizer: Path | None = _token_option(
        None, help="Folder with tokenizer and chat template, or a model in the Hugging Face cache.",
        metavar="DIR|NAME", needed=True,
    )  # fmt: skip
    processor: Path | None = _image_option(
        None, help="Folder with preprocessor_config.json.", shown_default="--tokenizer", metavar="DIR"
    )
    image_processor: str | None = _image_option(
        None, help="Image processor by name, such as Qwen2_5_VLProcessor.", metavar="NAME"
    )
    vision_family: str | None = _image_option(
        None, help="Model family by name, such as llava_onevision2, in place of the names in the folder; none: text "
        "without images.",
        metavar="NAME",
    )  # fmt: skip
    factor: int | None = _image_option(None, help="Pixels per token side: patch size times merge size.", minimum=1)
    patch_size: int | None = _image_option(None, help="Pixels per patch side.", minimum=1)
    merge_size: int | None = _image_option(None, help="Patches merged along each side into one token.", minimum=1)
    min_pixels: int | None = _image_option(None, help="Minimum pixels of a resized image.", minimum=1)
    max_pixels: int | None = _image_option(None, help="Maximum pixels of a resized image.", minimum=1)
    patch_order: PatchOrder = _image_option(
        "auto", help="Order of patches in the .npy files of patch_positions; auto: detected from their content."
    )
    fps: float | None = _video_option(
        None, help="Selected frames per second of a video file.", shown_default="2, or 1"
    )
    num_frames: int | None = _video_option(
        None, help="Number of selected frames of a video file, in place of --fps.", minimum=1
    )
    min_frames: int | None = _video_option(None, help="Minimum number of frames that --fps selects.", minimum=1)
    max_frames: int | None = _video_option(None, help="Maximum number of frames that --fps selects.", minimum=1)
    video_min_pixels: int | None = _video_option(None, help="Minimum pixels of a resized frame.", minimum=1)
    video_max_pixels: int | None = _video_option(None, help="Maximum pixels of a resized frame.", minimum=1)
    total_pixels: int | None = _video_option(
        None, help="Maximum pixels of all resized frames of a video file; a pair of frames counts as one.", minimum=1
    )
    long_audio: LongAudio = option(
        "reject", help="Audio that is longer than the model reads: reject the record, or use its start.",
        group=AUDIO, decides="lengths",
    )  # fmt: skip
    load_audio_from_video: bool = option(
        False, help="Use the audio tracks of video files, with Qwen2.5-Omni and Qwen3-Omni.", group=AUDIO,
        decides="lengths",
    )  # fmt: skip
    loss_on: LossOn = _token_option(
        "assistant", help="Supervised text: every assistant turn, only the last assistant turn, or all text."
    )
    tokenizer_engine: EngineName = option(
        "auto", help="Tokenizer implementation; the token ids are identical. auto uses fastokens if it passes the "
        "equivalence test, else tokenizers.", group=TOKENS,
    )  # fmt: skip
    allow_special_in_text: bool = _token_option(
        False, help="Parse special tokens in record text (such as </s>) as control tokens instead of plain text."
    )
