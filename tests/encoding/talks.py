"""Random conversations, written as records of every shape, and what three templates make of them, by hand."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

FRAGMENTS = (
    *(" ", "\n", "\t ", "  \n", "a", "5", "Yes.", "assistant", "system\n", "{{ 1 }}", "{% if %}", "<b>&'\"", "\\n"),
    *(
        "日本語",
        "🙂",
        "e\u0301",
        "\u00a0",
        "\u200b",
        "\x00",
        "\ufeff",
        "\ue0fe0\ue0ff",
        "zqx0xqz",
        "</s>",
        "$x_1$",
        "\r\n",
    ),
    *("<think>", "</think>", "<tool_call>", "[INST]", "<|", "im_end|>", "<ref>it</ref>", "A. ", "null", '{"a": 1}'),
)
CHARACTERS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=3)
SAID = st.lists(st.sampled_from(FRAGMENTS) | CHARACTERS, min_size=1, max_size=5).map("".join)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | SAID,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("xyz"), inner, max_size=2),
    max_leaves=3,
)
TOOL = {"type": "function", "function": {"name": "look_up", "description": "d", "parameters": {"q": "string"}}}
PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"


@dataclass(frozen=True)
class Turn:
    """One turn as a person would tell it; `<image>` stands for an image."""

    role: str
    text: str
    weight: float = 1.0
    reasoning: str = ""
    arguments: tuple[Any, ...] = ()

    @property
    def says(self) -> bool:
        return bool(self.text.strip()) or bool(self.arguments)


@dataclass(frozen=True)
class Talk:
    """A record and what it means: turns, or the text of a document."""

    record: Any
    turns: tuple[Turn, ...] = ()
    document: str | None = None
    tools: tuple[Any, ...] = ()
    has_roles: bool = False  # the record names the role of each turn, so that an empty turn is meant

    @property
    def is_empty(self) -> bool:
        questions, answers = (
            [turn.says for turn in self.turns if turn.role == role] for role in ("user", "assistant")
        )
        return not any(answers) or not (self.has_roles or (all(answers) and any(questions)))


def trained(turns: tuple[Turn, ...], loss_on: str) -> list[bool]:
    """Which turns are targets."""
    answers = [place for place, turn in enumerate(turns) if turn.role == "assistant"]
    chosen = answers[-1:] if loss_on == "last" else answers
    return [place in chosen and turn.weight > 0 for place, turn in enumerate(turns)]


# --- what templates make of it: (text, whether the assistant wrote it) of each turn; None where something has no place


Pieces = list[tuple[str, str]]


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def qwen_vl(talk: Talk) -> Pieces | None:
    if talk.tools or any(turn.arguments or turn.reasoning for turn in talk.turns):
        return None
    has_system = talk.turns[0].role == "system"
    pieces = [] if has_system else [("<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n", "")]
    for turn in talk.turns:
        pieces += [(f"<|im_start|>{turn.role}\n", turn.text + "<|im_end|>"), ("\n", "")]
    return pieces


def tagged(talk: Talk) -> Pieces | None:
    if talk.tools or any(turn.arguments for turn in talk.turns):
        return None
    pieces = []
    for turn in talk.turns:
        thought = f"<think>{turn.reasoning}</think>" if turn.reasoning else ""
        pieces += [(f"<|im_start|>{turn.role}\n", thought + turn.text + "<|im_end|>"), ("\n", "")]
    return pieces


def hermes(talk: Talk) -> Pieces | None:
    turns, pieces = talk.turns, []
    system = turns[0].text if turns[0].role == "system" else None
    if talk.tools:
        tools = "\n".join(["# Tools\n<tools>", *[as_json(tool) for tool in talk.tools], "</tools>"])
        pieces.append((f"<|im_start|>system\n{'' if system is None else system + chr(10) * 2}{tools}<|im_end|>\n", ""))
    elif system is not None:
        pieces.append((f"<|im_start|>system\n{system}<|im_end|>\n", ""))
    for turn in turns if system is None else turns[1:]:
        if turn.role == "assistant":
            thought = f"<think>\n{turn.reasoning}\n</think>\n\n" if turn.reasoning else ""
            calls = [
                f'<tool_call>\n{{"name": "look_up", "arguments": {as_json(one)}}}\n</tool_call>'
                for one in turn.arguments
            ]
            said = "\n".join([*([turn.text] if turn.text else []), *calls])
            pieces += [("<|im_start|>assistant\n", thought + said + "<|im_end|>"), ("\n", "")]
        elif turn.role == "tool":
            pieces += [("<|im_start|>user\n<tool_response>\n", turn.text + "\n</tool_response><|im_end|>"), ("\n", "")]
        else:
            pieces += [(f"<|im_start|>{turn.role}\n", turn.text + "<|im_end|>"), ("\n", "")]
    return pieces


def llama(talk: Talk) -> Pieces | None:
    if any(turn.reasoning or len(turn.arguments) > 1 or (turn.arguments and turn.text.strip()) for turn in talk.turns):
        return None
    turns = list(talk.turns)
    system = turns.pop(0).text if turns[0].role == "system" else ""

    def head(role: str) -> str:
        return f"<|start_header_id|>{role}<|end_header_id|>\n\n"

    pieces = [("<|begin_of_text|>" + head("system") + system.strip() + "<|eot_id|>", "")]
    for place, turn in enumerate(turns):
        if place == 0 and talk.tools:
            tools = "".join([as_json(tool) + "\n\n" for tool in talk.tools])
            first = "Answer with a call of one of these:\n\n" + tools + turn.text.strip()
            pieces.append((head("user"), first + "<|eot_id|>"))
        elif turn.arguments:
            call = f'{{"name": "look_up", "parameters": {as_json(turn.arguments[0])}}}'
            pieces.append((head("assistant"), call + "<|eot_id|>"))
        elif turn.role == "tool":
            pieces.append((head("ipython"), as_json(turn.text) + "<|eot_id|>"))
        else:
            pieces.append((head(turn.role), turn.text.strip() + "<|eot_id|>"))
    return pieces


TEMPLATES: dict[str, Callable[[Talk], Pieces | None]] = {
    "QWEN_VL": qwen_vl,
    "HERMES": hermes,
    "TAGGED": tagged,
    "LLAMA": llama,
}


# --- records of every shape


@st.composite
def turns_with_all(draw: st.DrawFn) -> tuple[Turn, ...]:
    """Turns of a talk in which anything may happen: masks, reasoning, calls and their results."""
    turns = [Turn("system", draw(SAID))] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        turns.append(Turn("user", draw(SAID)))
        weight = draw(st.sampled_from([1.0, 1.0, 0.0]))
        reasoning = draw(SAID) if draw(st.integers(0, 3)) == 0 else ""
        if draw(st.integers(0, 2)) == 0:
            values = st.dictionaries(st.sampled_from(("q", "n")), VALUES, max_size=2)
            arguments = tuple(draw(st.lists(values, min_size=1, max_size=2)))
            text = draw(st.just("") | SAID)
            turns += [Turn("assistant", text, weight, reasoning, arguments), Turn("tool", draw(SAID))]
            reasoning = ""
        turns.append(Turn("assistant", draw(SAID), weight, reasoning))
    return tuple(turns)


def _mask(draw: st.DrawFn, turn: Turn) -> dict[str, Any]:
    if turn.role != "assistant":
        return draw(st.sampled_from([{}, {"weight": 0}, {"train": False}])) if turn.role == "user" else {}
    masks = [{"weight": 1}, {"loss": True}, {}] if turn.weight else [{"weight": 0}, {"loss": False}, {"masked": True}]
    return draw(st.sampled_from(masks))


def _calls(draw: st.DrawFn, turn: Turn) -> list[dict[str, Any]]:
    encode = draw(st.sampled_from([json.dumps, lambda value: value]))
    calls = [{"name": "look_up", "arguments": encode(one)} for one in turn.arguments]
    return draw(st.sampled_from([calls, [{"id": "1", "type": "function", "function": call} for call in calls]]))


@st.composite
def chats(draw: st.DrawFn) -> Talk:
    """`messages` and `conversations`, with every spelling of turns, tools and images."""
    turns, images = list(draw(turns_with_all())), draw(st.integers(0, 2))
    role, content = draw(st.sampled_from([("role", "content"), ("from", "value"), ("speaker", "text")]))
    first = next(place for place, turn in enumerate(turns) if turn.role == "user")
    places = draw(st.sampled_from(["none", "text", "parts", "turn"])) if images else "none"
    told = turns[first].text
    turns[first] = replace(turns[first], text="<image>" * images + told)
    names = {"user": ("user", "human"), "assistant": ("assistant", "gpt", "model"), "tool": ("tool", "observation")}
    written: list[dict[str, Any]] = []
    for place, turn in enumerate(turns):
        one = {
            role: draw(st.sampled_from(names.get(turn.role, (turn.role,)))),
            content: turn.text,
            **_mask(draw, turn),
        }
        if place == first and places != "text":
            parts = [{"type": "image", "image": "a.png"}] * images + [{"type": "text", "text": told}]
            one[content] = parts if places == "parts" else told
            one |= {"images": ["a.png"] * images} if places == "turn" else {}
        if turn.reasoning:
            one[draw(st.sampled_from(["reasoning", "thinking", "reasoning_content"]))] = turn.reasoning
        if turn.arguments:
            one["tool_calls"] = _calls(draw, turn)
        written.append(one)
    record: dict[str, Any] = {draw(st.sampled_from(["messages", "conversations", "conversation"])): written}
    if images and places in ("none", "text"):
        record["images"] = ["a.png"] * images
    if turns[0].role == "system" and draw(st.booleans()):
        record[draw(st.sampled_from(["system", "system_prompt"]))] = written.pop(0)[content]
    tools = (TOOL,) if draw(st.booleans()) else ()
    if tools:
        field, value = draw(st.sampled_from([("tools", [TOOL]), ("functions", [TOOL["function"]])]))
        record[field] = draw(st.sampled_from([value, json.dumps(value)]))
    return Talk(record, tuple(turns), tools=tools, has_roles=True)


@st.composite
def flat(draw: st.DrawFn) -> Talk:
    """Records of one question and one answer, with what their shapes have beside it."""
    question, answer, more = draw(SAID), draw(SAID), draw(SAID)
    pairs = [
        ("instruction", "output", "input"), ("instruction", "response", "context"), ("prompt", "completion", None),
        ("prompt", "response", None), ("query", "response", None), ("question", "answer", "hint"),
        ("question", "response", None), ("problem", "solution", None), ("problem", "generated_solution", None),
    ]  # fmt: skip
    asked, told, beside = draw(st.sampled_from(pairs))
    record: dict[str, Any] = {asked: question, told: answer}
    if beside and (beside != "hint" or question.strip()) and draw(st.booleans()):  # a hint alone is no question
        record[beside] = more
        question = f"{more}\n\n{question}" if beside == "hint" else f"{question}\n\n{more}"
    if asked == "question" and told == "answer" and question.strip() and draw(st.booleans()):
        record |= {"choices": [answer + "1", answer + "2"], "answer": 1}
        question, answer = f"{question}\nA. {answer}1\nB. {answer}2", f"B. {answer}2"
    turns = [Turn("user", question), Turn("assistant", answer)]
    if asked in ("instruction", "query") and draw(st.booleans()):
        earlier, then = draw(SAID), draw(SAID)
        record["history"] = [[earlier, then]]
        turns = [Turn("user", earlier), Turn("assistant", then), *turns]
    if draw(st.booleans()):
        record["image"] = "a.png"
        turns[0] = replace(turns[0], text="<image>" + turns[0].text)
    if draw(st.booleans()):
        record["system"] = draw(SAID)
        turns.insert(0, Turn("system", record["system"]))
    return Talk(record, tuple(turns))


@st.composite
def lists(draw: st.DrawFn) -> Talk:
    """Records that hold several questions and answers, or messages, in lists of their own."""
    pairs = draw(st.lists(st.tuples(SAID, SAID), min_size=1, max_size=3))
    users, answers = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    turns = [Turn(role, text) for pair in pairs for role, text in zip(("user", "assistant"), pair, strict=True)]
    kind = draw(st.sampled_from(["captions", "texts", "contents", "data", "prompt", "caption"]))
    chat = [{"role": turn.role, "content": turn.text} for turn in turns]
    if kind == "prompt":
        turns = [replace(turn, weight=0.0) if turn.role == "assistant" else turn for turn in turns[:-1]] + turns[-1:]
        return Talk({"prompt": chat[:-1], "completion": chat[-1:]}, tuple(turns))
    image = {"images": ["a.png"]} if kind == "caption" or draw(st.booleans()) else {}
    if image:
        turns[0] = replace(turns[0], text="<image>" + turns[0].text)
    if kind == "caption":
        return Talk({"prompt": users[0], "caption": answers[0], **image}, tuple(turns[:2]))
    if kind == "captions":
        return Talk({"prompts": users, "captions": answers, **image}, tuple(turns))
    if kind == "texts":
        texts = [{"user": user, "assistant": answer} for user, answer in pairs]
        return Talk({"texts": texts, **image}, tuple(turns))
    if kind == "data":
        return Talk({"data": [one["content"] for one in chat], **image}, tuple(turns))
    contents = [
        {"role": "model" if one["role"] == "assistant" else "user", "parts": [{"text": one["content"]}]}
        for one in chat
    ]
    return Talk({"contents": contents, **image}, tuple(turns), has_roles=True)


@st.composite
def documents(draw: st.DrawFn) -> Talk:
    """Texts without turns."""
    texts = draw(st.lists(SAID, min_size=1, max_size=3))
    if draw(st.booleans()):
        return Talk({"text": texts[0]}, document=texts[0])
    document = "\n".join(["<image>", *texts])
    return Talk({"texts": [None, *texts], "images": ["a.png", *[None] * len(texts)]}, document=document)


talks = st.one_of(chats(), chats(), flat(), lists(), documents())
