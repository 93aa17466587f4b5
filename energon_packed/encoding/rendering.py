"""Renderer: a conversation becomes the text that is tokenized, and which of its characters are supervised."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from energon_packed.encoding.skeleton import Skeleton, Span
from energon_packed.encoding.template import ChatTemplate
from energon_packed.records import IMAGE_PLACEHOLDER, Conversation

LossOn = Literal["assistant", "last", "all"]
LOSS_ON: tuple[LossOn, ...] = ("assistant", "last", "all")


class Rendered(NamedTuple):
    """Text of a conversation.

    Attributes:
        text: as it is tokenized.
        spans: supervised characters, [start, end) each; None supervises every token.
        is_document: the tokenizer adds its own special tokens around it.
    """

    text: str
    spans: Sequence[Span] | None
    is_document: bool


class Renderer:
    """Renders messages by the chat template, from a skeleton where that is proved to give the same text.

    Attributes:
        template: the tokenizer's.
        placeholder: what stands for an image in the text of the vision family; None where there is none.
        end: appended to a document; "" where the tokenizer does that.
        loss_on: which text is supervised: every assistant turn, the last one, or all text.
    """

    def __init__(self, template: ChatTemplate, *, placeholder: str | None, end: str, loss_on: LossOn) -> None:
        self.template = template
        self.placeholder = placeholder
        self.end = end
        self.loss_on = loss_on

    def render(self, conversation: Conversation) -> Rendered:
        """Text and supervised characters of messages or a document.

        Raises:
            ConfigError, RecordError, TemplateError: as `ChatTemplate.render_with_spans`.
        """
        if conversation.text is not None:
            return Rendered(self._document(conversation), None, True)
        skeleton = self._skeleton(conversation)
        if skeleton is not None:
            contents = self._contents(conversation)
            text = skeleton.join(contents)
            if self.loss_on == "all":
                return Rendered(text, None, False)
            spans = skeleton.spans(contents)
            return Rendered(text, spans[-1:] if self.loss_on == "last" else spans, False)
        messages = self._as_dicts(conversation)
        if self.loss_on == "all":
            return Rendered(self.template.render(messages, conversation.tools), None, False)
        text, spans = self.template.render_with_spans(messages, conversation.tools)
        if self.loss_on == "last":
            spans = self.template.last_turn(text, spans, messages, conversation.tools)
        return Rendered(text, spans, False)

    def _document(self, conversation: Conversation) -> str:
        text = conversation.text or ""
        if conversation.images:
            text = self._with_placeholders([text])[0]
        return text if text.endswith(self.end) else text + self.end

    def _skeleton(self, conversation: Conversation) -> Skeleton | None:
        """The fixed text around the contents, where that is all there is to rendering this conversation."""
        messages = conversation.messages
        if conversation.tools or any([message.extra for message in messages]):
            return None
        return self.template.skeleton(tuple([message.role for message in messages]))

    def _as_dicts(self, conversation: Conversation) -> list[dict[str, Any]]:
        columns = zip(conversation.messages, self._contents(conversation), strict=True)
        return [{**message.as_dict(), "content": content} for message, content in columns]

    def _contents(self, conversation: Conversation) -> list[str]:
        contents = [message.content for message in conversation.messages]
        return self._with_placeholders(contents) if conversation.images else contents

    def _with_placeholders(self, texts: Sequence[str]) -> list[str]:
        assert self.placeholder is not None, "images are rejected earlier, where no vision family is set"
        return [text.replace(IMAGE_PLACEHOLDER, self.placeholder) for text in texts]
