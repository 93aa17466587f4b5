"""Layout: the dataset.yaml of an Energon dataset in; a reader that converts the members of a key to records out.

Without a dataset.yaml, keys are read by the names of their parts (`tar_records`). With a `field_map`, samples of
Energon's standard flavors become records:

    Captioning             image, caption
    VQA                    image, context, answers (the answer with the largest weight, else the most frequent)
    VidQA                  video, context, answers
    MultiChoiceVQA         image, context, choices as lettered lines; the letter of the correct choice is the answer
    OCR                    image, text
    Interleaved            sequence of strings, images and videos, a document
    SimilarityInterleaved  strings and images, each image before the string that it matches, a document
    Text                   text

A field is a part, `part[key][index]` inside a JSON part, or alternatives separated by commas, as in Energon
(megatron/energon/flavors/webdataset/field_access.py).
"""

import hashlib
import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import yaml

from energon_packed.errors import EnergonPackedError, FormatError, Reason, RecordError, SourceError
from energon_packed.files import of_type, read_yaml
from energon_packed.formats import CODECS
from energon_packed.metadatasets import NV_META, SPLIT_FILE, SplitFile, read_split
from energon_packed.records import IMAGE_PLACEHOLDER, VIDEO_PLACEHOLDER, MediaReference, VideoReference
from energon_packed.records.media.kinds import IMAGE, VIDEO, MediaKind
from energon_packed.sources.base import changed_at
from energon_packed.sources.sample_loader import SampleLoader
from energon_packed.sources.tar_records import (
    IMAGE_PARTS,
    INTEGER_PARTS,
    JSON_PARTS,
    KeyMembers,
    caption_record,
    raw_records,
    read_pack,
    read_records,
)
from energon_packed.system import raise_resource_error
from energon_packed.tarfiles import Member

DATASET_FILE = "dataset.yaml"
_LOG = logging.getLogger(__name__)
_LEVELS = 4  # shards may be in folders below the dataset
_FIELD = re.compile(r"(?P<part>[^\[\]]+)(?P<access>(?:\[[^\[\]]+\])*)")
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_INSTRUCTION = "Answer with the option's letter from the given choices directly."
Fields = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Layout:
    """Rules by which the keys of a tar become records.

    Attributes:
        file: the dataset.yaml with the rules; None for a plain WebDataset.
        flavor: a name of `FLAVORS`, `packed` for flavors of energon-packed, or "" to read each key by its parts.
        fields: (sample field, part) pairs of `field_map`.
        guess_reason: why keys are read by their parts although Energon would run code of the dataset.
        loader: code of the dataset that makes its samples; run only if `is_trusted`.
        has_packs: the sample class is a known packed class, so packs can be read without the code.
        is_trusted: the user allows `loader` to run.
        is_raw: an adapter gets the parts of each key by name.
        excluded: keys that split.yaml excludes; they are skipped.
    """

    file: Path | None = None
    flavor: str = ""
    fields: tuple[tuple[str, str], ...] = ()
    guess_reason: str = ""
    loader: SampleLoader | None = None
    has_packs: bool = False
    is_trusted: bool = False
    is_raw: bool = False
    excluded: frozenset[str] = frozenset()

    @property
    def is_guess(self) -> bool:
        """Whether keys are read by their parts, without the code that dataset.yaml refers to."""
        return bool(self.guess_reason) and not self.is_trusted and not self.is_raw

    def opened(self, *, trust_sample_loader: bool, for_adapter: bool) -> "Layout":
        """Apply the user's decision about the code of the dataset.

        Raises:
            SourceError: the dataset needs its code, which is not trusted, or which is trusted and cannot run.
        """
        if self.loader is not None and trust_sample_loader:
            self.loader.load()
            return replace(self, is_trusted=True)
        # An adapter replaces the code of the dataset. It gets raw parts only if no field_map or flavor applies.
        if for_adapter and (self.loader is not None or not self.flavor):
            return replace(self, flavor="", is_raw=True)
        if self.loader is not None and not self.has_packs:
            raise SourceError(
                f"{self.loader.file} defines how this dataset is read, and dataset code is not run by default. "
                "Set `trust_sample_loader` to run it, or pass an `adapter`."
            )
        if self.is_guess:
            _warn(self.file, self.guess_reason)
        return self

    def records(self, group: KeyMembers) -> list[Any]:
        """Read the records of a key.

        Raises:
            RecordError: the key cannot be used.
        """
        if group.key in self.excluded:
            return []
        if self.is_trusted and self.loader is not None:
            sample = self.loader.sample(group)
            return [sample_record(group, self.flavor, sample) if self.flavor in FLAVORS else sample]
        if self.is_raw:
            return raw_records(group)
        if self.flavor == "packed":
            group.check()
            return list(read_pack(group))
        if self.flavor:
            group.check()
            return [flavor_record(group, self.flavor, dict(self.fields))]
        return read_records(group)

    def digest(self) -> str:
        """Hex digest of everything that decides the records, including code that is run."""
        code = self.loader.digest() if self.loader is not None and self.is_trusted else ""
        # `file` is not included: a copy of the dataset elsewhere has the same records.
        content = [self.flavor, self.fields, sorted(self.excluded), self.is_raw, code]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def layout_of(tar: Path) -> Layout:
    """Find the layout of a tar: by the dataset.yaml of its dataset, or else by the names of parts.

    Raises:
        SourceError: dataset.yaml is invalid.
    """
    folder = dataset_of(tar)
    if folder is None:
        return Layout()
    file = folder / NV_META / DATASET_FILE
    layout = _read_layout(file, changed_at(file)) if file.is_file() else Layout()
    if not (folder / NV_META / SPLIT_FILE).is_file():
        return layout
    # split.yaml excludes single keys as `shard.tar/key`.
    shard = tar.absolute().relative_to(folder).as_posix() + "/"
    excluded = frozenset(name.removeprefix(shard) for name in split_of(folder).excluded if name.startswith(shard))
    return replace(layout, excluded=excluded) if excluded else layout


def dataset_of(tar: Path) -> Path | None:
    """Find the Energon dataset of a tar, or None."""
    for folder in [*tar.absolute().parents][:_LEVELS]:
        if (folder / NV_META).is_dir():
            return folder
    return None


def split_of(folder: Path) -> SplitFile:
    """Read the split.yaml of an Energon dataset.

    Raises:
        SourceError: the file is missing or invalid.
    """
    try:
        return read_split(folder)
    except FormatError as error:
        raise SourceError(str(error)) from error


@lru_cache(maxsize=64)
def _read_layout(file: Path, changed: int) -> Layout:
    try:
        value = of_type(read_yaml(file), dict)
        kind = of_type(value.get("sample_type") or value, dict)
        module, name = str(kind.get("__module__", "")), str(kind.get("__class__", ""))
        fields = tuple((str(field), str(part)) for field, part in of_type(value.get("field_map") or {}, dict).items())
    except (OSError, yaml.YAMLError, ValueError) as error:
        raise_resource_error(error, file)
        raise SourceError(f"{file} is not a valid dataset file: {type(error).__name__} {error}") from error
    if module == "energon_packed.flavors" or module.startswith("energon_packed."):
        return Layout(file, "packed")
    if name in CODECS and CODECS[name].packed:  # of another package: recognized by content, without running its code
        return Layout(file, "packed")
    flavor = name.removesuffix("Sample").removesuffix("Webdataset")
    is_standard = module == "megatron.energon" or module.startswith("megatron.energon.")
    if is_standard and name == "CrudeWebdataset":
        return Layout(file)
    # Only Energon's own classes: a custom class of the same name may have other fields.
    if fields and is_standard and flavor in FLAVORS:
        return Layout(file, flavor, fields)
    loader_name = value.get("sample_loader")
    reason = f"names {'a sample_loader for' if loader_name else 'the sample class'} {name}, code that is not run"
    if not loader_name:
        return Layout(file, guess_reason=reason)
    parts = value.get("part_filter")
    if not isinstance(loader_name, str) or not isinstance(parts, str | list):
        raise SourceError(f"{file} is not a valid dataset file: a sample_loader needs a name and a part_filter")
    loader = SampleLoader(file.parent, loader_name, parts if isinstance(parts, str) else tuple(map(str, parts)))
    known = flavor if is_standard and flavor in FLAVORS else ""
    return Layout(file, known, guess_reason=reason, loader=loader, has_packs=name in CODECS)


@lru_cache(maxsize=64)
def _warn(file: Path | None, reason: str) -> None:
    """Warn once per dataset, not once per tar."""
    _LOG.warning("%s %s; its samples are read by the names of their parts", file, reason)


def flavor_record(group: KeyMembers, flavor: str, field_map: Mapping[str, str]) -> dict[str, Any]:
    """Read a sample by its `field_map`.

    Args:
        group: the members of its key.
        flavor: a name of `FLAVORS`.
        field_map: part of each sample field, as in dataset.yaml.

    Raises:
        RecordError: a field is missing or has another type.
    """
    read, required, optional = FLAVORS[flavor]
    values: dict[str, Any] = {}
    for field in (*required, *optional):
        if field in field_map:
            values[field] = _value(group, field, field_map[field], is_required=field in required)
        elif field in required:
            raise RecordError(Reason.MISSING_FIELD, f"the field_map of {flavor}Sample has no {field}")
    unread = {name: part for name, part in field_map.items() if name not in (*required, *optional)}
    return {**unread, "id": group.key, **read(group, values)}


def sample_record(group: KeyMembers, flavor: str, sample: Fields) -> dict[str, Any]:
    """Convert a sample of a sample loader to a record.

    Args:
        group: the members of its key.
        flavor: a name of `FLAVORS`.
        sample: the fields of the sample and its `id`; images are references.

    Raises:
        RecordError: a field is missing or has another type.
    """
    read, required, optional = FLAVORS[flavor]
    if missing := [field for field in required if sample.get(field) is None]:
        raise RecordError(Reason.MISSING_FIELD, f"the sample loader returned no {missing[0]}; {flavor}Sample needs it")
    known = (*required, *optional)
    unread = {name: value for name, value in sample.items() if name not in known and value is not None}
    return {**unread, **read(group, {name: sample.get(name) for name in known})}


def _value(group: KeyMembers, field: str, description: str, *, is_required: bool) -> Any:
    """Read a `field_map` entry: the first of its alternatives that exists."""
    for alternative in description.split(","):
        match = _FIELD.fullmatch(alternative.strip())
        member = None if match is None else next((m for m in group.members if m.part == match["part"]), None)
        if match is None or member is None:
            continue
        try:
            value = _decoded(group, member)
            for key in re.findall(r"\[([^\[\]]+)\]", match["access"]):
                value = value[int(key)] if isinstance(value, list) else of_type(value, dict)[key]
        except EnergonPackedError:  # a ValueError, too
            raise
        # Energon tries the next alternative if a part or key is missing.
        except (LookupError, ValueError):
            continue
        return value
    if not is_required:
        return None
    parts = ", ".join(member.part for member in group.members)
    raise RecordError(Reason.MISSING_FIELD, f"{group.key} has no {description} for {field}; its parts are {parts}")


def _decoded(group: KeyMembers, member: Member) -> Any:
    """Decode a part like Energon's default decoder; an image, video or audio file stays a member."""
    if group.kind_of(member) is not None:
        return member
    if member.extension in JSON_PARTS:
        return group.json(member)
    text = group.text(member)
    return int(text) if member.extension in INTEGER_PARTS else text


def _captioning(group: KeyMembers, values: Fields, field: str = "caption") -> dict[str, Any]:
    return caption_record(group, _text(values, field), {"images": _media(group, values["image"], IMAGE)})


def _plain_text(group: KeyMembers, values: Fields) -> dict[str, Any]:
    return {"text": _text(values, "text")}


def _vqa(group: KeyMembers, values: Fields) -> dict[str, Any]:
    value = values["answers"]
    answers = [value] if isinstance(value, str) else value
    if not isinstance(answers, list) or not answers or not all(isinstance(answer, str) for answer in answers):
        raise RecordError(Reason.MISSING_FIELD, f"{group.key} has no answers; VQA needs one or more strings")
    weights = values.get("answer_weights")
    if weights is not None:
        if not isinstance(weights, list) or len(weights) != len(answers):
            raise RecordError(Reason.MISSING_FIELD, f"{group.key}: answer_weights needs one number per answer")
        # Energon's VQA samples have a weight per annotator answer.
        answer = max(zip(map(_weight, weights), answers, strict=True), key=lambda pair: pair[0])[1]
    else:
        answer = Counter(answers).most_common(1)[0][0]
    return _question(group, values, _text(values, "context"), answer)


def _weight(value: Any) -> float:
    try:
        return float(value if isinstance(value, int | float) else of_type(value, str))
    except (ValueError, OverflowError) as error:
        raise RecordError(Reason.MISSING_FIELD, f"answer_weights has {repr(value)[:80]}; use numbers") from error


def _multi_choice(group: KeyMembers, values: Fields) -> dict[str, Any]:
    choices, correct = values["choices"], values.get("correct_choice_idx", 0)
    if isinstance(correct, str) and re.fullmatch(r"\s*[0-9]{1,9}\s*", correct):
        correct = int(correct)
    is_valid = isinstance(choices, list) and 0 < len(choices) <= len(_LETTERS) and isinstance(correct, int)
    if not is_valid or not 0 <= correct < len(choices):
        raise RecordError(
            Reason.MISSING_FIELD,
            f"{group.key} needs 1 to {len(_LETTERS)} choices, and the index of one of them as correct_choice_idx",
        )
    lines = [f"{letter}. {choice}" for letter, choice in zip(_LETTERS, choices, strict=False)]
    return _question(group, values, "\n".join([_text(values, "context"), *lines, _INSTRUCTION]), _LETTERS[correct])


def _question(group: KeyMembers, values: Fields, prompt: str, answer: str) -> dict[str, Any]:
    kind = VIDEO if "video" in values else IMAGE
    return {kind.field: _media(group, values[kind.name], kind), "prompts": [prompt], "captions": [answer]}


def _interleaved(group: KeyMembers, values: Fields) -> dict[str, Any]:
    sequence = values["sequence"]
    if not isinstance(sequence, list):
        raise RecordError(Reason.MISSING_FIELD, f"{group.key}: sequence is {type(sequence).__name__}, not a list")
    images: list[MediaReference] = []
    videos: list[VideoReference] = []
    texts: list[str] = []
    for item in sequence:
        member = group.find(item) if isinstance(item, str) else item if isinstance(item, Member) else None
        if isinstance(item, VideoReference) or (member is not None and group.kind_of(member) is VIDEO):
            videos += _media(group, item, VIDEO)
            texts.append(VIDEO_PLACEHOLDER)
        elif isinstance(item, MediaReference | Member) or (member is not None and member.extension in IMAGE_PARTS):
            images += _media(group, item, IMAGE)
            texts.append(IMAGE_PLACEHOLDER)
        elif isinstance(item, str):
            texts.append(item)
        else:
            raise RecordError(Reason.MISSING_FIELD, f"{group.key}: sequence has {type(item).__name__}")
    return {"text": "".join(texts), "images": images, **({"videos": videos} if videos else {})}


def _best(scores: Any) -> int | None:
    """Index of the largest score; None if the scores are not a list of numbers."""
    is_valid = isinstance(scores, list) and all(isinstance(score, int | float) for score in scores)
    return max(range(len(scores)), key=scores.__getitem__) if is_valid else None


def _similarity(group: KeyMembers, values: Fields) -> dict[str, Any]:
    for name in ("audio", "video"):
        if values.get(name):
            raise RecordError(
                Reason.UNSUPPORTED_MEDIA, f"{group.key} has {name}, which a SimilarityInterleavedSample cannot place"
            )
    texts, images = values["texts"], _media(group, values["images"], IMAGE)
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise RecordError(Reason.MISSING_FIELD, f"{group.key}: texts must be a list of strings")
    matched: Any = values.get("matched_text_indices")
    if matched is None and isinstance(values.get("similarity_matrix"), list):
        matched = [_best(row) for row in values["similarity_matrix"] if row]
    is_valid = isinstance(matched, list) and len(matched) == len(images)
    if not is_valid or not all(isinstance(index, int) and 0 <= index < len(texts) for index in matched):
        raise RecordError(
            Reason.MISSING_FIELD,
            f"{group.key} needs matched_text_indices or a similarity_matrix, with one text for each of its "
            f"{len(images)} images",
        )
    # Images of the same text stay in the order of the sample.
    order = sorted(range(len(images)), key=lambda image: (matched[image], image))
    counts: Counter[int] = Counter(matched)
    marked = [IMAGE_PLACEHOLDER * counts[index] + text for index, text in enumerate(texts)]
    return {"text": " ".join(marked), "images": [images[image] for image in order]}


FLAVORS: dict[str, tuple[Callable[[KeyMembers, Fields], dict[str, Any]], tuple[str, ...], tuple[str, ...]]] = {
    "Captioning": (_captioning, ("image", "caption"), ()),
    "VQA": (_vqa, ("image", "context", "answers"), ("answer_weights",)),
    "VidQA": (_vqa, ("video", "context", "answers"), ("answer_weights",)),
    "MultiChoiceVQA": (_multi_choice, ("image", "context", "choices"), ("correct_choice_idx",)),
    "OCR": (partial(_captioning, field="text"), ("image", "text"), ()),
    "Interleaved": (_interleaved, ("sequence",), ()),
    "SimilarityInterleaved": (
        _similarity,
        ("images", "texts"),
        ("matched_text_indices", "similarity_matrix", "audio", "video"),
    ),
    "Text": (_plain_text, ("text",), ()),
}
"""Reader, required fields and optional fields of each flavor, by its class name without `Sample`."""


def _text(values: Fields, field: str) -> str:
    value = values[field]
    if not isinstance(value, str):
        raise RecordError(Reason.MISSING_FIELD, f"{field} is {type(value).__name__}, not text")
    return value


def _media(group: KeyMembers, value: Any, kind: MediaKind) -> list[Any]:
    """Make references to images or videos: members, names of members, or lists of both."""
    if isinstance(value, list):
        return [file for item in value for file in _media(group, item, kind)]
    if isinstance(value, VideoReference if kind is VIDEO else MediaReference):
        return [value]
    member = group.find(value) if isinstance(value, str) else value
    if not isinstance(member, Member) or group.kind_of(member) is not kind:
        raise RecordError(kind.missing, f"{group.key} has no {kind.name} {str(value)[:80]!r}")
    return [group.media(member)]
