"""ChatTemplate: the tokenizer's own Jinja template, and which of the text it renders the assistant wrote."""

import hashlib
import json
import re
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

from energon_packed.encoding.pretrained import TokenizerParts
from energon_packed.encoding.purity import ContentGuard, content_guard
from energon_packed.encoding.skeleton import Skeleton, Span, marker
from energon_packed.encoding.turns import TurnFinder, TurnShape
from energon_packed.errors import ConfigError, Reason, RecordError, TemplateError

Messages = Sequence[dict[str, Any]]
TODAY = datetime(2024, 7, 26)
"""The template's date, fixed for reproducibility: the same data gives the same tokens on any day. Llama 3 templates
fall back to the same one."""
_DIRECTIVES = ("Y", "y", "m", "B", "b", "d", "-d", "e", "A", "a", "j", "H", "I", "M", "S", "p")
_PROBES = (" a \n", "", "<b>&'", "Ab cD", "</think>x", "{{ 1 }}")
RESULT_TAGS = ("<tool_response>", "</tool_response>")
RENDER_LIMIT = 10.0
"""Seconds of computing in which a template must render one conversation."""
_SMALL = 100_000  # characters of messages and tools that no template needs long for
_OF_A_RECORD = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError)
_MOST_SKELETONS = 1024  # sequences of roles whose skeleton is held
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class OutOfTime(Exception):
    """The time is over."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `OutOfTime` inside the block once it has computed for `seconds`, waiting not counted.

    It uses the virtual alarm of the process (POSIX `setitimer`), which only a main thread can, as that of a worker. In
    other threads, and where the program has an alarm of its own, the block is not bounded.
    """
    if not _is_free():
        yield
        return
    before = signal.signal(signal.SIGVTALRM, _ring)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _is_free() -> bool:
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        return False
    is_set = signal.getitimer(signal.ITIMER_VIRTUAL)[0] > 0
    return not is_set and signal.getsignal(signal.SIGVTALRM) in (signal.SIG_DFL, signal.SIG_IGN)


def _ring(number: int, frame: object) -> None:
    raise OutOfTime


class ChatTemplate:
    """Renders messages and finds the characters that each assistant turn supervises.

    A template with `{% generation %}` tags says itself what the assistant wrote. For any other, turn i is what follows
    the prompt for it, up to where the text with turn i ends; `turns.py` finds both in the text of all turns.
    """

    def __init__(self, tokenizer: TokenizerParts) -> None:
        self._template = tokenizer.chat_template
        self._variables = {**tokenizer.special_tokens, "date_string": TODAY.strftime("%d %b %Y")}
        self._dated = _with_fixed_date(self._template or "")
        self._added = tokenizer.added_tokens
        # </tool_call> and </think> are added tokens of some tokenizers, but no special ones: they end no turn.
        self._special = tokenizer.special_added_tokens
        self.is_tagged = bool(self._template and _GENERATION.search(self._template))
        self._guard = None if self._template is None or self.is_tagged else content_guard(self._template)
        self._skeletons: dict[tuple[str, ...], Skeleton | None] = {}

    @property
    def source(self) -> str | None:
        """The Jinja source, or None."""
        return self._template

    @property
    def fingerprint(self) -> str:
        """Hex SHA-256 of the Jinja source; "" without a template."""
        return "" if self._template is None else hashlib.sha256(self._template.encode()).hexdigest()

    def skeleton(self, roles: tuple[str, ...]) -> Skeleton | None:
        """The fixed text around the contents of these roles, for messages with nothing but a role and a content that
        `joins` lets pass.

        None where the template does more than join contents, does not accept these roles, or does not determine what
        the assistant wrote; `render` and `render_with_spans` then report the problem of each conversation.
        """
        if roles not in self._skeletons:
            if len(self._skeletons) >= _MOST_SKELETONS:
                del self._skeletons[next(iter(self._skeletons))]  # the oldest
            self._skeletons[roles] = self._make_skeleton(roles)
        return self._skeletons[roles]

    def joins(self, contents: Sequence[str]) -> bool:
        """Whether the template puts these contents into a skeleton as they are."""
        return self._joined.holds(contents)

    @cached_property
    def _joined(self) -> ContentGuard:
        guard = self._guard
        assert guard is not None, "there is no skeleton without a guard"
        # A turn may begin as the rest of the prompt does, and is then taken for the prompt.
        rest = self._shape.prompt[len(self._shape.header) :].strip()
        return replace(guard, literals=(*guard.literals, rest)) if rest else guard

    def prepare(self) -> None:
        """Find the shape of turns, which every conversation needs; forked processes inherit it."""
        if self._guard is not None:
            self.joins(())

    def _make_skeleton(self, roles: tuple[str, ...]) -> Skeleton | None:
        if self._guard is None or roles[0] == "assistant":
            return None
        try:
            marked = [{"role": role, "content": marker(number)} for number, role in enumerate(roles)]
            skeleton = Skeleton.from_marked(*self.render_with_spans(marked), self._added)
            if skeleton is None or sorted(skeleton.order) != list(range(len(roles))):
                return None  # a content is dropped, or repeated
            return skeleton if self._renders_as(skeleton, roles) else None
        except (TemplateError, RecordError):
            return None

    def _renders_as(self, skeleton: Skeleton, roles: tuple[str, ...]) -> bool:
        """Whether Jinja gives the same text for contents that a template might change: a test beside the proof."""
        for shift in range(len(_PROBES)):
            probes = [_PROBES[(number + shift) % len(_PROBES)] for number in range(len(roles))]
            contents = [probe if self.joins([probe]) else "Ab cD" for probe in probes]
            messages = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=True)]
            if self.render(messages) != skeleton.join(contents):
                return False
        return True

    def render(self, messages: Messages, tools: Sequence[Any] | None = None, *, prompt: bool = False) -> str:
        """The text of a conversation; with `prompt`, followed by the generation prompt.

        Raises:
            ConfigError: the tokenizer has no chat template.
            RecordError: the template rejects these messages.
        """
        return self._render(messages, tools, add_generation_prompt=prompt)[0]

    def render_with_spans(self, messages: Messages, tools: Sequence[Any] | None = None) -> tuple[str, list[Span]]:
        """The text, and the characters of each assistant turn with its end-of-turn token.

        Raises:
            ConfigError: the tokenizer has no chat template.
            RecordError: the template rejects these messages, or a turn cannot be told apart.
            TemplateError: no turn of this template can.
        """
        if self.is_tagged:
            text, tagged = self._render(messages, tools, return_assistant_tokens_mask=True)
            return text, [self._with_end_of_turn(text, span) for span in tagged if span[1] > span[0]]
        text = self.render(messages, tools)
        finder = self._finder(text, messages, tools)
        turns = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
        spans = [span for turn in turns if (span := finder.span(turn)) is not None or self._reject(turn)]
        return text, spans

    def _finder(self, text: str, messages: Messages, tools: Sequence[Any] | None) -> TurnFinder:
        return TurnFinder(text, messages, lambda some, ask: self.render(some, tools, prompt=ask), self._shape)

    @cached_property
    def _shape(self) -> TurnShape:
        try:
            return TurnShape.of(lambda some, ask: self.render(some, prompt=ask), self._added, self._special)
        except RecordError:
            return TurnShape("", "", None, self._added, self._special)

    def _reject(self, turn: int) -> NoReturn:
        """The error for a turn that is not found: of the record, or of the template where it never is."""
        remedy = "use a template with {% generation %} tags"
        if not self._tells_plain_turns:
            raise TemplateError(
                "the text of the assistant cannot be told apart, even in a plain question and answer: the chat "
                f"template does not begin the answer with its generation prompt; {remedy}"
            )
        raise RecordError(
            Reason.TURN_NOT_FOUND,
            f"the text of turn {turn} (assistant) cannot be told apart from other turns: the chat template merges "
            f"them, or changes their order; {remedy}, or remove the turn",
        )

    @cached_property
    def _tells_plain_turns(self) -> bool:
        plain = [{"role": "user", "content": marker(0)}, {"role": "assistant", "content": marker(1)}]
        try:
            return self._finder(self.render(plain), plain, None).span(1) is not None
        except RecordError:
            return True  # it takes no such conversation: each of the records tells

    @cached_property
    def tags_results(self) -> bool:
        """Whether it writes `<tool_response>` around the content of a tool turn itself, as Qwen's and Hermes' do."""
        question, call = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
        try:
            text = self.render([question, call, {"role": "tool", "content": marker(0)}])
        except (RecordError, TemplateError):
            return False
        return text.partition(marker(0))[0].rstrip().endswith(RESULT_TAGS[0])

    def spans_by_turn(
        self, text: str, spans: list[Span], messages: Messages, tools: Sequence[Any] | None
    ) -> dict[int, list[Span]]:
        """The spans of each assistant turn, by its number; a tagged template may mark several in one turn, or none."""
        turns = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
        if len(spans) == len(turns):
            return {turn: [span] for turn, span in zip(turns, spans, strict=True)}
        begins = [self.begin_of(turn, text, messages, tools) for turn in turns]
        ends = [*begins[1:], len(text) + 1]
        return {
            turn: [span for span in spans if begin <= span[0] < end]
            for turn, begin, end in zip(turns, begins, ends, strict=True)
        }

    def begin_of(self, turn: int, text: str, messages: Messages, tools: Sequence[Any] | None) -> int:
        """Where the text of a turn begins: after the turns before it."""
        return self._finder(text, messages, tools).begin(turn)

    def last_turn(self, text: str, spans: list[Span], messages: Messages, tools: Sequence[Any] | None) -> list[Span]:
        """The spans of the last assistant turn, of which a tagged template may mark several."""
        turns = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
        if len(spans) <= 1 or len(spans) == len(turns) or not turns[-1]:
            return spans[-1:]
        begin = self.begin_of(turns[-1], text, messages, tools)
        return [span for span in spans if span[0] >= begin]

    def _with_end_of_turn(self, text: str, span: Span) -> Span:
        """A tagged span with the end-of-turn token that directly follows, where the tags do not include it."""
        start, end = span
        inside, (openers, usual) = text[start:end].rstrip(), self._turn_tokens
        after = end + len(text[end:]) - len(text[end:].lstrip())
        if usual and (inside.endswith(usual) or text.startswith(usual, after)):
            return span if inside.endswith(usual) else (start, after + len(usual))
        if inside.endswith(self._special):
            return span
        following = next((token for token in self._special if text.startswith(token, end)), "")
        return start, end + (len(following) if following not in openers else 0)

    @cached_property
    def _turn_tokens(self) -> tuple[frozenset[str], str | None]:
        """(tokens before a question, token that ends the answer to it) of a plain conversation."""
        question, answer = {"role": "user", "content": marker(0)}, {"role": "assistant", "content": marker(1)}
        try:
            text = self.render([question, answer])
        except (RecordError, TemplateError):
            return frozenset(), None
        before, after = text.partition(marker(0))[0], text.partition(marker(1))[2].lstrip()
        openers = frozenset(token for token in self._added if token in before)
        return openers, next((token for token in self._added if after.startswith(token)), None)

    def _adapted(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message in the form that the template takes."""
        if self._takes_parts:
            message = {**message, "content": [{"type": "text", "text": message["content"]}]}
        if message.get("tool_calls") and self._takes_json_arguments:
            message = {**message, "tool_calls": [_with_json_arguments(call) for call in message["tool_calls"]]}
        return message

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether it reads a content as a list of parts alone, as Idefics 3's, SmolVLM's and LLaVA-NeXT's do."""
        question = {"role": "user", "content": marker(0)}
        return not self._shows(question) and self._shows(
            {**question, "content": [{"type": "text", "text": marker(0)}]}
        )

    @cached_property
    def _takes_json_arguments(self) -> bool:
        """Whether it writes the arguments of a call only as a JSON string, as DeepSeek-V3's does."""
        call = {"type": "function", "id": "c", "function": {"name": "f", "arguments": {"x": marker(0)}}}
        question, turn = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
        return not self._shows(question, {**turn, "tool_calls": [call]}) and self._shows(
            question, {**turn, "tool_calls": [_with_json_arguments(call)]}
        )

    def _shows(self, *messages: dict[str, Any]) -> bool:
        """Whether `marker(0)` is in the text of these messages."""
        try:
            return marker(0) in self._rendered(messages, None)[0]
        except RecordError:
            return False

    def _render(self, messages: Messages, tools: Sequence[Any] | None, **options: Any) -> tuple[str, list[Span]]:
        return self._rendered([self._adapted(message) for message in messages], tools, **options)

    def _rendered(self, messages: Messages, tools: Sequence[Any] | None, **options: Any) -> tuple[str, list[Span]]:
        if self._template is None:
            raise ConfigError("the tokenizer has no chat template; use one with a chat_template, or `text` records")
        from jinja2.exceptions import TemplateError as JinjaError
        from jinja2.exceptions import TemplateSyntaxError, UndefinedError
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            with time_limit(RENDER_LIMIT):
                texts, spans = render_jinja_template(
                    conversations=[list(messages)],
                    tools=list(tools) if tools else None,
                    chat_template=self._dated,
                    **options,
                    **self._variables,
                )
        except OutOfTime:
            raise _out_of_time(len(str(messages)) + len(str(tools))) from None
        except TemplateSyntaxError as error:
            raise TemplateError(
                f"the chat template is not valid Jinja: {error}; fix it in the tokenizer folder"
            ) from error
        except (UndefinedError, *_OF_A_RECORD) as error:
            detail = str(error) or type(error).__name__
            raise RecordError(Reason.MISSING_FIELD, f"the chat template cannot render it: {detail}") from error
        except JinjaError as error:  # what `raise_exception` in a template raises
            roles = " ".join(message["role"] for message in messages)
            raise RecordError(Reason.BAD_ROLE, f"the chat template rejects the turns {roles}: {error}") from error
        return texts[0], [tuple(span) for span in spans[0]] if spans else []


def _out_of_time(size: int) -> TemplateError | RecordError:
    """The error for a template that did not finish: its own, where the conversation is small."""
    if size < _SMALL:
        return TemplateError(
            f"the chat template did not finish rendering a conversation of {size:,} characters in {RENDER_LIMIT:g} "
            "seconds; fix its loops in the tokenizer folder"
        )
    detail = f"the chat template did not finish in {RENDER_LIMIT:g} seconds ({size:,} characters); split the record"
    return RecordError(Reason.NOT_RENDERED, detail)


def _with_json_arguments(call: Any) -> Any:
    inner = call.get("function", {})
    arguments = inner.get("arguments")
    if arguments is None or isinstance(arguments, str):
        return call
    return {**call, "function": {**inner, "arguments": json.dumps(arguments, ensure_ascii=False)}}


def _with_fixed_date(source: str) -> str:
    """The template with a `strftime_now` that always returns `TODAY`.

    Transformers gives templates a clock of that name; a macro of the template itself has precedence over it.
    """
    if "strftime_now" not in source:
        return source
    filters = "".join(f" | replace('%{one}', '{TODAY.strftime('%' + one)}')" for one in _DIRECTIVES)
    return "{%- macro strftime_now(format) -%}{{- format" + filters + " -}}{%- endmacro -%}" + source
