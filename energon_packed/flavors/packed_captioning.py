"""Flavor PackedCaptioningSample: the parts of a tar key to a pack of image and text samples, encoded at training time.

It loads packs in the default layout and in layout llava-onevision2, and packs of LLaVA-OneVision-1.5 and -2. The
class of this name in LLaVA-OneVision-2's `aiak_training_llm` loads layout llava-onevision2 only.
"""

from collections.abc import Mapping
from typing import Any

from megatron.energon import edataclass

from energon_packed.flavors.stored_pack import StoredPack, read_stored
from energon_packed.formats.captioning import CaptioningCodec

_CODEC = CaptioningCodec()


@edataclass
class PackedCaptioningSample(StoredPack):
    """Samples that share a row: turns of user and assistant, or a plain text, with images and videos.

    Examples:
        >>> result = pack(data, output_dir="PackedCaptioningSample", **options, sample_class="PackedCaptioningSample")
        >>> result.manifest.sample_class, result.manifest.packed
        ('PackedCaptioningSample', 154)
    """


def sample_loader(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the parts of a tar key to the fields of a PackedCaptioningSample."""
    return read_stored(_CODEC, raw)


def part_filter(part: str) -> bool:
    """Return whether Energon reads a part from the tar."""
    return _CODEC.part_filter(part)
