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
SPECIAL = ("<|assistant|>", "<|im_start|>", "<|im_end|>", "<|user|>")
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
        return text + self.prompt * ask if self.parts is not endless or messages[-1]["role"] != "assistant" else text

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
    return [{"role": ("user", "assistant")[n % 2], "content": f"{rng.choice(texts)}{n}."} for n in range(size)]


@pytest.mark.parametrize("parts", PROMPTS)
@pytest.mark.parametrize("alone", [True, False])
def test_spans_are_those_of_the_template(parts: Callable[[Messages], Parts], alone: bool) -> None:
    """With prefixes, and by markers alone if the template refuses every part of the conversation."""
    rng = random.Random(3)
    for size in (2, 3, 4, 5, 6, 31, 32, 33):
        template, messages = Template(parts, PROMPTS[parts]), talk(rng, size)
        if not alone and parts is endless:
            continue  # its answers have no end that markers show
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
