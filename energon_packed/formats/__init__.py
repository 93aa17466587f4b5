"""Codecs: each converts the samples of a pack to the files of a tar key, and back. Every flavor has a codec.

codec.py         the interface: `Codec.check`, `write`, `read` and `lengths`; `StoredSample`, its input and output
parts.py         JSON and media files of a pack, shared by the codecs below
captioning.py    PackedCaptioningSample
multi_mix_qa.py  PackedMultiMixQASample, MultiMixQASample
tokens.py        PackedTokensSample
videos.py        selected frames of videos as JSON, and names of their parts
audios.py        clips of audio files as JSON, and names of their parts
references.py    media of a pack that are in other files: their location, read and checked
third_party.py   the layout for LLaVA-OneVision-2, and LoongForge's packs, which are only read

A custom flavor is one subclass of `Codec` with `@register_codec`.
"""

from energon_packed.errors import ConfigError, FormatError
from energon_packed.formats.captioning import CaptioningCodec
from energon_packed.formats.codec import Codec, Part, RawPack, StoredSample
from energon_packed.formats.multi_mix_qa import MultiMixCodec, SingleMultiMixCodec
from energon_packed.formats.parts import read_object
from energon_packed.formats.references import set_media_root
from energon_packed.formats.third_party import LlavaOnevision2Codec, LoongForgeChatMixCodec, LoongForgeMultiMixCodec
from energon_packed.formats.tokens import TokensCodec

CODECS: dict[str, Codec] = {
    codec.sample_class: codec for codec in (CaptioningCodec(), MultiMixCodec(), SingleMultiMixCodec(), TokensCodec())
}
"""Codecs by `sample_class`. `codec_of` tries the last registered codec first."""
LAYOUTS: dict[str, Codec] = {codec.layout: codec for codec in (LlavaOnevision2Codec(),)}
"""Variants of a flavor for third-party readers, by `layout`."""
READ_ONLY: dict[str, Codec] = {
    codec.sample_class: codec for codec in (LoongForgeMultiMixCodec(), LoongForgeChatMixCodec())
}
"""Codecs of third-party packs that are read and not written, by `sample_class`. `codec_of` tries them first."""


def register_codec(codec: type[Codec]) -> type[Codec]:
    """Register a custom codec (class decorator)."""
    CODECS[codec.sample_class] = codec()
    return codec


def codec_for(sample_class: str, layout: str = "") -> Codec:
    """Return the codec of a flavor, or of a layout of it.

    Raises:
        ConfigError: the name is unknown; the message lists the valid names.
    """
    if layout:
        if layout not in LAYOUTS:
            raise ConfigError(f"unknown layout {layout!r}; use one of {', '.join(LAYOUTS)}")
        return LAYOUTS[layout]
    codec = CODECS.get(sample_class) or READ_ONLY.get(sample_class)
    if codec is None:
        raise ConfigError(f"unknown sample class {sample_class!r}; use one of {', '.join(CODECS)}")
    return codec


def codec_of(raw: RawPack) -> Codec:
    """Return the codec of a pack, recognized by its parts.

    Raises:
        FormatError: no codec matches; the message lists the keys of the json part.
    """
    # LoongForge's packs also have the `messages` of MultiMixQASample, so their stricter tests come first.
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
    "StoredSample",
    "codec_for",
    "codec_of",
    "register_codec",
    "set_media_root",
]
