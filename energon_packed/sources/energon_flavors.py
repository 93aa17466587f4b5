"""Samples of Energon's standard flavors, by the `field_map` of a dataset, as records.

    Captioning             image, caption
    VQA                    image, context, answers (the one with the largest weight, else the most frequent)
    MultiChoiceVQA         image, context, choices as lettered lines; the letter of the correct one is the answer
    OCR                    image, text
    Interleaved            sequence of texts and images, a document
    SimilarityInterleaved  texts and images, each image before the text that it is matched to, a document
    Text                   text

A field is a part, `part[key][index]` inside a JSON part, or alternatives separated by commas, as Energon reads it
(megatron/energon/flavors/webdataset/field_access.py).
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from energon_packed.errors import Reason, RecordError
from energon_packed.records import IMAGE_PLACEHOLDER, MediaReference
from energon_packed.sources.tar_records import IMAGE_PARTS, KeyMembers, caption_record
from energon_packed.tarfiles import Member

_FIELD = re.compile(r"(?P<part>[^\[\]]+)(?P<access>(?:\[[^\[\]]+\])*)")
_INTEGERS = ("cls", "cls2", "class", "count", "index", "inx", "id")
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_INSTRUCTION = "Answer with the option's letter from the given choices directly."
Fields = Mapping[str, Any]


def flavor_record(group: KeyMembers, flavor: str, field_map: Mapping[str, str]) -> dict[str, Any]:
    """The record of one sample.

    Args:
        group: the members of its key.
        flavor: a name of `FLAVORS`.
        field_map: from fields of the sample to parts, as in dataset.yaml.

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
    """The record of a sample that a sample loader has made.

    Args:
        group: the members of its key.
        flavor: a name of `FLAVORS`.
        sample: its fields, and `id`; images are references.

    Raises:
        RecordError: a field is missing or has another type.
    """
    read, required, optional = FLAVORS[flavor]
    if missing := [field for field in required if sample.get(field) is None]:
        raise RecordError(Reason.MISSING_FIELD, f"the sample loader returned no {missing[0]}; {flavor}Sample needs it")
    known = (*required, *optional)
    unread = {name: value for name, value in sample.items() if name not in known and value is not None}
    return {**unread, **read(group, {name: sample.get(name) for name in known})}


def _captioning(group: KeyMembers, values: Fields) -> dict[str, Any]:
    return caption_record(group, _text(values, "caption"), _images(group, values["image"]))


def _ocr(group: KeyMembers, values: Fields) -> dict[str, Any]:
    return caption_record(group, _text(values, "text"), _images(group, values["image"]))


def _plain_text(group: KeyMembers, values: Fields) -> dict[str, Any]:
    return {"text": _text(values, "text")}


def _vqa(group: KeyMembers, values: Fields) -> dict[str, Any]:
    given = values["answers"]
    answers = [given] if isinstance(given, str) else given
    if not isinstance(answers, list) or not answers or not all(isinstance(answer, str) for answer in answers):
        raise RecordError(Reason.MISSING_FIELD, f"{group.key} has no answers; VQA needs one or more texts")
    weights = values.get("answer_weights")
    if weights is not None:
        if not isinstance(weights, list) or len(weights) != len(answers):
            raise RecordError(Reason.MISSING_FIELD, f"{group.key}: answer_weights needs one number per answer")
        answer = max(zip(map(_weight, weights), answers, strict=True), key=lambda pair: pair[0])[1]
    else:
        answer = Counter(answers).most_common(1)[0][0]
    return _question(group, values, _text(values, "context"), answer)


def _weight(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise RecordError(Reason.MISSING_FIELD, f"answer_weights holds {repr(value)[:80]}; use numbers") from error


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
    return {"images": _images(group, values["image"]), "prompts": [prompt], "captions": [answer]}


def _interleaved(group: KeyMembers, values: Fields) -> dict[str, Any]:
    sequence = values["sequence"]
    if not isinstance(sequence, list):
        raise RecordError(Reason.MISSING_FIELD, f"{group.key}: sequence is {type(sequence).__name__}, not a list")
    images: list[MediaReference] = []
    texts: list[str] = []
    for item in sequence:
        member = group.find(item) if isinstance(item, str) else None
        if isinstance(item, MediaReference | Member) or (member is not None and member.extension in IMAGE_PARTS):
            images += _images(group, item)
            texts.append(IMAGE_PLACEHOLDER)
        elif isinstance(item, str):
            texts.append(item)
        else:
            raise RecordError(Reason.MISSING_FIELD, f"{group.key}: sequence holds {type(item).__name__}")
    return {"text": "".join(texts), "images": images}


def _best(row: Any) -> int | None:
    """Place of the largest number; None where they are not numbers."""
    is_row = isinstance(row, list) and all(isinstance(one, int | float) for one in row)
    return max(range(len(row)), key=row.__getitem__) if is_row else None


def _similarity(group: KeyMembers, values: Fields) -> dict[str, Any]:
    for name in ("audio", "video"):
        if values.get(name):
            raise RecordError(Reason.UNSUPPORTED_MEDIA, f"{group.key} has {name}, which is not supported")
    texts, images = values["texts"], _images(group, values["images"])
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise RecordError(Reason.MISSING_FIELD, f"{group.key}: texts must be a list of texts")
    matched: Any = values.get("matched_text_indices")
    if matched is None and isinstance(values.get("similarity_matrix"), list):
        matched = [_best(row) for row in values["similarity_matrix"] if row]
    is_valid = isinstance(matched, list) and len(matched) == len(images)
    if not is_valid or not all(isinstance(place, int) and 0 <= place < len(texts) for place in matched):
        raise RecordError(
            Reason.MISSING_FIELD,
            f"{group.key} needs matched_text_indices or a similarity_matrix, with one text for each of its "
            f"{len(images)} images",
        )
    order = sorted(range(len(images)), key=lambda image: (matched[image], image))
    counts: Counter[int] = Counter(matched)
    marked = [IMAGE_PLACEHOLDER * counts[place] + text for place, text in enumerate(texts)]
    return {"text": " ".join(marked), "images": [images[image] for image in order]}


FLAVORS: dict[str, tuple[Callable[[KeyMembers, Fields], dict[str, Any]], tuple[str, ...], tuple[str, ...]]] = {
    "Captioning": (_captioning, ("image", "caption"), ()),
    "VQA": (_vqa, ("image", "context", "answers"), ("answer_weights",)),
    "MultiChoiceVQA": (_multi_choice, ("image", "context", "choices"), ("correct_choice_idx",)),
    "OCR": (_ocr, ("image", "text"), ()),
    "Interleaved": (_interleaved, ("sequence",), ()),
    "SimilarityInterleaved": (
        _similarity,
        ("images", "texts"),
        ("matched_text_indices", "similarity_matrix", "audio", "video"),
    ),
    "Text": (_plain_text, ("text",), ()),
}
"""Reader, required fields and optional fields of each flavor, by its name without Sample."""


def _text(values: Fields, field: str) -> str:
    value = values[field]
    if not isinstance(value, str):
        raise RecordError(Reason.MISSING_FIELD, f"{field} is {type(value).__name__}, not text")
    return value


def _images(group: KeyMembers, value: Any) -> list[MediaReference]:
    """References to images: members, their names, or lists of them."""
    if isinstance(value, list):
        return [image for item in value for image in _images(group, item)]
    if isinstance(value, MediaReference):
        return [value]
    member = group.find(value) if isinstance(value, str) else value
    if not isinstance(member, Member) or member.extension not in IMAGE_PARTS:
        raise RecordError(Reason.MISSING_IMAGE, f"{group.key} has no image {str(value)[:80]!r}")
    return [group.reference(member)]


def _value(group: KeyMembers, field: str, description: str, *, is_required: bool) -> Any:
    """What a `field_map` entry stands for; the first alternative that exists."""
    for one in description.split(","):
        found = _FIELD.fullmatch(one.strip())
        member = None if found is None else next((m for m in group.members if m.part == found["part"]), None)
        if found is None or member is None:
            continue
        try:
            value = _decoded(group, member)
            for key in re.findall(r"\[([^\[\]]+)\]", found["access"]):
                value = value[int(key)] if isinstance(value, list) else value[key]
        except RecordError:
            raise
        except (LookupError, TypeError, ValueError):
            continue
        return value
    if not is_required:
        return None
    parts = ", ".join(member.part for member in group.members)
    raise RecordError(Reason.MISSING_FIELD, f"{group.key} has no {description} for {field}; its parts are {parts}")


def _decoded(group: KeyMembers, member: Member) -> Any:
    """A part as Energon's default decoder gives it; an image stays a member."""
    if member.extension in IMAGE_PARTS:
        return member
    if member.extension in ("json", "jsn"):
        return group.json(member)
    text = group.text(member)
    return int(text) if member.extension in _INTEGERS else text
