"""EncoderSettings: the settings of a ChatEncoder, declared once.

Each field is declared by `option(default, help=...)`; creating an instance checks the values. The options of `pack`,
`lengths` and `verify`, config files, `PackOptions`, `DataflowConfig`, its `processor_config` and the option tables in
docs/ are generated from this class. The parameters of `ChatEncoder.from_pretrained` are written out for editors and
type checkers; a test compares them with this class.
"""

from dataclasses import dataclass, fields
from pathlib import Path

from energon_packed.encoding.engines import ENGINES, EngineName
from energon_packed.encoding.rendering import LOSS_ON, LossOn
from energon_packed.encoding.vision.families import PATCH_ORDERS, PatchOrder
from energon_packed.options import check, option

TOKENS, IMAGES = "Tokens", "Images"


@dataclass(frozen=True, kw_only=True)
class EncoderSettings:
    """Settings of a ChatEncoder. An image setting that is None is decided by the processor folder or the family.

    The order of the fields is their order in packing.json.

    Raises:
        ConfigError: when made with an invalid value.
    """

    tokenizer: Path | None = option(
        None, help="Folder with tokenizer.json and a chat template, or a model in the Hugging Face cache.",
        group=TOKENS, metavar="DIR|NAME", needed=True, decides="lengths",
    )  # fmt: skip
    processor: Path | None = option(
        None, help="Folder with preprocessor_config.json.", group=IMAGES, shown_default="--tokenizer", metavar="DIR",
        decides="lengths",
    )  # fmt: skip
    image_processor: str | None = option(
        None, help="Image processor by name, such as Qwen2_5_VLProcessor.", group=IMAGES, metavar="NAME",
        decides="lengths",
    )  # fmt: skip
    vision_family: str | None = option(
        None, help="Model family by name, such as llava_onevision2, if several families share an image processor.",
        group=IMAGES, metavar="NAME", decides="lengths",
    )  # fmt: skip
    factor: int | None = option(
        None, help="Pixels per token side: patch size times merge size.", group=IMAGES, minimum=1, decides="lengths"
    )
    patch_size: int | None = option(
        None, help="Pixels per patch side.", group=IMAGES, minimum=1, decides="lengths"
    )  # fmt: skip
    merge_size: int | None = option(
        None, help="Patches merged along each side into one token.", group=IMAGES, minimum=1, decides="lengths"
    )
    min_pixels: int | None = option(
        None, help="Minimum pixels of a resized image.", group=IMAGES, minimum=1, decides="lengths"
    )
    max_pixels: int | None = option(
        None, help="Maximum pixels of a resized image.", group=IMAGES, minimum=1, decides="lengths"
    )
    patch_order: PatchOrder = option(
        "auto", help="Order of patches in the .npy files of patch_positions; auto: detected from their content.",
        group=IMAGES, choices=PATCH_ORDERS, decides="lengths",
    )  # fmt: skip
    loss_on: LossOn = option(
        "assistant", help="Supervised text: every assistant turn, only the last assistant turn, or all text.",
        group=TOKENS, choices=LOSS_ON, decides="lengths",
    )  # fmt: skip
    tokenizer_engine: EngineName = option(
        "auto", help="Tokenizer implementation; the token ids are identical. auto uses fastokens if it passes the "
        "equivalence test, else tokenizers.", group=TOKENS, choices=ENGINES,
    )  # fmt: skip
    allow_special_in_text: bool = option(
        False, help="Parse special tokens in record text (such as </s>) as control tokens instead of plain text.",
        group=TOKENS, decides="lengths",
    )  # fmt: skip

    def __post_init__(self) -> None:
        check(self)


def settings_in(options: EncoderSettings) -> EncoderSettings:
    """Return only the encoder settings of a class with more options, such as `PackOptions`."""
    return EncoderSettings(**{field.name: getattr(options, field.name) for field in fields(EncoderSettings)})
