"""Renderer: a Conversation -> the text to tokenize and its supervised characters.

Messages are rendered by the chat template (`template.py`), or faster by a skeleton if it is proved to produce the same
text. Documents get their end-of-text token. `loss_on` and the weights of turns select the supervised characters.
"""

import json
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import accumulate
from typing import Any, Literal, NamedTuple

from energon_packed.encoding.completeness import Messages, check_rendered, turn_places
from energon_packed.encoding.skeleton import Span
from energon_packed.encoding.special_text import EscapedText, SpecialText
from energon_packed.encoding.template import RESULT_TAGS, ChatTemplate
from energon_packed.encoding.vision.families import BoxFormat
from energon_packed.encoding.vision.positions import ImageRun
from energon_packed.errors import Reason, RecordError
from energon_packed.records import Conversation, Message
from energon_packed.records.conversation import LOSS_WEIGHTS, is_loss_weight
from energon_packed.records.media.kinds import IMAGE, MEDIA_KINDS, MediaKind
from energon_packed.records.objects import BOX_PLACEHOLDER, REF_PLACEHOLDER

LossOn = Literal["assistant", "last", "all"]
_OBJECTS = re.compile(f"{REF_PLACEHOLDER}|{BOX_PLACEHOLDER}")
_MOST_VARIABLES = 64  # cached templates with variables of records
LOSS_ON: tuple[LossOn, ...] = ("assistant", "last", "all")


class Rendered(NamedTuple):
    """Rendered text of a conversation.

    Attributes:
        text: the text to tokenize.
        spans: supervised characters, [start, end) each; None supervises every token.
        is_document: the tokenizer adds its own special tokens around it.
        weights: loss weight of each span, above 0; None if all weights are 1.
        values: per-token values of each span by name; None if no turn has any.
    """

    text: str
    spans: Sequence[Span] | None
    is_document: bool
    weights: Sequence[float] | None = None
    values: Sequence[Mapping[str, float]] | None = None


@dataclass(eq=False)
class Renderer:
    """Renders conversations by a chat template.

    Attributes:
        template: chat template of the tokenizer.
        placeholders: text of an image, a video and an audio file that is not a content part, by the name of the kind;
            only of kinds that the families have.
        end: token to append to a document; "" if the tokenizer appends it, None if it has no such token.
        loss_on: supervised text: every assistant turn, only the last assistant turn, or all text.
        boxes: text of names and boxes; None without a family, or for a family without boxes.
        gap: pattern of text after an image that gets a space in front; "" for none.
        special: escapes special tokens that conversations contain; None makes them control tokens.
    """

    template: ChatTemplate
    _: KW_ONLY
    placeholders: Mapping[str, str]
    end: str | None
    loss_on: LossOn
    boxes: BoxFormat | None = None
    gap: str = ""
    special: SpecialText | None = None
    _of_variables: dict[str, "Renderer"] = field(default_factory=dict, init=False, repr=False)

    def render(
        self, conversation: Conversation, runs: Sequence[ImageRun] = (), audios: Sequence[ImageRun] = ()
    ) -> Rendered:
        """Render messages or a document.

        Args:
            conversation: messages or a document.
            runs: its images and videos, in order.
            audios: its audio files, in order.

        Raises:
            ConfigError, RecordError, TemplateError: as `ChatTemplate.render_with_spans`.
        """
        escaped = self.escaped(conversation)
        own = self.of_record(escaped)
        rendered = own.with_placeholders(own.by_template(escaped), escaped)
        tokens = self.template.tokens
        for token, is_video in ((self.placeholders.get("image"), False), (tokens.get("video"), True)):
            rendered = self._with_edges(rendered, token, [run.edges for run in runs if run.is_video == is_video])
        rendered = self._with_edges(rendered, tokens.get("audio"), [run.edges for run in audios], gap="")
        return rendered if escaped is conversation else rendered._replace(text=EscapedText(rendered.text))

    def of_record(self, conversation: Conversation) -> "Renderer":
        """Return the renderer with the variables that an escaped conversation sets for the template.

        Raises:
            RecordError: as `ChatTemplate.with_variables`.
        """
        if not conversation.chat_template_kwargs:
            return self
        key = json.dumps(conversation.chat_template_kwargs, sort_keys=True, default=str)
        if (found := self._of_variables.pop(key, None)) is None:
            found = replace(self, template=self.template.with_variables(conversation.chat_template_kwargs))
            if len(self._of_variables) >= _MOST_VARIABLES:
                del self._of_variables[next(iter(self._of_variables))]  # the least recently used
        self._of_variables[key] = found
        return found

    def with_placeholders(self, rendered: Rendered, conversation: Conversation) -> Rendered:
        """Replace the template's tokens of images by the placeholder of the vision family, and move the spans."""
        token, placeholder = self.template.tokens.get("image"), self.placeholders.get("image")
        if not (self._are_parts(IMAGE, conversation) and token and placeholder and token != placeholder):
            return rendered
        return _replaced(rendered, token, [placeholder] * rendered.text.count(token))

    def _with_edges(
        self, rendered: Rendered, token: str | None, edges: Sequence[tuple[str, str]], gap: str | None = None
    ) -> Rendered:
        """Write the text around each image, video or audio file; it may differ, as the times of a video do."""
        gap = self.gap if gap is None else gap
        if not edges or not (gap or any([any(texts) for texts in edges])):
            return rendered
        assert token is not None, "a family without a token for them has no edges"
        ends = [match.end() for match in re.finditer(re.escape(token), rendered.text)]
        # Another number of tokens: the text contains the token itself, and the record will be rejected.
        if len(ends) != len(edges):
            return rendered
        gaps = [" " if gap and re.match(gap, rendered.text[end:]) else "" for end in ends]
        texts = [f"{before}{token}{after}{gap}" for (before, after), gap in zip(edges, gaps, strict=True)]
        return _replaced(rendered, token, texts)

    def _are_parts(self, kind: MediaKind, conversation: Conversation) -> bool:
        """Whether the template gets the media of a kind in this conversation as content parts."""
        has_media = conversation.text is None and bool(getattr(conversation, kind.field))
        return has_media and kind.name in self.template.needs_parts

    def escaped(self, conversation: Conversation) -> Conversation:
        """Return the conversation as it is rendered: with its special tokens escaped."""
        if self.special is None:
            return conversation
        # The end-of-text token at the end of a document is not text, also if the document contains it already.
        text = (conversation.text or "").removesuffix(self.end or "")
        if not text or text == conversation.text:
            return self.special.escape(conversation)
        escaped = self.special.escape(replace(conversation, text=text))
        return conversation if escaped.text == text else replace(escaped, text=f"{escaped.text}{self.end}")

    def notes(self, conversation: Conversation) -> list[str]:
        """Observations that a run counts: special tokens that stay text, and documents without an end."""
        tokens = self.special.escaped_tokens(conversation) if self.special else []
        notes = [f"special token {token} in a text: kept as text" for token in tokens]
        if conversation.text is not None and self.end is None:
            notes.append("document without an end: the tokenizer has no end-of-text token")
        return notes

    def by_template(self, conversation: Conversation) -> Rendered:
        """Render an escaped conversation; images are tokens of the template if they are content parts."""
        if conversation.text is not None:
            return Rendered(self._document(conversation), None, True)
        roles, _, extras, weights, values = zip(*conversation.messages, strict=True)
        if any(values) or any([weight != 1 for weight in weights]):
            return self._weighted(conversation)
        # Most conversations: the template only puts fixed text around the contents, so Jinja is not needed.
        has_parts = any([self._are_parts(kind, conversation) for kind in MEDIA_KINDS.values()])
        is_plain = not (conversation.tools or any(extras) or has_parts)
        joined = self.template.join(roles, self.contents(conversation)) if is_plain else None
        if joined is not None:
            text, spans = joined
            if self.loss_on == "all":
                return Rendered(text, None, False)
            return Rendered(text, spans[-1:] if self.loss_on == "last" else spans, False)
        messages = self.messages(conversation)
        if self.loss_on == "all":
            text = self.template.render(messages, conversation.tools)
            self._check(text, messages, conversation.tools)
            return Rendered(text, None, False)
        text, spans = self._render_with_spans(messages, conversation.tools)
        if self.loss_on == "last":
            spans = self.template.last_turn(text, spans, messages, conversation.tools)
        return Rendered(text, spans, False)

    def _weighted(self, conversation: Conversation) -> Rendered:
        """Render a conversation whose turns have loss weights or values; a turn with weight 0 is context."""
        for turn, (role, _, _, weight, _) in enumerate(conversation.messages):
            if not is_loss_weight(weight) or (role != "assistant" and weight not in (0, 1)):
                wanted = f"0, or a number {LOSS_WEIGHTS}" if role == "assistant" else "0 or 1"
                raise RecordError(
                    Reason.UNSUPPORTED_FIELD, f"{role} turn {turn} has the loss weight {weight:g}; use {wanted}"
                )
        messages = self.messages(conversation)
        text, spans = self._render_with_spans(messages, conversation.tools)
        by_turn = self.template.spans_by_turn(text, spans, messages, conversation.tools)
        turns = list(by_turn)[-1:] if self.loss_on == "last" else list(by_turn)
        weighted = [(span, _effect(conversation.messages[turn])) for turn in turns for span in by_turn[turn]]
        if self.loss_on == "all":
            contents = turn_places(
                text, [message["content"] for message in messages], [*self.template.tokens.values()]
            )
            others = zip(contents, conversation.messages, strict=True)
            weighted += [(span, _effect(m)) for span, m in others if m.role != "assistant" and not m.weight]
            weighted = _with_rest(len(text), [pair for pair in weighted if pair[1] != _PLAIN])
        weighted = [(span, effect) for span, effect in weighted if effect.weight]
        weights = [effect.weight for _, effect in weighted]
        values = [effect.values for _, effect in weighted]
        is_fractional = any([weight != 1 for weight in weights])
        return Rendered(
            text,
            [span for span, _ in weighted],
            False,
            weights if is_fractional else None,
            values if any(values) else None,
        )

    def _render_with_spans(self, messages: Messages, tools: Sequence[Any] | None) -> tuple[str, list[Span]]:
        """Render by the template, and reject a conversation that it does not render completely."""
        try:
            text, spans = self.template.render_with_spans(messages, tools)
        except RecordError as error:
            # A turn is often not found because the template drops a field; that reason is more useful.
            if error.reason is Reason.TURN_NOT_FOUND:
                self._check(self.template.render(messages, tools), messages, tools)
            raise
        self._check(text, messages, tools)
        return text, spans

    def _check(self, text: str, messages: Messages, tools: Sequence[Any] | None) -> None:
        check_rendered(text, messages, tools, self.template.render, [*self.template.tokens.values()])

    def _document(self, conversation: Conversation) -> str:
        text = conversation.text or ""
        if conversation.media_files:
            text = self._with_placeholders([text], conversation)[0]
        return text if text.endswith(self.end or "") else f"{text}{self.end}"

    def messages(self, conversation: Conversation) -> list[dict[str, Any]]:
        """Messages as the template expects them: dicts with string contents and the placeholders of images."""
        columns = zip(conversation.messages, self.contents(conversation), strict=True)
        return [{**message.as_dict(), "content": content} for message, content in columns]

    def contents(self, conversation: Conversation) -> list[str]:
        """The content of each message, with the placeholders of the vision family."""
        contents = [message.content for message in conversation.messages]
        for turn, message in enumerate(conversation.messages):
            if message.role == "tool":
                contents[turn] = self._result(message.content)
        if not conversation.media_files:
            return contents
        return self._with_placeholders(contents, conversation)

    def _result(self, content: str) -> str:
        """Content of a tool turn, without the tags if the template adds them itself."""
        inner, (opener, closer) = content.strip(), RESULT_TAGS
        if not (inner.startswith(opener) and inner.endswith(closer) and self.template.tags_results):
            return content
        return inner[len(opener) : -len(closer)].strip("\n")

    def _with_placeholders(self, contents: Sequence[str], conversation: Conversation) -> list[str]:
        for name, kind in MEDIA_KINDS.items():
            texts = self.template.tokens if self._are_parts(kind, conversation) else self.placeholders
            if getattr(conversation, kind.field) and name in texts:
                contents = [content.replace(kind.placeholder, texts[name]) for content in contents]
        return self._with_boxes(contents, conversation) if conversation.objects is not None else list(contents)

    def _with_boxes(self, contents: Sequence[str], conversation: Conversation) -> list[str]:
        objects, boxes = conversation.objects, self.boxes
        assert objects is not None
        assert boxes is not None, "without a text of boxes, objects are rejected earlier"
        texts = {
            REF_PLACEHOLDER: iter([boxes.ref.format(name) for name in objects["ref"]]),
            BOX_PLACEHOLDER: iter([boxes.of_box(box) for box in objects["bbox"]]),
        }
        return [_OBJECTS.sub(lambda match: next(texts[match[0]]), content) for content in contents]


def _replaced(rendered: Rendered, token: str, texts: Sequence[str]) -> Rendered:
    """Replace each occurrence of a token by its text, and move the spans."""
    starts = [match.start() for match in re.finditer(re.escape(token), rendered.text)]
    growth = list(accumulate([len(text) - len(token) for text in texts], initial=0))
    spans = None
    if rendered.spans is not None:
        spans = [
            (start + growth[bisect_left(starts, start)], end + growth[bisect_left(starts, end)])
            for start, end in rendered.spans
        ]
    following = iter(texts)
    return rendered._replace(text=re.sub(re.escape(token), lambda _: next(following), rendered.text), spans=spans)


class _Effect(NamedTuple):
    """Effect of a turn on the loss of its characters, as of `Message`."""

    weight: float = 1.0
    values: Mapping[str, float] = {}


_PLAIN = _Effect()


def _effect(message: Message) -> _Effect:
    return _Effect(message.weight, message.values)


def _with_rest(size: int, weighted: Sequence[tuple[Span, _Effect]]) -> list[tuple[Span, _Effect]]:
    """The spans of a text of `size` characters with their effects, in order, and `_PLAIN` for the text between."""
    found, end = list[tuple[Span, _Effect]](), 0
    for span, effect in [*sorted(weighted, key=lambda pair: pair[0]), ((size, size), _Effect(0.0))]:
        if end < span[0]:
            found.append(((end, span[0]), _PLAIN))
        found.append((span, effect))
        end = span[1]
    return found
