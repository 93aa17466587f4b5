"""Objects of a record: names and boxes that replace `<ref-object>` and `<bbox>` in the text, as in ms-swift.

    {"ref": ["a dog"], "bbox": [[331.5, 761.4, 853.5, 1594.8]], "bbox_type": "real", "image_id": [0]}

`ref[k]` replaces the k-th `<ref-object>` of all turns, `bbox[k]` the k-th `<bbox>`. A box is (x, y) or (x, y, x, y),
in pixels of its image, or from 0 to 1 if `bbox_type` is `norm1`. `image_id[k]` is the index of its image, by default
0.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from energon_packed.records.fields import OBJECT, is_given, is_number, shown, unsupported_field

REF_PLACEHOLDER, BOX_PLACEHOLDER = "<ref-object>", "<bbox>"
BOX_REMEDY = (
    f"write the boxes into the text in place of {REF_PLACEHOLDER} and {BOX_PLACEHOLDER}, in the coordinates of the "
    "model, with an `adapter`"
)
_FIELDS = ("ref", "bbox", "bbox_type", "image_id")
_TYPES = ("real", "norm1")
_LARGEST = 1e9


def read_objects(value: Any, contents: Sequence[str], images: int) -> dict[str, Any]:
    """Return objects with ordered corners and an image for each box.

    Args:
        value: the objects; the result of an earlier call stays as it is.
        contents: the content of each turn.
        images: number of images of the record.

    Raises:
        RecordError: `unsupported_field`, if a value is not one of the forms above, or if names or boxes are more or
            fewer than their placeholders.
    """
    if not isinstance(value, OBJECT):
        raise unsupported_field(f"objects must be an object with ref and bbox, not {type(value).__name__}")
    if others := [name for name in value if name not in _FIELDS and is_given(value[name])]:
        raise unsupported_field(f"objects have {others[0]}; only {', '.join(_FIELDS)} are read, remove it")
    names, boxes = _listed(value, "ref"), [_box(box) for box in _listed(value, "bbox")]
    for placeholder, items in ((REF_PLACEHOLDER, names), (BOX_PLACEHOLDER, boxes)):
        count = sum(text.count(placeholder) for text in contents)
        if count != len(items):
            kind = "names (ref)" if items is names else "boxes (bbox)"
            raise unsupported_field(f"{count} {placeholder} placeholders for {len(items)} {kind} of objects")
    for name in names:
        if not isinstance(name, str):
            raise unsupported_field(f"a name (ref) of objects is {shown(name)}; use text")
    kind = value.get("bbox_type") or _TYPES[0]
    if kind not in _TYPES:
        raise unsupported_field(f"bbox_type of objects is {shown(kind)}; use {' or '.join(_TYPES)}")
    ids = _listed(value, "image_id")
    if len(ids) > len(boxes):
        raise unsupported_field(f"objects have {len(ids)} image_id for {len(boxes)} boxes")
    ids += [0] * (len(boxes) - len(ids))
    for image in ids:
        if type(image) is not int or not 0 <= image < images:
            raise unsupported_field(f"a box of objects is in image {shown(image)}, and the record has {images} images")
    return {"ref": names, "bbox": boxes, "bbox_type": kind, "image_id": ids}


def _listed(value: Mapping[str, Any], name: str) -> list[Any]:
    items = value.get(name)
    if items is not None and not isinstance(items, list | tuple):
        raise unsupported_field(f"{name} of objects must be a list, not {type(items).__name__}")
    return list(items or ())


def _box(value: Any) -> list[float]:
    """Coordinates of a box; the first corner is left above the second."""
    is_list = isinstance(value, list | tuple) and len(value) in (2, 4)
    if not is_list or not all(is_number(number) and abs(number) <= _LARGEST for number in value):
        raise unsupported_field(f"a box of objects is {shown(value)}; use x, y or x, y, x, y")
    if len(value) == 2:
        return list(value)
    left, top, right, bottom = value
    return [min(left, right), min(top, bottom), max(left, right), max(top, bottom)]
