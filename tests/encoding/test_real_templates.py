"""Real chat templates: their text is Transformers', and what the model generates after its prompt is supervised."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer
from transformers.utils import chat_template_utils

from energon_packed import ChatEncoder, RecordError, normalize, pack
from tests.encoding.real_templates import (
    AGENTS,
    BAR,
    OTHERS,
    PLAIN,
    SPECIAL,
    TOOLS,
    by_transformers,
    families,
    renderer_of,
    runs,
    source,
    tokenizer_of,
    twin_runs,
)
from tests.internals import ChatTemplate, content_places
from tests.internals import turns as turns_module
from tests.turns import supervised_turns

FAMILIES = families()
EXAMPLES = min(int(os.environ.get("ENERGON_PACKED_FUZZ", "30")), 2000)  # conversations of each family
_ALTERNATE = "starts with assistant, assistant after system, two answers"
_CALLS = "steps, text and calls, two calls, values, reasoning and calls"
_REASONING = "reasoning, reasoning last, reasoning before"
_FORGETS = {"not_rendered": "reasoning before, thoughts"}
_GEMMA4 = {"turn_not_found": "two answers, text and calls", "not_rendered": f"{_REASONING}, reasoning and calls"}
REJECTED = {
    "cohere": {"bad_role": f"{_ALTERNATE}, {_CALLS}", "not_rendered": f"{_REASONING}, no call"},
    "gemma": {"bad_role": f"system, {_ALTERNATE}, {_CALLS}", "not_rendered": f"{_REASONING}, no call"},
    "deepseek_r1_distill": {"not_rendered": f"{_REASONING}, thought, thoughts, no call, {_CALLS}"},
    "diffusion_gemma": {"turn_not_found": "two answers, text and calls", "not_rendered": "reasoning before"},
    "gemma4": _GEMMA4,
    "gemma4_v2": {"not_rendered": f"{_REASONING}, reasoning and calls"},
    "glm4moe": _FORGETS,
    "gptoss": {"not_rendered": "reasoning before, text and calls, two calls, reasoning and calls"},
    "lfm2": {"not_rendered": f"{_REASONING}, {_CALLS}"},
    "lfm2_2_5": _FORGETS,
    "llama3": {"not_rendered": f"{_REASONING}, no call, {_CALLS}"},
    "llama3_1": {"bad_role": "two calls", "not_rendered": f"{_REASONING}, text and calls, reasoning and calls"},
    "llava_next": {
        "turn_not_found": "starts with assistant", "bad_role": _CALLS, "not_rendered": f"{_REASONING}, no call"},
    "muse_glimmer": {"not_rendered": "text and calls"},
    "nemotron_3_nano": _FORGETS,
    "qwen2_5": {"not_rendered": f"{_REASONING}, reasoning and calls"},
    "qwen3": _FORGETS,
    "qwen3_8": {},
}  # fmt: skip
"""The cases that a template refuses, or drops a part of, by reason."""
SAME = {
    "cohere2": "cohere", "deepseekv3": "deepseek_r1_distill", "gemma3": "cohere", "gemma4_v3": "gemma4",
    "gemma4_v4": "gemma4", "gemma4_v5": "diffusion_gemma", "idefics3": "llama3", "lfm2_2_5_v2": "lfm2_2_5",
    "lfm2_2_5_vl": "lfm2_2_5", "lfm2_v2": "qwen2_5", "llama3_2": "llama3_1",
    "nemotron_3_5_lightning": "nemotron_3_nano",
    "nemotron_3_super": "nemotron_3_nano", "nemotron_3_ultra": "nemotron_3_nano", "phi3": "llama3", "phi3_5": "llama3",
    "qwen2_5_vl": "llama3", "qwen3_5_nothink": "qwen3", "qwen3_5_think": "qwen3", "qwen3_6": "qwen3",
    "qwen3_instruct_2507": "qwen2_5", "qwen3_vl": "qwen2_5", "smolvlm": "llama3",
}  # fmt: skip
"""Families that reject the same cases as another."""


def rejected(family: str) -> dict[str, str]:
    """The reason of each case that a family rejects."""
    reasons = REJECTED[SAME.get(family, family)]
    return {case: reason for reason, cases in reasons.items() for case in cases.split(", ")}


@pytest.fixture(scope="module")
def base(text_tokenizer_dir: Path) -> Any:
    return AutoTokenizer.from_pretrained(str(text_tokenizer_dir))


def rendered(renderer: Any, messages: list[Any], tools: Any = None) -> Any:
    return renderer.render(normalize({"messages": messages, **({"tools": tools} if tools else {})}))


def adapted(chat: ChatTemplate, messages: list[Any]) -> list[Any]:
    """Messages as a user of the template has to write them: parts, JSON arguments, GPT-OSS's `thinking`."""
    copies = [dict(message) for message in messages]
    for message in copies:
        if "reasoning_content" in message and "message.thinking" in (chat.source or ""):
            message["thinking"] = message["reasoning_content"]
    return [chat._adapted(message) for message in copies]


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_conversations_are_never_rejected(base: Any, family: str) -> None:
    renderer = renderer_of(base, source(family))
    for name, messages in PLAIN.items():
        found = rendered(renderer, messages)
        told = runs(found.text, found.spans)
        answers = [message["content"] for message in messages if message["role"] == "assistant"]
        assert len(told) == len(answers), name
        for one, answer in zip(told, answers, strict=True):
            assert one.count(answer.strip()) == 1, name
            assert not re.search("four|Thanks", one), name


def outcomes(renderer: Any, cases: dict[str, list[Any]], tools: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, messages in cases.items():
        try:
            found[name] = rendered(renderer, messages, tools)
        except RecordError as error:
            found[name] = error
    return found


def bare(run: str) -> str:
    """A supervised text without what twins differ in, each of it pinned in `test_targets_of`:

    - the generation prompt, which is no target: twins of DeepSeek, GPT-OSS and Muse mark it, and those of Qwen3 to 3.6
      write an empty thought in every turn;
    - a line break after the end of the turn;
    - the opener after a turn of GLM-4.5, which its twin also writes after the last, and Gemma 4's `<|tool_response>`.
    """
    run = run.strip().removeprefix(f"<{BAR}Assistant{BAR}>").removeprefix("<|start|>assistant")
    for _ in range(2):
        run = re.sub(r"^\s*(<think>\s*</think>|</?think>)\s*", "", run)
    return run.strip().removesuffix("<|user|>").removesuffix("<|tool_response>")


@pytest.mark.parametrize("family", FAMILIES)
def test_text_equals_transformers_and_targets_equal_a_tagged_template(base: Any, family: str) -> None:
    renderer = renderer_of(base, source(family))
    tokenizer = tokenizer_of(base, source(family))
    reasons: dict[str, str] = {}
    for cases, tools in ((PLAIN | OTHERS, None), (AGENTS, TOOLS)):
        for name, found in outcomes(renderer, cases, tools).items():
            if isinstance(found, RecordError):
                reasons[name] = found.reason.value
                continue
            messages = adapted(renderer.template, cases[name])
            assert found.text == by_transformers(tokenizer, messages, tools), name
            marked = twin_runs(family, tokenizer, messages, tools)
            if marked is not None and name != "two answers":  # the tags of neighbours touch
                assert [bare(one) for one in runs(found.text, found.spans)] == [bare(one) for one in marked], name
    expected = rejected(family)
    if not hasattr(chat_template_utils, "_REASONING_FIELDS"):  # before it, templates that read `thinking` drop it
        reasons, expected = (
            {name: why for name, why in one.items() if not name.startswith("reasoning")} for one in (reasons, expected)
        )
    assert reasons == expected


_CALL = '<tool_call>\n{"name": "add", "arguments": {"x": 2, "y": "drei"}}\n</tool_call><|im_end|>'
_XML = "<tool_call>\n<function=add>\n<parameter=x>\n2\n</parameter>\n<parameter=y>\ndrei\n</parameter>\n</function>"
_GLM = (
    "<tool_call>add\n<arg_key>x</arg_key>\n<arg_value>2</arg_value>\n<arg_key>y</arg_key>\n<arg_value>drei</arg_value>"
)
_EMPTY = "<think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    ("family", "turns", "first_step"),
    [
        ("qwen3", ["It is five.<|im_end|>", f"{_EMPTY}It is nine.<|im_end|>"], _CALL),
        # The prompt opens a thought; turns before the last question have none.
        ("qwen3_5_think", ["It is five.<|im_end|>", "\n</think>\n\nIt is nine.<|im_end|>"],
         f"\n</think>\n\n{_XML}\n</tool_call><|im_end|>"),
        ("qwen3_5_nothink", ["It is five.<|im_end|>", "It is nine.<|im_end|>"], f"{_XML}\n</tool_call><|im_end|>"),
        ("nemotron_3_nano", ["</think>It is five.<|im_end|>", "</think>It is nine.<|im_end|>"],
         f"</think>\n{_XML}\n</tool_call>\n<|im_end|>"),
        ("deepseek_r1_distill", [f"It is {x}.<{BAR}end▁of▁sentence{BAR}>" for x in ("five", "nine")], None),
        # The model stops with the opener of the next turn, and the text ends before it.
        ("glm4moe", ["\n<think></think>\nIt is five.<|user|>", "\n<think></think>\nIt is nine."],
         f"\n<think></think>\n{_GLM}\n</tool_call><|observation|>"),
        ("gptoss", [f"<|channel|>final<|message|>It is {x}" for x in ("five.<|end|>", "nine.<|return|>")],
         ' to=functions.add<|channel|>commentary json<|message|>{"x": 2, "y": "drei"}<|call|>'),
        ("gemma4", ["It is five.<turn|>", "It is nine.<turn|>"],
         '<|tool_call>call:add{x:2,y:<|"|>drei<|"|>}<tool_call|><|tool_response>'),
        ("phi3", ["It is five.<|end|>", "It is nine.<|end|>\n<|endoftext|>"], None),
        ("smolvlm", [" It is five.<end_of_utterance>", " It is nine.<end_of_utterance>"], None),
        ("llama3_2", ["It is five.<|eot_id|>", "It is nine.<|eot_id|>"],
         '{"name": "add", "parameters": {"x": 2, "y": "drei"}}<|eot_id|>'),
    ],
)  # fmt: skip
def test_targets_of(base: Any, family: str, turns: list[str], first_step: str | None) -> None:
    found = rendered(renderer_of(base, source(family)), PLAIN["multi"][:4])
    assert runs(found.text, found.spans) == turns
    if first_step is not None:
        found = rendered(renderer_of(base, source(family)), AGENTS["steps"], TOOLS)
        assert runs(found.text, found.spans)[0] == first_step


def test_arguments_reach_deepseek_as_json(base: Any) -> None:
    found = rendered(renderer_of(base, source("deepseekv3")), AGENTS["values"])
    assert '{"x": 2.5, "y": {"a": [1, null, true, "日本"], "b": {"c": -1.5}}}\n```' in found.text


def test_dropped_fields_are_named_with_a_remedy(base: Any) -> None:
    for name, field in (("reasoning before", "the reasoning of turn 1"), ("thoughts", "the content of turn 1")):
        with pytest.raises(RecordError, match=f"not_rendered: {field}.*make a record that ends with this turn"):
            rendered(renderer_of(base, source("qwen3")), OTHERS[name])
    with pytest.raises(RecordError, match="not_rendered: the reasoning of turn 1.*no place for it"):
        rendered(renderer_of(base, source("qwen3_vl")), OTHERS["reasoning"])


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_think", "nemotron_3_nano", "gptoss", "lfm2_2_5"])
def test_masks_and_the_last_turn(base: Any, family: str) -> None:
    whole = rendered(renderer_of(base, source(family)), PLAIN["multi"])
    one, two, three = runs(whole.text, whole.spans)
    masked = [{**turn, **({"weight": 0} if number == 3 else {})} for number, turn in enumerate(PLAIN["multi"])]
    found = rendered(renderer_of(base, source(family)), masked)
    assert runs(found.text, found.spans) == [one, three]
    found = rendered(renderer_of(base, source(family), loss_on="last"), masked)
    assert (found.text, runs(found.text, found.spans)) == (whole.text, [three])
    found = rendered(renderer_of(base, source(family), loss_on="all"), masked)
    assert "".join(runs(found.text, found.spans)) == whole.text.replace(two, "")
    assert rendered(renderer_of(base, source(family), loss_on="all"), PLAIN["multi"])[:3] == (whole.text, None, False)
    halved = [{**turn, **({"weight": 0.5} if number == 3 else {})} for number, turn in enumerate(PLAIN["multi"])]
    found = rendered(renderer_of(base, source(family)), halved)
    assert runs(found.text, found.spans) == [one, two, three]
    halves = [span for span, weight in zip(found.spans, found.weights, strict=True) if weight == 0.5]
    assert runs(found.text, halves) == [two]


@pytest.mark.parametrize(
    "family", ["qwen3", "qwen3_5_think", "nemotron_3_nano", "gptoss", "glm4moe", "phi3", "lfm2_2_5"]
)
def test_turns_that_a_report_shows_as_supervised(base: Any, family: str) -> None:
    encoder = ChatEncoder(tokenizer_of(base, source(family)))
    masked = [{**turn, **({"weight": 0} if number == 3 else {})} for number, turn in enumerate(PLAIN["multi"])]
    for messages, flags in ((PLAIN["multi"], [False, True] * 3), (masked, [False, True, False, False, False, True])):
        assert supervised_turns(encoder, normalize({"messages": messages})) == flags


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5_think", "qwen3_6"])
def test_images_are_at_the_position_of_their_content_parts(base: Any, family: str) -> None:
    renderer = renderer_of(base, source(family), placeholders={"image": "<|vision_start|><|image_pad|><|vision_end|>"})
    record = {"images": ["a.png", "b.png"], "messages": [
        {"role": "user", "content": "<image>What is it?"}, {"role": "assistant", "content": "A cat."},
        {"role": "user", "content": "And <image> this?"}, {"role": "assistant", "content": "A dog."}]}  # fmt: skip
    found = renderer.render(normalize(record))
    image = {"type": "image"}
    parts = [[image, {"type": "text", "text": "What is it?"}],
             [{"type": "text", "text": "And "}, image, {"type": "text", "text": " this?"}]]  # fmt: skip
    messages = [dict(message) for message in record["messages"]]
    messages[0]["content"], messages[2]["content"] = parts
    assert found.text == by_transformers(tokenizer_of(base, source(family)), messages, None)
    assert [run.split("</think>")[-1].strip() for run in runs(found.text, found.spans)] == [
        "A cat.<|im_end|>", "A dog.<|im_end|>"]  # fmt: skip


def test_dropped_reasoning_rejects_the_record_and_others_are_packed(base: Any, tmp_path: Path) -> None:
    tokenizer_of(base, source("qwen3")).save_pretrained(tmp_path / "tokenizer")
    records: list[Any] = [{"messages": PLAIN["multi"]}, {"messages": AGENTS["steps"], "tools": TOOLS}]
    records += [{"messages": OTHERS[name]} for name in ("reasoning before", "reasoning last")]
    (tmp_path / "data.jsonl").write_text("\n".join(json.dumps(record) for record in records))
    result = pack(
        tmp_path / "data.jsonl",
        output_dir=tmp_path / "out",
        seq_len=4096,
        tokenizer=tmp_path / "tokenizer",
        sample_class="PackedMultiMixQASample",
        max_reject_rate=0.5,
        workers=1,
    )
    assert (result.manifest.packed, result.manifest.rejects) == (3, {"not_rendered": 1})


LOOKED_FOR = (
    *("</think>", "<think>", "<thi", "<tool_response>", "</tool_response>", "/nothink", "<|im_end|>", "<end_of_turn>"),
    *(" ", "\n", "\t", "a", "b c", "<", "{{ 1 }}", "\ue0fe0\ue0ff"),
)
RENDERED = (
    *("glm4moe", "lfm2_2_5", "lfm2_2_5_v2", "lfm2_2_5_vl"),  # answers without an end, or tags
    *("nemotron_3_5_lightning", "nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra"),  # strip joined contents
)
JOINED = sorted(set(FAMILIES) - set(RENDERED))


@pytest.mark.parametrize("family", JOINED)
def test_skeletons_equal_jinja(base: Any, family: str) -> None:
    chat = renderer_of(base, source(family)).template
    odd = set()
    words = st.sampled_from((*LOOKED_FOR, *sorted(set(SPECIAL.findall(source(family))))))
    contents_of = st.lists(words, max_size=4).map("".join)

    @settings(max_examples=EXAMPLES, deadline=None, derandomize=True)
    @example(contents=["a", "<think>\nb"])  # as the prompt of DeepSeek-R1 ends
    @given(contents=st.lists(contents_of, min_size=2, max_size=6).filter(lambda one: len(one) % 2 == 0))
    def check(contents: list[str]) -> None:
        roles = tuple(("user", "assistant")[turn % 2] for turn in range(len(contents)))
        skeleton = chat.skeleton(roles)
        assert skeleton is not None
        contents = [content if skeleton.guard.accepts([content]) else "ab" for content in contents]
        messages = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=True)]
        assert skeleton.join_with_spans(contents) == chat.render_with_spans(messages)
        odd.update(contents)

    check()
    assert len(odd) > 8


@pytest.mark.parametrize("family", RENDERED)
def test_other_templates_are_rendered(base: Any, family: str) -> None:
    assert renderer_of(base, source(family)).template.skeleton(("user", "assistant")) is None


@pytest.mark.parametrize(
    ("contents", "places"),
    [
        (["hi", " yes\n", "hi"], {0: (1, 3), 1: (4, 7), 2: (8, 10)}),
        (["<r>hi</r>", "yes"], {0: (2, 11), 1: (12, 15)}),  # it looks at how contents begin, not into them
        (["<r>", "", "ok"], {}),
        (["twice", "ok"], {1: (14, 16)}),
    ],
)
def test_markers_locate_contents_only_if_they_change_nothing(contents: list[str], places: dict[int, Any]) -> None:
    def render(messages: Any) -> str:
        written = [
            "a" + m["content"].strip() if m["content"].startswith("<r>") else m["content"].strip() for m in messages
        ]
        return (
            "".join("|" + (f"{one}, {one}" if "twice" in re.sub("[^a-z]", "", one) else one) for one in written) + "|"
        )

    messages = [{"role": "user", "content": content} for content in contents]
    text = render(messages)
    found = content_places(text, messages, render)
    assert found == places


def long_talk(turns: int, kind: str) -> list[dict[str, Any]]:
    """Messages of users and assistants in turn; every few answers differ from the others in their kind."""
    messages: list[dict[str, Any]] = []
    for turn in range(turns):
        content = f"turn number {turn} says it"
        if turn % 2 and turn % 3 == 0:
            content = {"thoughts": "<think>\nhm\n</think>\n\n", "prompts": "<think>\n"}.get(kind, "") + content
        if kind == "ends" and turn % 5 == 0:
            content += "</think>" if turn % 2 else " \n"
        reasoning = {"reasoning_content": "hm"} if kind == "reasoning" and turn % 4 == 1 else {}
        messages.append({"role": ("user", "assistant")[turn % 2], "content": content, **reasoning})
    return messages


@pytest.mark.parametrize("family", FAMILIES)
def test_long_conversations_have_the_spans_that_each_turn_has_by_itself(
    base: Any, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = renderer_of(base, source(family)).template
    for kind in ("plain", "thoughts", "prompts", "ends", "reasoning"):
        results: list[Any] = []
        for least in (4, 10**9):
            monkeypatch.setattr(turns_module, "_LONG", least)
            try:
                results.append(template.render_with_spans(long_talk(16, kind)))
            except RecordError as error:
                results.append(error.reject)
        assert results[0] == results[1], kind


@pytest.mark.parametrize("family", ["qwen2_5", "qwen3", "llama3_1", "gptoss"])
def test_renderings_do_not_grow_with_the_number_of_turns(
    base: Any, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    rendered = ChatTemplate._rendered
    monkeypatch.setattr(
        ChatTemplate, "_rendered", lambda *args, **kw: [sizes.append(len(args[1])), rendered(*args, **kw)][1]
    )
    template = renderer_of(base, source(family)).template
    template.render_with_spans(long_talk(2, "plain"))
    counts = []
    for count in (50, 200):
        sizes.clear()
        _, spans = template.render_with_spans(long_talk(count, "plain"))
        assert len(spans) == count // 2
        counts.append((len(sizes), sum(sizes) / count))
    assert counts[0][0] == counts[1][0] <= 10, "renderings"
    assert counts[1][1] <= 10, "rendered messages per message"
