"""A prompt and what follows it, as texts or as lists of messages.

    TRL              {"prompt": "...", "completion": "..."} or {"prompt": [messages], "completion": [messages]}
    prompt/response  {"prompt", "response"}
    ms-swift         {"query", "response", "history": [[question, answer]], "system"}
    input/output     {"input", "output"}; {"input", "target"} of Firefly, {"inputs", "targets"} of FLAN and Aya,
                     {"input_text", "output_text"} of PaLM on Vertex
    definition       of a task stands before inputs, with a blank line between, as in Natural Instructions

Texts become a user turn and an assistant turn. In lists of messages, assistant turns of the prompt are context, not
targets: TRL computes the loss on the completion. `label` true or false is KTO's preference data: out of
scope.
"""

from typing import Any, ClassVar

from energon_packed.records.conversation import Message
from energon_packed.records.fields import COMMON_FIELDS, Record, is_given, joined_texts, read_text, unsupported
from energon_packed.records.media_fields import Media
from energon_packed.records.shapes.shape import Draft, Shape
from energon_packed.records.turns import read_history, read_messages

_PAIRS = (
    ("prompt", "completion"),
    ("prompt", "response"),
    ("query", "response"),
    ("input", "output"),
    ("input", "target"),
    ("inputs", "targets"),
    ("input_text", "output_text"),
)
_PROMPTS = frozenset(prompt for prompt, _ in _PAIRS)
_NAMES = tuple(dict.fromkeys(name for pair in _PAIRS for name in pair))


class PromptCompletion(Shape):
    """One prompt and one completion."""

    key = "prompt"
    fields: ClassVar[frozenset[str]] = COMMON_FIELDS | {"history", "definition", *_NAMES}
    images_lead: ClassVar[bool] = True

    def matches(self, record: Record) -> bool:
        """Whether one of the pairs is there."""
        return _pair(record) is not None

    def read(self, record: Record, media: Media) -> Draft:
        """The turns of the history, the prompt and the completion."""
        pair = _pair(record)
        assert pair is not None
        if isinstance(record.get("label"), bool):
            raise unsupported("label", remedy="preference data is out of scope; keep the completions to learn from")
        for name in _NAMES:
            if name not in pair and is_given(record.get(name)):
                raise unsupported(
                    name, remedy=f"it is not read beside {pair[0]} and {pair[1]}; name fields with a `map`"
                )
        prompt, completion = (_messages(record[name], name, media) for name in pair)
        if is_given(record.get("definition")):
            if not isinstance(record[pair[0]], str):
                raise unsupported("definition", remedy=f"{pair[0]} is a list of messages; write it as the system turn")
            prompt = [Message("user", joined_texts(record, ("definition", pair[0])))]
        context = [message._replace(weight=0.0) if message.role == "assistant" else message for message in prompt]
        return Draft(messages=[*read_history(record), *context, *completion])


def _pair(record: Record) -> tuple[str, str] | None:
    """The names of prompt and completion in this record."""
    return next((pair for pair in _PAIRS if all(is_given(record.get(name)) for name in pair)), None)


def _messages(value: Any, name: str, media: Media) -> list[Message]:
    if isinstance(value, list | tuple):
        return read_messages(value, name, media)
    role = "user" if name in _PROMPTS else "assistant"
    return [Message(role, read_text(value, name))]
