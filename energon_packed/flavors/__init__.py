"""Energon sample dataclasses, each with its `sample_loader` and `part_filter`.

    PackedCaptioningSample   image and text samples, raw: prompts, captions, image bytes
    PackedMultiMixQASample   full conversations: any roles, tools, video frames
    MultiMixQASample         one unpacked conversation, for packing on the fly
    PackedTokensSample       tokenized offline, image bytes kept

Every flavor gives its samples back as `conversations()`, which is all that encoding needs.
"""

from energon_packed.flavors.base import PackSample
from energon_packed.flavors.multi_mix_qa import MultiMixQASample
from energon_packed.flavors.packed_captioning import PackedCaptioningSample
from energon_packed.flavors.packed_multi_mix_qa import PackedMultiMixQASample
from energon_packed.flavors.packed_tokens import PackedTokensSample

__all__ = [
    "MultiMixQASample",
    "PackSample",
    "PackedCaptioningSample",
    "PackedMultiMixQASample",
    "PackedTokensSample",
]
