"""Record shapes, one file each, tried in this order; the first that matches reads the record.

    messages           {"messages": [{"role", "content": "... <image> ..." or typed parts}], "images": [...]}
    sharegpt           {"conversations" or "conversation": [{"from", "value"}], "images": [...]}
    contents           {"contents": [{"role", "parts": [{"text"}, {"inline_data"}]}]}                   Gemini
    captions           {"images": [...], "prompts": [...], "captions": [...]}    flat or list of lists, several turns
    tokens             {"input_ids": [...], "labels": [...] or "loss_mask": [...]}
    document           {"text": "..."}                                           every token supervised

A new shape is one subclass of `Shape` with `@register_shape`.
"""

from energon_packed.errors import Reason, RecordError
from energon_packed.records.accounting import check_preference
from energon_packed.records.fields import Record, key_names
from energon_packed.records.shapes.captions import Captions
from energon_packed.records.shapes.contents import Contents
from energon_packed.records.shapes.document import Document
from energon_packed.records.shapes.messages import Messages
from energon_packed.records.shapes.shape import Draft, Shape
from energon_packed.records.shapes.sharegpt import ShareGPT
from energon_packed.records.shapes.tokens import Tokens

SHAPES: list[Shape] = [Messages(), ShareGPT(), Contents(), Captions(), Tokens(), Document()]


def register_shape(shape: type[Shape]) -> type[Shape]:
    """Add a shape of your own (a class decorator); it is tried before the built-in ones."""
    SHAPES.insert(0, shape())
    return shape


def shape_of(record: Record) -> Shape:
    """The first shape that matches.

    Raises:
        RecordError: `missing_field`, none does.
    """
    for shape in SHAPES:
        if shape.matches(record):
            return shape
    check_preference(record)
    raise RecordError(
        Reason.MISSING_FIELD,
        f"none of {', '.join(shape.key for shape in SHAPES)} in a record with the keys {key_names(record) or 'none'}; "
        "name its fields with a `map`, or convert it with an `adapter`",
    )


__all__ = ["SHAPES", "Draft", "Shape", "register_shape", "shape_of"]
