"""Spans of answers equal those that a template in Python writes down itself."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from energon_packed import Reason, RecordError
from tests.internals import content_places, turns

Messages = list[dict[str, Any]]
Parts = list[tuple[str, str, str]]
"""Text before the answer, what the model writes, and text after it, for each message."""
SPECIAL = (
    "<|assistant|>", "<|im_start|>", "<|channel|>", "<|message|>", "<|im_end|>", "<|return|>", "<|start|>", "<|call|>",
    "<|user|>", "<|end|>",
)  # fmt: skip
PROMPT = "<|im_start|>assistant\n"


def chatml(messages: Messages) -> Parts:
    return [(f"<|im_start|>{each['role']}\n", each["content"] + "<|im_end|>", "\n") for each in messages]


def thoughtful(messages: Messages) -> Parts:
    """As Qwen3: an empty thought is a part of the last answer only."""
    head, answer, tail = chatml(messages)[-1]
    thought = "<think>\n\n</think>\n\n" if messages[-1]["role"] == "assistant" else ""
    return [*chatml(messages[:-1]), (head, thought + answer, tail)]


def opening(messages: Messages) -> Parts:
    """As Qwen3.5: the prompt opens a thought, which earlier answers do not have."""
    head, answer, tail = chatml(messages)[-1]
    return [*chatml(messages[:-1]), (head + "<think>\n" * (messages[-1]["role"] == "assistant"), answer, tail)]


def endless(messages: Messages) -> Parts:
    """As GLM-4.5: the opener of the next question ends an answer."""
    parts = [("" if index else "[S]", f"<|{m['role']}|>\n", m["content"]) for index, m in enumerate(messages)]
    found = []
    for index, (first, head, content) in enumerate(parts):
        before = "" if index and messages[index - 1]["role"] == "assistant" else head.rstrip("\n")
        answered = messages[index]["role"] == "assistant" and index + 1 < len(parts)
        found.append((first + before + "\n", content + "<|user|>" * answered, ""))
    return found


PROMPTS: dict[Callable[[Messages], Parts], str] = {
    chatml: PROMPT,
    thoughtful: PROMPT,
    opening: PROMPT + "<think>\n",
    endless: "<|assistant|>\n",
}


class Template:
    """A template with the spans of its answers, which counts its renderings; it may refuse parts of conversations."""

    def __init__(self, parts: Callable[[Messages], Parts], prompt: str) -> None:
        self.parts, self.prompt = parts, prompt
        self.rendered, self.least = 0, 0

    def render(self, messages: Any, ask: bool) -> str:
        self.rendered += 1
        if len(messages) < self.least:
            raise RecordError(Reason.BAD_ROLE, "too short")
        text = "".join("".join(part) for part in self.parts(messages))
        asked = {
            endless: {"assistant": ""},
            resumed: {"tool": ""},
            restarted: {"tool": ""},
            shortened: {"tool": "<|im_start|>"},
            begun: {"tool": PROMPT + "So "},
        }.get(self.parts, {})
        return text + asked.get("".join(each["role"] for each in messages[-1:]), self.prompt) * ask

    def finder(self, messages: Messages, *, alone: bool = True) -> Any:
        self.least = 0
        shape = turns.TurnShape.of(self.render, SPECIAL, SPECIAL)
        self.least = 0 if alone else len(messages)
        text = self.render(messages, False)
        self.rendered = 0
        return turns.TurnFinder(text, messages, self.render, shape)

    def expected(self, messages: Messages) -> dict[int, tuple[int, int]]:
        found, at = {}, 0
        for turn, (head, own, tail) in enumerate(self.parts(messages)):
            found[turn] = (at + len(head), at + len(head) + len(own))
            at += len(head) + len(own) + len(tail)
        return {turn: span for turn, span in found.items() if messages[turn]["role"] == "assistant"}


def talk(rng: random.Random, size: int) -> Messages:
    texts = ["Yes.", "No, 5 > 3: so.", "a\n\nb", "é", "x]y"]
    talk = [{"role": ("user", "assistant")[n % 2], "content": f"{rng.choice(texts)}{n}."} for n in range(size)]
    return [
        each | {"content": f"{each['content']} <|im_end|>?"} if n % 6 == 2 else each for n, each in enumerate(talk)
    ]


@pytest.mark.parametrize("parts", PROMPTS)
@pytest.mark.parametrize("alone", [True, False])
def test_spans_are_those_of_the_template(parts: Callable[[Messages], Parts], alone: bool) -> None:
    """With prefixes, and by markers alone if the template refuses every part of the conversation."""
    rng = random.Random(3)
    for size in (2, 3, 4, 5, 6, 31, 32, 33):
        template, messages = Template(parts, PROMPTS[parts]), talk(rng, size)
        if parts is opened or (not alone and parts in (endless, bare, doubled)):
            continue  # its answers have no end that markers show, or a question has no place
        finder = template.finder(messages, alone=alone)
        expected = template.expected(messages)
        assert {turn: finder.span(turn) for turn in expected} == expected


def test_a_turn_starts_where_the_turns_before_it_end() -> None:
    for alone, size in ((True, 6), (True, 40)):
        template, messages = Template(chatml, PROMPT), talk(random.Random(size), size)
        finder = template.finder(messages, alone=alone)
        starts = [len(template.render(messages[:turn], False)) for turn in range(size)]
        assert [finder.turn_start(turn) for turn in range(size)] == starts


def test_the_renderings_of_a_long_conversation_do_not_grow_with_it() -> None:
    counts = []
    for size in (40, 80):
        template, messages = Template(chatml, PROMPT), talk(random.Random(0), size)
        finder = template.finder(messages)
        assert [finder.span(turn) for turn in template.expected(messages)] == [*template.expected(messages).values()]
        counts.append(template.rendered)
    assert counts[0] == counts[1] < 12


def test_an_answer_that_begins_like_the_prompt_has_margins_of_its_own() -> None:
    """The first lines of such an answer are the prompt, in a long conversation as in a short one."""
    messages = talk(random.Random(0), 40)
    for turn in range(5, 39, 6):
        messages[turn]["content"] = "<think>\nYes."
    template = Template(opening, PROMPTS[opening])
    finder, expected = template.finder(messages), template.expected(messages)
    for turn in range(5, 39, 6):
        expected[turn] = (expected[turn][0] + len("<think>\n"), expected[turn][1])
    assert {turn: finder.span(turn) for turn in expected} == expected


@pytest.mark.parametrize("searches", [False, True])
def test_places_of_contents(searches: bool) -> None:
    """Dropped and repeated contents are left out; a template may look at the start and end of contents."""

    def render(messages: Any) -> str:
        lines = []
        for each in messages:
            content = each["content"]
            mark = "*" if searches and content.strip()[:1].isalpha() and content.strip()[-1:].isalpha() else ""
            times = {"user": 1, "assistant": 1, "system": 0, "tool": 2}[each["role"]]
            lines.append(f"{each['role']}: {mark}{content * times}|")
        return "".join(lines)

    roles = ("system", "user", "assistant", "tool", "user")
    messages = [
        {"role": role, "content": f" {text} "}
        for role, text in zip(roles, ("ss", "ab", "c", "dd", "eff"), strict=True)
    ]
    text = render(messages)
    first, last, answer = text.index("ab"), text.index("eff"), text.index("c |")
    expected = {1: (first, first + 2), 2: (answer, answer + 1), 4: (last, last + 3)}
    if searches:
        del expected[2]  # only the middle of other contents can be marked
    assert content_places(text, messages, render) == expected


def channels(messages: Messages) -> Parts:
    """As GPT-OSS: the last answer has an end of its own, and an answer starts with its channel."""
    ends = ["<|call|>" if follows["role"] == "tool" else "<|end|>" for follows in messages[1:]] + ["<|return|>"]
    return [
        ("<|start|>assistant", f"<|channel|>final<|message|>{each['content']}{end}", "")
        if each["role"] == "assistant"
        else (f"<|start|>{each['role']}<|message|>", each["content"], "<|end|>")
        for each, end in zip(messages, ends, strict=True)
    ]


def resumed(messages: Messages) -> Parts:
    """As Gemma 4: a turn goes on after the result of its call, without a prompt."""
    return [
        ("", f"[{each['content']}]", "")
        if each["role"] == "tool"
        else ("" if index and messages[index - 1]["role"] == "tool" else PROMPT, each["content"] + "<|im_end|>", "\n")
        for index, each in enumerate(messages)
    ]


def restarted(messages: Messages) -> Parts:
    """The result of a call is followed by a turn with its prompt, which is not a generation prompt."""
    parts = zip(messages, chatml(messages), strict=True)
    return [("", f"[{each['content']}]", "") if each["role"] == "tool" else part for each, part in parts]


def shortened(messages: Messages) -> Parts:
    """After the result of a call, the prompt has no role: the model writes it."""
    return [
        ("<|im_start|>", head.removeprefix("<|im_start|>") + own, tail)
        if turn and messages[turn - 1]["role"] == "tool"
        else (head, own, tail)
        for turn, (head, own, tail) in enumerate(chatml(messages))
    ]


def begun(messages: Messages) -> Parts:
    """After the result of a call, the prompt begins the answer."""
    return [
        (head + "So ", own.removeprefix("So "), tail)
        if turn and messages[turn - 1]["role"] == "tool" and own.startswith("So ")
        else (head, own, tail)
        for turn, (head, own, tail) in enumerate(chatml(messages))
    ]


def doubled(messages: Messages) -> Parts:
    """As `opening`; the first question is written twice, so that it has no place."""
    (head, own, tail), *parts = opening(messages)
    return [(head, own * 2, tail), *parts]


def repeated(messages: Messages) -> Parts:
    """Each question is written twice."""
    parts = zip(messages, chatml(messages), strict=True)
    return [(head, each["content"] * (each["role"] == "user") + own, tail) for each, (head, own, tail) in parts]


def bare(messages: Messages) -> Parts:
    """No token ends a message; one at the end of an answer is taken for its end."""
    ends = [each["content"].rstrip().endswith(SPECIAL) for each in messages]
    return [
        (f"[{each['role']}]", each["content"].rstrip() if has_end else each["content"] + " \n\n", " \n\n" * has_end)
        for each, has_end in zip(messages, ends, strict=True)
    ]


def opened(messages: Messages) -> Parts:
    """As `bare`, with tokens before the messages."""
    return [(f"<|{each['role']}|>", each["content"] + " \n\n", "") for each in messages]


PROMPTS |= {channels: "<|start|>assistant", resumed: PROMPT, restarted: PROMPT, shortened: PROMPT, begun: PROMPT}
PROMPTS |= {doubled: PROMPTS[opening], bare: "[assistant]", opened: "<|assistant|>"}


def spans(template: "Template", messages: Messages) -> Any:
    finder, expected = template.finder(messages), template.expected(messages)
    return {turn: finder.span(turn) for turn in expected}, expected


def test_spans_around_calls_and_their_results() -> None:
    rng = random.Random(0)
    for parts in (channels, resumed, restarted, shortened, begun, chatml):
        for size in (2, 4, 5, 6, 8, 40, 41, 42):
            roles = ["user", "assistant", "tool", "assistant"]
            while len(roles) < size:
                roles += [rng.choice(("user", "tool")), "assistant"]
            messages = [{"role": role, "content": "So " * (n == 3) + f"c{n}."} for n, role in enumerate(roles[:size])]
            found, expected = spans(Template(parts, PROMPTS[parts]), messages)
            assert found == expected, (parts.__name__, size)


def test_answers_that_begin_with_the_prompt_and_answers_without_a_question() -> None:
    for parts in (chatml, thoughtful, opening, doubled):
        messages = talk(random.Random(0), 6)
        messages[3]["content"] = PROMPTS[parts] + "Yes."
        found, expected = spans(Template(parts, PROMPTS[parts]), messages[: 4 if parts is opening else 6])
        if parts in (opening, doubled):
            del found[3], expected[3]  # the prompt of its turn is written as of an earlier turn, once or twice
        assert found == expected, parts.__name__
    for size in (2, 40):
        found, expected = spans(Template(chatml, PROMPT), talk(random.Random(0), size + 1)[1:])
        assert found == expected


def test_answers_that_end_with_a_token_have_margins_of_their_own() -> None:
    for size in (4, 40):
        messages = talk(random.Random(0), size)
        for turn in range(3, size, 8):
            messages[turn]["content"] = "Yes<|end|>"
        found, expected = spans(Template(bare, PROMPTS[bare]), messages)
        assert found == expected


def test_empty_answers_end_where_they_start() -> None:
    for parts, content in ((endless, ""), (bare, ""), (opened, " \n")):
        messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": content}]
        found, expected = spans(Template(parts, PROMPTS[parts]), messages)
        assert found == expected


def test_answers_without_an_end_or_a_start_have_no_span() -> None:
    messages = [{"role": ("assistant", "user")[turn % 2], "content": f"c{turn}"} for turn in range(6)]
    template = Template(repeated, PROMPT)
    finder = template.finder(messages[:2], alone=False)  # the question after the answer has no place
    assert finder.span(0) is None
    template = Template(doubled, PROMPTS[doubled])
    finder = template.finder(messages[1:], alone=False)  # nor has the question before the answer
    assert [finder.span(turn) is None for turn in (1, 3)] == [True, False]
    for size in (4, 40):
        template, messages = Template(chatml, PROMPT), talk(random.Random(0), size)
        template.least = size
        render, text = template.render, "".join("".join(part) for part in chatml(messages))
        finder = turns.TurnFinder(text, messages, render, turns.TurnShape(PROMPT, PROMPT, None, (), ()))
        last = template.expected(messages)[size - 1]
        assert [finder.span(turn) for turn in range(1, size, 2)] == [*[None] * (size // 2 - 1), (last[0], len(text))]
        finder = turns.TurnFinder(text, messages, render, turns.TurnShape(PROMPT, "", None, SPECIAL, SPECIAL))
        assert [finder.span(turn) for turn in range(1, size, 2)] == [None] * (size // 2)


SHAPE = turns.TurnShape("<|im_start|>a\n<think>\nso", "<|im_start|>a\n<think>\n", "<|im_end|>", SPECIAL, SPECIAL)


def test_the_prompt_the_header_and_its_first_line_start_a_turn() -> None:
    assert SHAPE.heads == ("<|im_start|>a\n<think>\nso", "<|im_start|>a\n<think>\n", "<|im_start|>a\n")
    assert SHAPE.opener == "<|im_start|>"
    for head in SHAPE.heads:
        assert SHAPE.after_prompt(f"xx{head}Yes.", 2) == 2 + len(head)
        assert SHAPE.after_prompt(f"xx{head}Yes.", 1) is None
    bare = turns.TurnShape("A: ", "A:", None, SPECIAL, ())
    assert (bare.heads, bare.opener) == (("A: ", "A:"), None)
    assert (bare.after_prompt("A: x", 0), bare.after_prompt("A:x", 0), bare.after_prompt("A", 0)) == (3, 2, None)
    same = turns.TurnShape("A\n", "A\n", None, (), ())
    assert same.heads == ("A\n",)
    assert turns.TurnShape("A\n", "", None, (), ()).heads == ("A\n",)


def test_the_end_of_a_turn_is_the_last_token_before_the_next_content() -> None:
    other = turns.TurnShape("<|im_start|>a\n", "<|im_start|>a\n", None, SPECIAL, SPECIAL)
    none = turns.TurnShape("A: ", "A: ", None, SPECIAL, SPECIAL)
    plain = turns.TurnShape("A: ", "A: ", None, (), ())
    text = "<|im_end|>ab<|im_end|>c<|im_end|>\n<|im_start|>user\nHi<|im_end|>"
    hi = text.index("Hi")
    assert SHAPE.end_before(text, 10, hi) == text.index("\n")
    assert SHAPE.end_before(text, 10, text.index("c<") + 1) == text.index("c<")
    assert SHAPE.end_before(text, 10, text.index("c<") + 10) == text.index("c<")  # the second end is not complete
    assert SHAPE.end_before(text, 0, 10) == 10
    assert SHAPE.end_before(text, 1, 12) is None
    # Without its end, a turn ends before the opener of the next turn, or with a special token before it.
    for shape in (SHAPE, other):
        opened = "ab \n<|im_start|>user\nHi"
        assert shape.end_before(opened, 0, len(opened) - 2) == opened.index("<|im")
        assert shape.end_before(opened, 1, len(opened) - 2) == opened.index("<|im")
    ended = "ab<|user|> \n<|im_start|>user\nHi"
    assert SHAPE.end_before(ended, 0, len(ended) - 2) == ended.index(" ")
    assert SHAPE.end_before(ended, 1, len(ended) - 2) == ended.index(" ")
    assert SHAPE.end_before(ended, 0, ended.index(" ")) == ended.index(" ")
    assert none.end_before(text, 0, hi) == text.index("user")
    assert none.end_before(text, 10, text.index("c<") + 1) == text.index("c<")
    assert none.end_before("<|user|>", 0, 8) == 8
    assert none.end_before("ab<|user|>", 0, 4) is None
    assert plain.end_before(text, 0, hi) is None
    for text, start, stop in (
        ("<|im_end|>a<|user|>", 0, 10),
        ("<|im_start|>ab<|user|>c", 12, 22),
        ("ab<|im_start|>x<|im_start|>y", 0, 15),
        ("<|im_start|>user", 0, 0),
        ("a<|user|>b<|user|>c", 0, 18),
    ):
        assert SHAPE.end_before(text, start, len(text)) == stop


def test_the_opener_of_the_next_question_ends_an_answer_without_an_end() -> None:
    shape = turns.TurnShape("<|assistant|>\n", "<|assistant|>\n", None, SPECIAL, SPECIAL)
    for follows, stop in (("<|user|>", 10), ("<|assistant|>", 2), ("", 2), (" <|user|>", 2), ("x", 2)):
        assert shape.with_stop(f"ab{follows}\n", 2) == stop
        assert SHAPE.with_stop(f"ab{follows}\n", 2) == 2


@pytest.mark.parametrize(
    ("prompt", "first", "last", "header"),
    [
        ("[A]:", "[A]:", "[A]:", "[A]:"),
        ("<a>\n<think>\n", "<a>\n", "<a>\n", "<a>\n"),
        ("<a>\n<think>\n", "<a>\n", "<a>\n<think>\n", "<a>\n"),
        ("<a>\n<think>\n", "<a>\n<think>\n", "<a>\n", "<a>\n"),
        ("A: think", "A: ", "A: that", "A:"),
        ("[A]think", "[A]that", "[A]", "[A]"),
        ("<a>think", "<a>that", "<a>", "<a>"),
        ("Answer", "Ask", "Ask", ""),
        ("<|assistant|>\n", "<|assistant|>\n", "<|assistant|>\n", "<|assistant|>\n"),
    ],
)
def test_the_shape_of_a_template(prompt: str, first: str, last: str, header: str) -> None:
    for end, waits in (("<|im_end|>", ""), (" \n<|im_end|>", "<eos>"), ("", ""), ("x<|im_end|>", "")):

        def render(messages: Any, ask: bool, end: str = end, waits: str = waits) -> str:
            parts = [
                ("U\n" if turn % 2 == 0 else last if turn + 1 == len(messages) else first) + each["content"] + end
                for turn, each in enumerate(messages)
            ]
            return "\n".join(parts) + "\n" + (prompt if ask else waits)

        shape = turns.TurnShape.of(render, SPECIAL, SPECIAL[:1])
        assert (shape.prompt, shape.header) == (prompt, header)
        assert shape.end == ("<|im_end|>" if end.strip().startswith("<") else None)
        assert (shape.added, shape.special) == (SPECIAL, SPECIAL[:1])


def test_the_end_of_a_content_that_is_written_twice_is_after_the_first() -> None:
    def render(messages: Any, ask: bool) -> str:
        return "".join(f"{each['content']}<|im_end|>{each['content']}." for each in messages) + PROMPT * ask

    assert turns.TurnShape.of(render, SPECIAL, SPECIAL).end == "<|im_end|>"


def test_a_prompt_that_changes_the_text_before_it_has_no_header() -> None:
    def render(messages: Any, ask: bool) -> str:
        return f"{'?' if ask else '!'}" + "".join(f"<|user|>{each['content']}" for each in messages) + "A: " * ask

    shape = turns.TurnShape.of(render, SPECIAL, SPECIAL)
    assert (shape.prompt[:1], shape.prompt[-3:], shape.header, shape.end) == ("?", "A: ", "", None)
    shape = turns.TurnShape.of(lambda messages, ask: ":" + render(messages, ask), SPECIAL, SPECIAL)
    assert (shape.prompt[:1], shape.header) == ("?", "")


def test_an_answer_that_is_written_elsewhere_has_no_span() -> None:
    """As Gemma 4 writes the content of a turn with a call after the result of the call."""
    messages = [
        {"role": role, "content": text} for role, text in (("user", "q"), ("assistant", "A\n\nb"), ("user", "r"))
    ]
    for written, has_span in (("A\n\nb", True), (" A b ", True), ("Ab", True), ("b", False), ("", False)):

        def parts(messages: Messages, written: str = written) -> Parts:
            answers = {1: written} if len(messages) > 1 else {}
            return [
                (f"<|im_start|>{m['role']}\n", answers.get(n, m["content"]) + "<|im_end|>", "\n")
                for n, m in enumerate(messages)
            ]

        template = Template(parts, PROMPT)
        template.finder(messages)
        shape = turns.TurnShape(PROMPT, PROMPT, "<|im_end|>", SPECIAL, SPECIAL)
        finder = turns.TurnFinder(template.render(messages, False), messages, template.render, shape)
        assert finder.span(1) == (template.expected(messages)[1] if has_span else None)
        thought = [messages[0], {**messages[1], "content": f"so</think>{messages[1]['content']}"}, messages[2]]
        other = turns.TurnFinder(template.render(messages, False), thought, template.render, shape)
        assert other.span(1) == finder.span(1)


def test_turns_start_where_the_turns_before_them_end_also_without_prefixes() -> None:
    template, messages = Template(endless, PROMPTS[endless]), talk(random.Random(1), 6)
    finder, expected = template.finder(messages), template.expected(messages)
    assert [finder.turn_start(turn) for turn in (2, 4)] == [expected[1][1], expected[3][1]]
    twice = [messages[0], messages[2], *messages[3:]]
    content = Template(endless, PROMPTS[endless]).finder(twice).turn_start(1)
    assert content == len("[S]<|user|>\n" + messages[0]["content"])
    template = Template(chatml, PROMPT)
    finder, expected = template.finder(messages, alone=False), template.expected(messages)
    text = template.render(messages, False)
    for turn in range(1, 6):
        ends = expected[turn - 1][1] if turn - 1 in expected else None
        content = messages[turn - 1]["content"]
        assert finder.turn_start(turn) == (ends or text.index(content) + len(content))
    assert finder.turn_start(0) == 0


def test_the_last_resort_is_the_first_character_that_differs() -> None:
    def counted(messages: Any, ask: bool) -> str:
        return f"{len(messages)} turns: " + "".join(each["content"] * 2 for each in messages)

    def shorter(messages: Any, ask: bool) -> str:
        return "Hi" + "." * (3 - len(messages))

    messages = talk(random.Random(1), 3)
    shape = turns.TurnShape("A", "A", None, (), ())
    for render, start in ((counted, 0), (lambda found, ask: f"{'?' * ask}x{counted(found, ask)}", 1), (shorter, 2)):
        finder = turns.TurnFinder(render(messages, False), messages, render, shape)
        assert [finder.turn_start(turn) for turn in (1, 2)] == [start, start]


def test_markers_are_characters_that_the_text_has_not() -> None:
    def render(messages: Any) -> str:
        return "".join(f"<{each['content']}>" for each in messages)

    for first, other in (("\U000f0000", "\U000f1000"), ("\U000f0fff", "\U000f1fff"), ("a", "b")):
        messages = [{"role": "user", "content": f"x{first}"}, {"role": "assistant", "content": f"{other}y"}]
        assert content_places(render(messages), messages, render) == {0: (1, 3), 1: (5, 7)}
    many = [{"role": "user", "content": f"{turn:04d}"} for turn in range(2050)]
    assert content_places(render(many), many, render) == {turn: (6 * turn + 1, 6 * turn + 5) for turn in range(2048)}


def test_places_of_contents_are_without_white_space() -> None:
    def render(messages: Any) -> str:
        return "".join(f"[{each['role'][0]}{each['content']}]" for each in messages)

    roles = ("user", "assistant", "user", "assistant", "user", "assistant")
    texts = (" \n", " \n", "", "", "\n ab  ", "  c d\n")
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
    text = render(messages)
    places = content_places(text, messages, render)
    assert sorted(places) == [0, 2, 4, 5]
    assert [text[start:stop] for start, stop in places.values()] == ["", "", "ab", "c d"]
    assert [places[turn][0] for turn in (0, 2)] == [2, text.index("[u]") + 2]
    assert [text[places[turn][0] - 1] for turn in (4, 5)] == [" ", " "]


def test_only_the_middle_of_questions_is_marked_for_a_template_that_looks_at_contents() -> None:
    """A content whose halves are written apart has no place."""

    def render(messages: Any) -> str:
        lines = []
        for each in messages:
            content = each["content"]
            if not content.isprintable() and each["role"] == "assistant":
                raise RecordError(Reason.BAD_ROLE, "no markers in answers")
            mark = "*" if content.strip()[:1].isalpha() and content.strip()[-1:].isalpha() else ""
            lines.append(f"{mark}{content}|" if each["role"] != "tool" else f"{mark}{content[:2]}-{content[2:]}|")
        return "".join(lines)

    roles = ("user", "user", "user", "assistant", "tool", "user")
    texts = ("1bc", "abcd", " x yz\n", "no", "tool", "last")
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
    text = render(messages)
    places = content_places(text, messages, render)
    assert {turn: text[start:stop] for turn, (start, stop) in places.items()} == {
        0: "1bc", 1: "abcd", 2: "x yz", 5: "last"
    }  # fmt: skip
    assert [places[turn][0] for turn in (0, 1, 5)] == [0, 5, len(text) - 5]


def test_contents_are_marked_outside_before_they_are_marked_inside() -> None:
    """A template that cuts thoughts of answers, or replaces a part of questions, finds it between the markers."""

    def render(messages: Any, refuses: bool = False) -> str:
        lines = []
        for each in messages:
            if refuses and each["role"] == "assistant" and not each["content"].isprintable():
                raise RecordError(Reason.BAD_ROLE, "no markers in answers")
            own = each["content"].split("</think>")[-1] if each["role"] == "assistant" else each["content"]
            lines.append(f"[{own.replace('<image>', '(I)')}]")
        return "".join(lines)

    texts = ("a<image>b", "a</think>b", "yes", "no")
    roles = ("user", "assistant", "user", "assistant")
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
    expected = {0: (1, 6), 2: (11, 14), 3: (16, 18)}
    assert content_places(render(messages), messages, render) == expected
    del expected[3]
    assert content_places(render(messages), messages, lambda found: render(found, refuses=True)) == expected


def test_renderings_are_saved_from_32_messages() -> None:
    counts = {}
    for size in (2, 31, 32):
        template, messages = Template(chatml, PROMPT), talk(random.Random(0), size)
        finder = template.finder(messages)
        assert all(finder.span(turn) for turn in template.expected(messages))
        counts[size] = template.rendered
    assert counts[32] < 12 < counts[31]
    assert counts[2] == 1  # the text of the question with the prompt
