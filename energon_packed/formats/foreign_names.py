"""Members that a pack's JSON means, where it gives them other names than the tar does.

LLaVA-OneVision-2's packer lists `img000_sub000.jpg` and stores `img0_0.jpg`; LLaVA-OneVision-1.5's lists paths and
stores `img0.jpg`. A name that no member has therefore stands for its position:

    img{i}_{j}.*   image j of sample i
    img0_{k}.*     image k of the pack, where the JSON lists the images of all samples in one list
    img{k}.*       image k of the pack

One of these holds for all absent names of a pack. Source: `s4_pack_samples.py` and `s5_convert_to_webdataset.py` of
LLaVA-OneVision-2, `4_convert_packedsample_to_wds.py` of its 1.5 examples.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

from energon_packed.errors import FormatError
from energon_packed.formats.codec import RawPack
from energon_packed.records import IMAGE_PLACEHOLDER

Position = tuple[int, int, int]
"""(sample i, image j of it, image k of the pack)."""
_STEMS: tuple[Callable[[Position], str], ...] = (
    lambda at: f"img{at[0]}_{at[1]}",
    lambda at: f"img0_{at[2]}",
    lambda at: f"img{at[2]}",
)
_NO_IMAGES = ("npy", "json", "txt")


def names_by_sample(raw: RawPack, listed: Any, texts: Sequence[Sequence[str]]) -> list[list[str]]:
    """Image names of each sample.

    Args:
        raw: the pack, for its key.
        listed: `images` of the json: a list for each sample, or one list for all.
        texts: all turns of each sample; placeholders in them say whose the images of one list are.

    Raises:
        FormatError: neither their number nor the placeholders say which image belongs to which sample.
    """
    if not listed:
        return [[] for _ in texts]
    if not all(isinstance(one, str) for one in listed):
        if len(listed) != len(texts):
            raise FormatError(f"{raw.get('__key__')} lists the images of {len(listed)} samples, but has {len(texts)}")
        return [[one] if isinstance(one, str) else list(one or ()) for one in listed]
    counts = [sum(text.count(IMAGE_PLACEHOLDER) for text in turns) for turns in texts]
    if sum(counts) != len(listed):
        if len(listed) == len(texts):  # one each
            return [[one] for one in listed]
        raise FormatError(
            f"{raw.get('__key__')} lists {len(listed)} images in one list for {len(texts)} samples with {sum(counts)} "
            f"{IMAGE_PLACEHOLDER} placeholders, so whose they are is not known; list them per sample"
        )
    left = iter(listed)
    return [[next(left) for _ in range(number)] for number in counts]


def member_names(raw: RawPack, names: Sequence[Sequence[str]], *, extension: str = "") -> list[list[str]]:
    """The member of each name: itself where the tar has it, else the one at its position.

    Args:
        raw: the pack.
        names: of each sample; an empty name is none, and keeps its position.
        extension: of the members to find, such as `npy`; images without it.

    Returns:
        As `names`; a name without a member stays, so that reading it names it.
    """
    known = {"", *raw}
    if all(name in known for listed in names for name in listed):
        return [list(listed) for listed in names]
    running = count()
    placed = [[(name, (i, j, next(running))) for j, name in enumerate(listed)] for i, listed in enumerate(names)]
    absent = [at for listed in placed for name, at in listed if name not in known]
    stems = _members_by_stem(raw, extension)
    for stem in _STEMS:
        if all(stem(at) in stems for at in absent):
            return [[name if name in known else stems[stem(at)] for name, at in listed] for listed in placed]
    return [list(listed) for listed in names]


def _members_by_stem(raw: Mapping[str, Any], extension: str) -> dict[str, str]:
    found = {}
    for part in raw:
        stem, _, end = part.rpartition(".")
        if stem and (end.lower() == extension if extension else end.lower() not in _NO_IMAGES):
            found[stem] = part
    return found
