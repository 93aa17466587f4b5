"""Flavors on disk: one codec each, with what a pack of it looks like, written and read in one place.

codec.py         Codec: matches, check, write, read, lengths
sample.py        StoredSample: what is written and read back
parts.py         JSON and media parts
captioning.py    PackedCaptioningSample
multi_mix_qa.py  PackedMultiMixQASample, MultiMixQASample
tokens.py        PackedTokensSample
llava_onevision2.py  the layout that LLaVA-OneVision-2's reader takes
loongforge.py    packs of LoongForge, read only
foreign_names.py members that packs of LLaVA-OneVision name otherwise

A new flavor is one subclass of `Codec` with `@register_codec`; its dataclass in `energon_packed.flavors` is optional.
"""

from energon_packed.errors import ConfigError, FormatError
from energon_packed.formats.captioning import CaptioningCodec
from energon_packed.formats.codec import Codec, Part, RawPack, StoredImage, StoredSample
from energon_packed.formats.multi_mix_qa import MultiMixCodec, SingleMultiMixCodec
from energon_packed.formats.parts import read_object
from energon_packed.formats.third_party import LlavaOnevision2Codec, LoongForgeChatMixCodec, LoongForgeMultiMixCodec
from energon_packed.formats.tokens import TokensCodec

CODECS: dict[str, Codec] = {
    codec.sample_class: codec for codec in (CaptioningCodec(), MultiMixCodec(), SingleMultiMixCodec(), TokensCodec())
}
"""By `sample_class`; `codec_of` asks them in this order, those registered later first."""
LAYOUTS: dict[str, Codec] = {codec.layout: codec for codec in (LlavaOnevision2Codec(),)}
"""Stricter forms of a flavor, for the readers of other packages, by `layout`."""
READ_ONLY: dict[str, Codec] = {
    codec.sample_class: codec for codec in (LoongForgeMultiMixCodec(), LoongForgeChatMixCodec())
}
"""Layouts of other packers that are read and not written; `codec_of` asks them first."""


def register_codec(codec: type[Codec]) -> type[Codec]:
    """Add a flavor of your own (a class decorator)."""
    CODECS[codec.sample_class] = codec()
    return codec


def codec_for(sample_class: str, layout: str = "") -> Codec:
    """The codec of a flavor, or of a layout of it.

    Raises:
        ConfigError: an unknown name; the message lists the valid ones.
    """
    if layout:
        if layout not in LAYOUTS:
            raise ConfigError(f"unknown layout {layout!r}; use one of {', '.join(LAYOUTS)}")
        return LAYOUTS[layout]
    found = CODECS.get(sample_class) or READ_ONLY.get(sample_class)
    if found is None:
        raise ConfigError(f"unknown sample class {sample_class!r}; use one of {', '.join(CODECS)}")
    return found


def codec_of(raw: RawPack) -> Codec:
    """The codec of a pack, by its parts.

    Raises:
        FormatError: none matches.
    """
    for codec in (*READ_ONLY.values(), *reversed(CODECS.values())):
        if codec.matches(raw):
            return codec
    keys = f"its json has the keys {', '.join(value)}" if (value := read_object(raw)) else "it has no json part"
    raise FormatError(f"{raw.get('__key__')} matches no known flavor: {keys}")


__all__ = [
    "CODECS",
    "LAYOUTS",
    "READ_ONLY",
    "Codec",
    "Part",
    "RawPack",
    "StoredImage",
    "StoredSample",
    "codec_for",
    "codec_of",
    "register_codec",
]
