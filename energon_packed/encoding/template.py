"""ChatTemplate: messages -> the text that the tokenizer's Jinja template renders, and its assistant characters.

Limits against hostile templates: Jinja runs in the sandbox of Transformers, with a fixed date and limits of computing
time (`time_limit`) and memory (`memory_limit`). The first rendering runs in a process that can be killed. Templates
expect messages in different formats; which format (`_adapted`) is found by rendering small conversations once.
"""

import hashlib
import json
import multiprocessing
import re
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from functools import cached_property
from itertools import pairwise
from typing import Any, NoReturn

from energon_packed.encoding.pretrained import TokenizerParts
from energon_packed.encoding.skeleton import Skeleton, Span, marker
from energon_packed.encoding.special_text import template_tree
from energon_packed.encoding.turns import TurnFinder, TurnShape
from energon_packed.errors import ConfigError, Reason, RecordError, TemplateError
from energon_packed.libraries import calls
from energon_packed.records.fields import is_given
from energon_packed.system import call_in_child, memory_limit

Messages = Sequence[dict[str, Any]]
TODAY = datetime(2024, 7, 26)
"""Date of templates, fixed for reproducibility: the same data produces the same tokens on any day. It is also the
fallback of Llama 3 templates."""
_DIRECTIVES = ("Y", "y", "m", "B", "b", "d", "-d", "e", "A", "a", "j", "H", "I", "M", "S", "p")
_PROBES = (" a \n", "", "<b>&'", "Ab cD", "</think>x", "{{ 1 }}")  # contents that a template might change
RESULT_TAGS = ("<tool_response>", "</tool_response>")
RENDER_LIMIT = 10.0
"""Seconds of computing time in which a template must render a conversation."""
RENDER_MEMORY = 2 << 30
"""Bytes that rendering a conversation may allocate."""
UNFINISHED = "the chat template did not finish"
"""Start of the detail of a record whose conversation needs more time."""
_MEMORY = f"it needs more than {RENDER_MEMORY >> 30} GiB of memory"
_FIX = "fix it in the tokenizer folder"
_PLAIN = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
_MARKED = ({"role": "user", "content": marker(0)}, {"role": "assistant", "content": marker(1)})
# Arguments that are other fields of a record, or that do not belong to a single record.
_OF_RECORD = ("messages", "tools", "documents", "add_generation_prompt")
_GRACE = 20.0  # seconds of waiting time and of uninterruptible calls beside `RENDER_LIMIT`, before a process is killed
_SMALL = 100_000  # characters of messages and tools that a sound template renders quickly
# Python errors of a template that gets a message it does not expect.
_RECORD_ERRORS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError)
_MOST_SKELETONS = 1024  # cached skeletons, by sequence of roles
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_rendering = set[tuple[str, str]]()
"""(template, variables) that rendered a question and an answer in another process. Otherwise, each encoder of the same
tokenizer would fork this process, which is slow if it has much memory."""


class OutOfTime(BaseException):
    """Raised inside a `time_limit` block when its time is over; Jinja ignores any Exception of a constant."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `OutOfTime` inside the block when it has computed for `seconds`, not counting time spent waiting.

    Uses the virtual alarm of the process (POSIX `setitimer`), which is possible in a main thread only; workers run in
    their main thread. In other threads, and if the program uses this alarm itself, the block has no limit.
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
    """Whether the virtual alarm can be set here without disturbing the program."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        return False
    is_set = signal.getitimer(signal.ITIMER_VIRTUAL)[0] > 0
    return not is_set and signal.getsignal(signal.SIGVTALRM) in (signal.SIG_DFL, signal.SIG_IGN)


def _ring(signum: int, frame: object) -> None:
    raise OutOfTime


class ChatTemplate:
    """Renders messages and finds the supervised characters of each assistant turn.

    A template with `{% generation %}` tags marks the text of the assistant itself. For other templates, turn i starts
    after the generation prompt of turns 0 to i - 1 and ends at the end of turns 0 to i; `turns.py` finds both in the
    text of all turns.

    Attributes:
        source: the Jinja source, or None.
        tokens: text that the template writes for a content part, by its type: `image`, `video` or `audio`.
        is_tagged: the template has `{% generation %}` tags.
    """

    def __init__(
        self,
        tokenizer: TokenizerParts,
        *,
        tokens: Mapping[str, str] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        """Analyze the template of a tokenizer.

        Args:
            tokenizer: its template, special tokens and added tokens.
            tokens: text that the template writes for a content part, by its type; None without media.
            variables: further variables of the template, such as `enable_thinking`, by name; None for no variables.
        """
        self.tokens = tokens or {}
        self.source = tokenizer.chat_template
        self._tokenizer = tokenizer
        self._variables = {
            **tokenizer.special_tokens,
            "date_string": TODAY.strftime("%d %b %Y"),
            **(variables or {}),
        }
        self._dated = _with_fixed_date(self.source or "")
        self._added = tokenizer.added_tokens
        # In some tokenizers, </tool_call> and </think> are added but not special: they do not end a turn.
        self._special = tokenizer.special_added_tokens
        self.is_tagged = bool(self.source and _GENERATION.search(self.source))
        self._skeletons: dict[tuple[str, ...], Skeleton | None] = {}
        self._fault: str | None = None  # why the template cannot be used; "" if it can, None before it was tried

    @property
    def fingerprint(self) -> str:
        """Hex SHA-256 of the Jinja source; "" without a template."""
        return "" if self.source is None else hashlib.sha256(self.source.encode()).hexdigest()

    def with_variables(self, variables: Mapping[str, Any]) -> "ChatTemplate":
        """Return the template with the variables of a record, as `apply_chat_template(**variables)` uses them.

        Args:
            variables: `chat_template_kwargs` of the record. Variables that are null, or that are empty and not used by
                the template, have no effect.

        Raises:
            RecordError: `unsupported_field`, if the template does not use a variable, or if the record has another
                field for it.
        """
        used = {name: value for name, value in variables.items() if value is not None}
        for name in [*used]:
            if name in _OF_RECORD or name in self._tokenizer.special_tokens:
                detail = f"chat_template_kwargs has {name}, which is not a setting of a template; remove it"
                raise RecordError(Reason.UNSUPPORTED_FIELD, detail)
            if name in self._used_variables:
                continue
            if is_given(used.pop(name)):
                detail = f"chat_template_kwargs has {name}, which the chat template does not use; remove it"
                raise RecordError(Reason.UNSUPPORTED_FIELD, detail)
        if not used:
            return self
        found = ChatTemplate(self._tokenizer, tokens=self.tokens, variables=used)
        found._fault = self._fault  # tried once, in another process
        return found

    @cached_property
    def _used_variables(self) -> frozenset[str]:
        """Names that the template reads without setting them before."""
        from jinja2 import meta

        tree = template_tree(self.source or "")
        return frozenset() if tree is None else frozenset(meta.find_undeclared_variables(tree))

    def join(self, roles: tuple[str, ...], contents: Sequence[str]) -> tuple[str, list[Span]] | None:
        """Render messages with only a role and a content without Jinja, as `render_with_spans`; None if Jinja must."""
        skeleton = self.skeleton(roles)
        return None if skeleton is None or not skeleton.guard.accepts(contents) else skeleton.join_with_spans(contents)

    def skeleton(self, roles: tuple[str, ...]) -> Skeleton | None:
        """Return the fixed text around the contents of messages that have only these roles and contents.

        None if the template does more than join contents, does not accept these roles, or does not determine the text
        of the assistant; `render` and `render_with_spans` then report the problem of each conversation.
        """
        if roles not in self._skeletons:
            if len(self._skeletons) >= _MOST_SKELETONS:
                del self._skeletons[next(iter(self._skeletons))]  # the oldest
            self._skeletons[roles] = self._make_skeleton(roles)
        return self._skeletons[roles]

    def prepare(self) -> None:
        """Analyze the template with a plain question and answer, so that forked processes inherit the results."""
        self.skeleton(("user", "assistant"))

    def _make_skeleton(self, roles: tuple[str, ...]) -> Skeleton | None:
        if self.source is None or self.is_tagged or roles[0] == "assistant":
            return None
        from energon_packed.encoding.tracer import NotJoined, Tracer

        tracer = Tracer(self._dated, self._variables)

        def render(messages: Messages, prompt: bool) -> str:
            """Render by Transformers and by the tracer, which thereby watches everything that the spans depend on."""
            try:
                text = self.render(messages, prompt=prompt)
            except RecordError:
                if self._traced(tracer, messages, prompt) is not None:
                    raise NotJoined from None
                raise
            if self._traced(tracer, messages, prompt) != text:
                raise NotJoined
            return text

        try:
            marked = [{"role": role, "content": marker(turn)} for turn, role in enumerate(roles)]
            text = render(marked, False)
            finder = TurnFinder(text, marked, render, self._shape)
            spans = [finder.span(turn) or self._reject(turn) for turn in _answers(marked)]
            # A content could be mistaken for the rest of the prompt, or for the end of its turn.
            rest, end = self._shape.prompt[len(self._shape.header) :].strip(), self._shape.end
            guard = tracer.guard
            guard = replace(guard, literals=(*guard.literals, *filter(None, (rest, end))))
            skeleton = Skeleton.from_marked(text, spans, self._added, guard)
            if skeleton is None or sorted(skeleton.order) != list(range(len(roles))):
                return None  # the template drops or repeats a content
            return skeleton if self._renders_as(skeleton, roles) else None
        except (TemplateError, RecordError, NotJoined, OutOfTime):
            return None

    def _traced(self, tracer: Any, messages: Messages, prompt: bool) -> str | None:
        """Text of messages by the tracer; None if the template rejects them."""
        from jinja2.exceptions import TemplateError as JinjaError

        try:
            with memory_limit(RENDER_MEMORY), time_limit(RENDER_LIMIT):
                text: str = tracer.render([self._adapted(message) for message in messages], prompt=prompt)
                return text
        except (JinjaError, *_RECORD_ERRORS):
            return None

    def _renders_as(self, skeleton: Skeleton, roles: tuple[str, ...]) -> bool:
        """Whether Jinja renders the same text for contents that a template might change.

        A test in addition to the proof of `Tracer`: a wrong skeleton would change training data silently.
        """
        for shift in range(len(_PROBES)):
            probes = [_PROBES[(turn + shift) % len(_PROBES)] for turn in range(len(roles))]
            contents = [probe if skeleton.guard.accepts([probe]) else "Ab cD" for probe in probes]
            messages = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=True)]
            if self.render(messages) != skeleton.join_with_spans(contents)[0]:
                return False
        return True

    def render(self, messages: Messages, tools: Sequence[Any] | None = None, *, prompt: bool = False) -> str:
        """Render a conversation; with `prompt`, followed by the generation prompt.

        Raises:
            ConfigError: the tokenizer has no chat template.
            RecordError: the template rejects these messages.
        """
        return self._render(messages, tools, prompt=prompt)[0]

    def render_with_spans(self, messages: Messages, tools: Sequence[Any] | None = None) -> tuple[str, list[Span]]:
        """Render a conversation and locate each assistant turn with its end-of-turn token.

        Returns:
            (text, characters [start, end) of the assistant).

        Raises:
            ConfigError: the tokenizer has no chat template.
            RecordError: the template rejects these messages, or a turn cannot be located.
            TemplateError: turns of this template can never be located.
        """
        if self.is_tagged:
            text, tagged = self._render(messages, tools, tagged=True)
            return text, [self._with_end_of_turn(text, span) for span in tagged if span[1] > span[0]]
        text = self.render(messages, tools)
        finder = self._finder(text, messages, tools)
        return text, [finder.span(turn) or self._reject(turn) for turn in _answers(messages)]

    def _finder(self, text: str, messages: Messages, tools: Sequence[Any] | None) -> TurnFinder:
        return TurnFinder(text, messages, lambda some, ask: self.render(some, tools, prompt=ask), self._shape)

    @cached_property
    def _shape(self) -> TurnShape:
        try:
            return TurnShape.of(lambda some, ask: self.render(some, prompt=ask), self._added, self._special)
        except RecordError:
            return TurnShape("", "", None, self._added, self._special)

    def _reject(self, turn: int) -> NoReturn:
        """Raise the error for a turn that is not found: of the record, or of the template if it never is."""
        remedy = "use a template with {% generation %} tags"
        if not self._finds_plain_turns:
            raise TemplateError(
                "the chat template does not start answers with its generation prompt, so the text of the assistant "
                f"cannot be located, not even in a plain question and answer; {remedy}"
            )
        raise RecordError(
            Reason.TURN_NOT_FOUND,
            f"the chat template merges or reorders turn {turn} (assistant), so its text cannot be located; {remedy}, "
            "or remove the turn",
        )

    @cached_property
    def _finds_plain_turns(self) -> bool:
        """Whether the answer is found in a plain question and answer."""
        try:
            return self._finder(self.render(_MARKED), _MARKED, None).span(1) is not None
        except RecordError:
            return True  # the template rejects this conversation, so it says nothing; each record has its own error

    @cached_property
    def tags_results(self) -> bool:
        """Whether the template itself writes `<tool_response>` around tool contents, as Qwen's and Hermes' do."""
        try:
            text = self.render([*_PLAIN, {"role": "tool", "content": marker(0)}])
        except (RecordError, TemplateError):
            return False
        return text.partition(marker(0))[0].rstrip().endswith(RESULT_TAGS[0])

    def spans_by_turn(
        self, text: str, spans: list[Span], messages: Messages, tools: Sequence[Any] | None
    ) -> dict[int, list[Span]]:
        """Group spans by the index of their assistant turn; a tagged template may mark several in a turn, or none."""
        turns = _answers(messages)
        if len(spans) == len(turns):
            return {turn: [span] for turn, span in zip(turns, spans, strict=True)}
        starts = [self.turn_start(turn, text, messages, tools) for turn in turns]
        places = zip(turns, pairwise([*starts, len(text) + 1]), strict=True)
        return {turn: [span for span in spans if start <= span[0] < end] for turn, (start, end) in places}

    def turn_start(self, turn: int, text: str, messages: Messages, tools: Sequence[Any] | None) -> int:
        """First character of a turn in the text: the end of the turns before it."""
        return self._finder(text, messages, tools).turn_start(turn)

    def last_turn(self, text: str, spans: list[Span], messages: Messages, tools: Sequence[Any] | None) -> list[Span]:
        """The spans of the last assistant turn, of which a tagged template may mark several."""
        turns = _answers(messages)
        if len(spans) <= 1 or len(spans) == len(turns) or not turns[-1]:
            return spans[-1:]
        start = self.turn_start(turns[-1], text, messages, tools)
        return [span for span in spans if span[0] >= start]

    def _with_end_of_turn(self, text: str, span: Span) -> Span:
        """Extend a tagged span by the end-of-turn token that directly follows, if the tags do not include it.

        At inference the model must generate this token, so it is supervised. A token that opens the next turn is not.
        """
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
        try:
            text = self.render(_MARKED)
        except (RecordError, TemplateError):
            return frozenset(), None
        before, after = text.partition(marker(0))[0], text.partition(marker(1))[2].lstrip()
        openers = frozenset(token for token in self._added if token in before)
        return openers, next((token for token in self._added if after.startswith(token)), None)

    def _adapted(self, message: dict[str, Any]) -> dict[str, Any]:
        """Convert a message to the format that the template expects."""
        content = message["content"]
        tokens = {self.tokens[kind]: kind for kind in self.needs_parts if self.tokens[kind] in content}
        if tokens:
            message = {**message, "content": _media_parts(content, tokens)}
        else:
            message = self._as_text_parts(message)
        if message.get("tool_calls") and self._needs_json_arguments:
            message = {**message, "tool_calls": [_with_json_arguments(call) for call in message["tool_calls"]]}
        return message

    @cached_property
    def needs_parts(self) -> tuple[str, ...]:
        """Types of media that must be content parts: the template renders the same text in a string differently.

        Idefics 3's template leaves out the space after `User:` before an image, LLaVA-NeXT's writes images first,
        Gemma 3's removes white space around the text next to an image, Qwen2-Audio's writes the number of an audio
        file before it, GLM-4.1V's writes tags around a video.
        """
        return tuple(kind for kind, token in self.tokens.items() if self._needs_part(token, kind))

    def _needs_part(self, token: str, kind: str) -> bool:
        if self.source is None:
            return False
        contents = ("{0} a", "{0}\na", "a\n{0}", "a {0} b", "{0}{0}a", "a{0}", " {0} ")
        for content in [places.format(token) for places in contents]:
            with_parts = self._with_answer(_media_parts(content, {token: kind}))
            # A count that differs: it has no image parts, writes another text, or rejects this content.
            if with_parts.count(token) == content.count(token) and with_parts != self._with_answer(content):
                return True
        return False

    @cached_property
    def other_image_text(self) -> str:
        """Text that the template writes for a content part of type `image` if it is not its token; else ""."""
        token, part = self.tokens.get("image"), {"type": "image"}
        if token is None or self.source is None:
            return ""
        text = [{"type": "text", "text": marker(0)}]
        before, found, _ = self._with_answer(text).partition(marker(0))
        shown = self._with_answer([part, *text])
        # Templates for strings write the list itself, as Python or JSON.
        if not found or shown.count(token) == 1 or str(part) in shown or json.dumps(part) in shown:
            return ""
        return shown.partition(marker(0))[0].removeprefix(before.rstrip()).strip()

    def _with_answer(self, content: str | list[dict[str, str]]) -> str:
        """Text of a question with this content and its answer, for comparisons; "" if the template rejects it."""
        turns: Messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "b"}]
        adapted = [self._as_text_parts(turn) if isinstance(turn["content"], str) else turn for turn in turns]
        try:
            return self._rendered(adapted, None)[0]
        except RecordError:
            return ""

    def _as_text_parts(self, message: dict[str, Any]) -> dict[str, Any]:
        if not self._needs_content_parts:
            return message
        return {**message, "content": [{"type": "text", "text": message["content"]}]}

    @cached_property
    def _needs_content_parts(self) -> bool:
        """Whether a content must be a list of parts, as for Idefics 3, SmolVLM and LLaVA-NeXT."""
        question, parts = _MARKED[0], [{"type": "text", "text": marker(0)}]
        return not self._shows(question) and self._shows({**question, "content": parts})

    @cached_property
    def _needs_json_arguments(self) -> bool:
        """Whether the arguments of a tool call must be a JSON string, as for DeepSeek-V3."""
        call = {"type": "function", "id": "c", "function": {"name": "f", "arguments": {"x": marker(0)}}}
        question, turn = _PLAIN
        turns = [{**turn, "tool_calls": [written]} for written in (call, _with_json_arguments(call))]
        return not self._shows(question, turns[0]) and self._shows(question, turns[1])

    def _shows(self, *messages: dict[str, Any]) -> bool:
        """Whether `marker(0)` is in the text of these messages, rendered without `_adapted`."""
        try:
            return marker(0) in self._rendered(messages, None)[0]
        except RecordError:
            return False

    def _render(
        self, messages: Messages, tools: Sequence[Any] | None, *, prompt: bool = False, tagged: bool = False
    ) -> tuple[str, list[Span]]:
        """(text, spans inside of `{% generation %}` tags if `tagged`)."""
        return self._rendered([self._adapted(message) for message in messages], tools, prompt=prompt, tagged=tagged)

    def _rendered(
        self, messages: Messages, tools: Sequence[Any] | None, *, prompt: bool = False, tagged: bool = False
    ) -> tuple[str, list[Span]]:
        if self.source is None:
            raise ConfigError(
                "the tokenizer has no chat template. Add the chat_template.jinja of the chat model to its folder, or "
                "pack `text` records."
            )
        from jinja2.exceptions import TemplateError as JinjaError
        from jinja2.exceptions import TemplateSyntaxError, UndefinedError
        from transformers.utils.chat_template_utils import render_jinja_template

        if self._fault is None:
            self._fault = ""  # in the other process
            self._fault = self._try()
        if self._fault:
            raise TemplateError(self._fault)
        try:
            with calls("transformers", is_parser=True), memory_limit(RENDER_MEMORY), time_limit(RENDER_LIMIT):
                texts, spans = render_jinja_template(
                    conversations=[list(messages)],
                    tools=list(tools) if tools else None,
                    chat_template=self._dated,
                    add_generation_prompt=prompt,
                    return_assistant_tokens_mask=tagged,
                    **self._variables,
                )
        except OutOfTime:
            raise _out_of_time(len(str(messages)) + len(str(tools))) from None
        except TemplateSyntaxError as error:
            raise TemplateError(f"the chat template is not valid Jinja: {error}; {_FIX}") from error
        except ConfigError:
            raise
        except (UndefinedError, *_RECORD_ERRORS) as error:
            detail = str(error) or (_MEMORY if isinstance(error, MemoryError) else type(error).__name__)
            raise RecordError(Reason.MISSING_FIELD, f"the chat template cannot render it: {detail}") from error
        except JinjaError as error:  # raised by `raise_exception` in a template
            roles = " ".join(message["role"] for message in messages)
            raise RecordError(Reason.BAD_ROLE, f"the chat template rejects the turns {roles}: {error}") from error
        return texts[0], [tuple(span) for span in spans[0]] if spans else []

    def _try(self) -> str:
        """Render a question and an answer in another process, which a template that never ends does not block.

        Returns:
            Why the template cannot be used; "" if it can, or if this process cannot start other processes.
        """
        tried = (self._dated, repr(self._variables))
        if tried in _rendering or sys.platform != "linux" or multiprocessing.current_process().daemon:
            return ""
        try:
            fault = str(call_in_child(self._fault_of_plain, seconds=RENDER_LIMIT + _GRACE))
        except TimeoutError:
            return str(_out_of_time(len(str(_PLAIN))))
        except ChildProcessError as error:
            return (
                f"the process that rendered a question and an answer by the chat template {error}; {_FIX}, or, if "
                "this process uses a library that does not work after a fork, such as Ray, run it in a new process"
            )
        if not fault:
            _rendering.add(tried)
        return fault

    def _fault_of_plain(self) -> str:
        try:
            with memory_limit(RENDER_MEMORY), time_limit(RENDER_LIMIT):  # of all renderings together
                self.render(_PLAIN[:1], prompt=True)
                self.render(_PLAIN)
        except OutOfTime:
            return str(_out_of_time(len(str(_PLAIN))))
        except TemplateError as error:
            return str(error)
        except ConfigError:  # the first record raises it again
            return ""
        except RecordError as error:
            if isinstance(error.__cause__, MemoryError):
                return f"the chat template cannot render a question and an answer: {_MEMORY}; {_FIX}"
        return ""


def _answers(messages: Messages) -> list[int]:
    """Indices of the assistant turns."""
    return [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]


def _out_of_time(size: int) -> TemplateError | RecordError:
    """Error for a template that did not finish: of the template if the conversation is small, else of the record."""
    if size < _SMALL:
        return TemplateError(
            f"{UNFINISHED} rendering a conversation of {size:,} characters in {RENDER_LIMIT:g} "
            "seconds; fix its loops in the tokenizer folder"
        )
    detail = f"{UNFINISHED} in {RENDER_LIMIT:g} seconds ({size:,} characters); split the record"
    return RecordError(Reason.NOT_RENDERED, detail)


def _media_parts(content: str, kinds: Mapping[str, str]) -> list[dict[str, str]]:
    """Split a content into parts of type `text`, and a part for each token, of the type in `kinds`."""
    pieces = re.split(f"({'|'.join(map(re.escape, kinds))})", content)
    parts: list[dict[str, str]] = []
    for text in filter(None, pieces):
        parts.append({"type": kinds[text]} if text in kinds else {"type": "text", "text": text})
    return parts


def _with_json_arguments(call: Any) -> Any:
    inner = call.get("function", {})
    arguments = inner.get("arguments")
    if arguments is None or isinstance(arguments, str):
        return call
    return {**call, "function": {**inner, "arguments": json.dumps(arguments, ensure_ascii=False)}}


def _with_fixed_date(source: str) -> str:
    """Add a macro `strftime_now` to a template that always returns `TODAY`.

    Transformers passes a function of that name to templates; a macro of the template itself has precedence over it.
    """
    if "strftime_now" not in source:
        return source
    filters = "".join(f" | replace('%{code}', '{TODAY.strftime('%' + code)}')" for code in _DIRECTIVES)
    return "{%- macro strftime_now(format) -%}{{- format" + filters + " -}}{%- endmacro -%}" + source
