"""Renderer: a conversation becomes the text that is tokenized, and which of its characters are supervised."""

from collections.abc import Sequence
from typing import Any, Literal

from energon_packed.conversation import IMAGE_PLACEHOLDER, Conversation
from energon_packed.encoding.skeleton import Skeleton, Span
from energon_packed.encoding.template import ChatTemplate
from energon_packed.errors import Reason, RecordError

LossOn = Literal["assistant", "last", "all"]
LOSS_ON: tuple[LossOn, ...] = ("assistant", "last", "all")


class Renderer:
    """Renders messages by the chat template, from a skeleton where that is proved to give the same text.

    Attributes:
        template: the tokenizer's.
        placeholder: what stands for an image in the text of the vision family; None where there is none.
        end: what is put after a document; "" where the tokenizer does that.
        loss_on: which text is supervised: every assistant turn, the last one, or all text.
    """

    def __init__(self, template: ChatTemplate, *, placeholder: str | None, end: str, loss_on: LossOn) -> None:
        self.template = template
        self.placeholder = placeholder
        self.end = end
        self.loss_on = loss_on

    def document(self, conversation: Conversation) -> str:
        """A `text` record with its end."""
        text = conversation.text
        assert text is not None
        if conversation.images:
            text = self._with_placeholders([text])[0]
        return text if text.endswith(self.end) else text + self.end

    def messages(self, conversation: Conversation) -> str:
        """The rendered messages.

        Raises:
            ConfigError, RecordError: as `ChatTemplate.render`.
        """
        if skeleton := self._skeleton(conversation):
            return skeleton.join(self._contents(conversation))
        return self.template.render(self._as_dicts(conversation), conversation.tools)

    def messages_and_spans(self, conversation: Conversation) -> tuple[str, list[Span]]:
        """The rendered messages and the supervised characters.

        Raises:
            ConfigError, RecordError, TemplateError: as `ChatTemplate.render_with_spans`.
        """
        if self.loss_on == "all":
            text = self.messages(conversation)
            return text, [(0, len(text))]
        if skeleton := self._skeleton(conversation):
            contents = self._contents(conversation)
            spans = skeleton.spans(contents)
            return skeleton.join(contents), spans[-1:] if self.loss_on == "last" else spans
        messages = self._as_dicts(conversation)
        text, spans = self.template.render_with_spans(messages, conversation.tools)
        if self.loss_on == "last":
            spans = self.template.last_turn(text, spans, messages, conversation.tools)
        return text, spans

    def supervised_text(self, conversation: Conversation) -> str:
        """The text of a document or messages, where the template can tell what of it the assistant wrote.

        Raises:
            RecordError: nothing is supervised; or as `messages_and_spans`.
        """
        if conversation.text is not None:
            return self.document(conversation)
        if self.loss_on == "all":
            return self.messages(conversation)
        if not any([message.role == "assistant" for message in conversation.messages]):
            roles = ", ".join(message.role for message in conversation.messages)
            raise RecordError(Reason.NO_SUPERVISED_TOKENS, f"no assistant turn among {roles}")
        if conversation.messages[-1].content and (skeleton := self._skeleton(conversation)):
            return skeleton.join(self._contents(conversation))  # a skeleton always can tell
        text, spans = self.messages_and_spans(conversation)
        if not any(end > start for start, end in spans):
            raise RecordError(
                Reason.NO_SUPERVISED_TOKENS, "the chat template renders or marks no text of the assistant"
            )
        return text

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
        assert self.placeholder is not None, "images are refused before, where no vision family is set"
        return [text.replace(IMAGE_PLACEHOLDER, self.placeholder) for text in texts]
