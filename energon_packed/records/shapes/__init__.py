"""Record shapes, one file each, tried in this order; the first that matches reads the record.

    messages           {"messages": [{"role", "content": "... <image> ..." or typed parts}], "images": [...]}
    sharegpt           {"conversations" or "conversation": [{"from", "value"}], "images": [...]}
    contents           {"contents": [{"role", "parts": [{"text"}, {"inline_data"}]}]}                 Gemini
    captions           {"images": [...], "prompts": [...], "captions": [...]}  flat or list of lists, several turns
    tokens             {"input_ids": [...], "labels": [...] or "loss_mask": [...]}
    instruction        {"instruction", "input" or "context", "output" or "response"}                  Alpaca, Dolly
    problem            {"problem", "solution" or "generated_solution" or "answer"}                    NuminaMath
    question_answer    {"query", "tools", "answers"} (xLAM), {"question", "answer", "choices"}        VQA, ScienceQA
    prompt_completion  {"prompt", "completion" or "response"}, {"query", "response", "history"}       TRL, ms-swift
    texts_images       {"images": [...], "texts": [{"user", "assistant"}]}                            the Cauldron
    alternating        {"data": ["question", "answer", ...]}                                          UltraChat
    interleaved        {"texts": ["...", None], "images": [None, "a.jpg"]}, {"text_list", "image_info"}  OBELICS, mmc4
    caption            {"image", "caption"}, {"image", "text"}
    document           {"text": "..."}                                         every token supervised

A new shape is one subclass of `Shape` with `@register_shape`.
"""

from energon_packed.errors import Reason, RecordError
from energon_packed.records.accounting import check_preference
from energon_packed.records.fields import Record, key_names
from energon_packed.records.shapes.alternating import Alternating
from energon_packed.records.shapes.caption import Caption, ImageText
from energon_packed.records.shapes.captions import Captions
from energon_packed.records.shapes.contents import Contents
from energon_packed.records.shapes.document import Document
from energon_packed.records.shapes.instruction import Instruction
from energon_packed.records.shapes.interleaved import Interleaved, SentencesImages
from energon_packed.records.shapes.messages import Messages
from energon_packed.records.shapes.problem import Problem
from energon_packed.records.shapes.prompt_completion import PromptCompletion
from energon_packed.records.shapes.question_answer import QueryCalls, QuestionAnswer
from energon_packed.records.shapes.shape import Draft, Shape
from energon_packed.records.shapes.sharegpt import ShareGPT
from energon_packed.records.shapes.texts_images import TextsImages
from energon_packed.records.shapes.tokens import Tokens

SHAPES: list[Shape] = [
    Messages(),
    ShareGPT(),
    Contents(),
    Captions(),
    Tokens(),
    Instruction(),
    Problem(),
    QueryCalls(),
    QuestionAnswer(),
    PromptCompletion(),
    TextsImages(),
    Alternating(),
    Interleaved(),
    SentencesImages(),
    Caption(),
    ImageText(),
    Document(),
]


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
    keys = ", ".join(dict.fromkeys(shape.key for shape in SHAPES))
    raise RecordError(
        Reason.MISSING_FIELD,
        f"none of {keys} in a record with the keys {key_names(record) or 'none'}; "
        "name its fields with a `map`, or convert it with an `adapter`",
    )


__all__ = ["SHAPES", "Draft", "Shape", "register_shape", "shape_of"]
