"""What the record says is what is trained on: what a template drops costs the record, and weights are kept."""

import json
from pathlib import Path
from typing import Any

import pytest

from energon_packed import ChatEncoder, Conversation, EncoderSettings, Message, RecordError, StoredSample
from tests.encoding.semantics import LLAMA
from tests.internals import CHATML_TEMPLATE, IGNORE_INDEX, codec_for
from tests.turns import supervised_turns

WITHOUT_CALLS = CHATML_TEMPLATE.replace(
    "{% if message['tool_calls'] %}{{ message['tool_calls'] | tojson }}{% endif %}", ""
)
WITH_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML_TEMPLATE.replace(
    "{% if message['content'] is string",
    "{% if message['reasoning_content'] %}<think>{{ message['reasoning_content'] }}</think>{% endif %}"
    "{% if message['content'] is string",
)
TAGGED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n"
    "{% endfor %}"
)
NO_SYSTEM = (
    "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)
NO_SYSTEM += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CALL = {"tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"x": 5, "to": ["ten", True]}}}]}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


@pytest.fixture
def encoder_with(tokenizer_dir: Path) -> Any:
    def make(template: str, **options: Any) -> ChatEncoder:
        encoder = ChatEncoder.from_pretrained(tokenizer_dir)
        encoder.tokenizer.chat_template = template
        return ChatEncoder(encoder.tokenizer, settings=EncoderSettings(**options))

    return make


def talk(*turns: Message, tools: Any = None) -> Conversation:
    return Conversation(messages=turns, tools=tools)


USER, ANSWER = Message("user", "What is 2 + 3?"), Message("assistant", "5.")


@pytest.mark.parametrize(
    ("template", "conversation", "missing"),
    [
        (WITHOUT_CALLS, talk(USER, Message("assistant", "", CALL)), "the tool call add of turn 1"),
        (CHATML_TEMPLATE, talk(USER, ANSWER, tools=TOOLS), "the tool add"),
        (
            CHATML_TEMPLATE,
            talk(USER, Message("assistant", "5.", {"reasoning_content": "5"})),
            "the reasoning of turn 1",
        ),
        (NO_SYSTEM, talk(Message("system", "Be brief."), USER, ANSWER), "the content of turn 0 (system)"),
        (
            CHATML_TEMPLATE.replace("message['tool_calls'] | tojson", "message['tool_calls'][0]['function']['name']"),
            talk(USER, Message("assistant", "", CALL)),
            "the x argument of add in turn 1",
        ),
    ],
)
def test_what_a_template_drops_is_named(
    encoder_with: Any, template: str, conversation: Conversation, missing: str
) -> None:
    encoder = encoder_with(template)
    for call in (encoder.encode, encoder.length):
        with pytest.raises(RecordError, match="the chat template has no place for it") as caught:
            call(conversation)
        assert caught.value.reason.value == "not_rendered"
        assert caught.value.detail.startswith(missing)


BESIDE = {"tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"x": 5}}}]}


@pytest.mark.parametrize(
    ("template", "conversation", "missing"),
    [
        # "5" stands in the text, but as an argument.
        (LLAMA, talk(USER, Message("assistant", "5", BESIDE), ANSWER), "the content of turn 1 (assistant)"),
        (NO_SYSTEM, talk(Message("system", "a"), USER, ANSWER), "the content of turn 0 (system)"),
        (WITH_TOOLS, talk(Message("user", "Hello?", {"name": "Ann"}), ANSWER), "the name of turn 0 (user)"),
    ],
)
def test_short_values_that_occur_elsewhere_in_the_text_are_still_missed(
    encoder_with: Any, template: str, conversation: Conversation, missing: str
) -> None:
    with pytest.raises(RecordError) as caught:
        encoder_with(template).encode(conversation)
    assert (caught.value.reason.value, caught.value.detail.startswith(missing)) == ("not_rendered", True)


# As Qwen3's: thoughts in the content are taken apart and put together again.
RESPACING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if '</think>' in m.content %}<think>\n"
    "{{ m.content.split('</think>')[0].split('<think>')[-1].strip() }}\n</think>\n\n"
    "{{ m.content.split('</think>')[-1].strip() }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "conversation", "told"),
    [
        (LLAMA, talk(USER, Message("assistant", "", BESIDE), Message("tool", 'a "5"\n'), ANSWER), r'"a \"5\"\n"'),
        (RESPACING, talk(USER, Message("assistant", "<think>2 and 3.</think>It is 5.")), "</think>\n\nIt is 5."),
        (
            "{% for m in messages %}{{ m.role + ' ' + (m.name or '') + m.content }}<|im_end|>{% endfor %}"
            "{% if add_generation_prompt %}assistant {% endif %}",
            talk(Message("user", "Hello?", {"name": "Ann"}), ANSWER),
            "user AnnHello?",
        ),
    ],
)
def test_escapes_and_white_space_of_a_template_lose_nothing(
    encoder_with: Any, template: str, conversation: Conversation, told: str
) -> None:
    encoder = encoder_with(template)
    assert told in encoder.tokenizer.decode(encoder.encode(conversation).input_ids)


@pytest.mark.parametrize(
    "conversation",
    [
        talk(USER, Message("assistant", "", CALL), Message("tool", "15"), ANSWER, tools=TOOLS),
        talk(USER, Message("assistant", " 5. \n", {"reasoning_content": "2 and 3"})),
        talk(Message("system", "Be brief."), USER, ANSWER),
    ],
)
def test_a_completely_rendered_conversation_is_accepted(encoder_with: Any, conversation: Conversation) -> None:
    encoder = encoder_with(WITH_TOOLS)
    text = encoder.tokenizer.decode(encoder.encode(conversation).input_ids)
    assert all(message.content.strip() in text for message in conversation.messages)
    assert encoder.length(conversation) == len(encoder.encode(conversation))


def targets(encoder: ChatEncoder, conversation: Conversation) -> str:
    sample = encoder.encode(conversation)
    return str(encoder.tokenizer.decode(sample.input_ids[sample.labels != IGNORE_INDEX]))


@pytest.mark.parametrize("template", [CHATML_TEMPLATE, TAGGED, WITH_TOOLS])
def test_turns_of_weight_0_are_context(encoder_with: Any, template: str) -> None:
    turns = [USER, Message("assistant", "First.", weight=0), USER, Message("assistant", "Second."), USER]
    conversation = talk(*turns, Message("assistant", "Third.", weight=0))
    assert targets(encoder_with(template), conversation) == "Second.<|im_end|>"
    with pytest.raises(RecordError, match="no token after the first is a target"):
        encoder_with(template, loss_on="last").encode(conversation)
    kept = talk(*turns, Message("assistant", "Third."))
    assert targets(encoder_with(template, loss_on="last"), kept) == "Third.<|im_end|>"
    everything = targets(encoder_with(template, loss_on="all"), conversation)
    assert "First." not in everything
    assert "Third." not in everything
    assert everything.count("What is 2 + 3?") == 3
    quiet = talk(Message("user", "Hush.", weight=0), ANSWER)
    assert "Hush." not in targets(encoder_with(template, loss_on="all"), quiet)
    assert supervised_turns(encoder_with(template), conversation) == [False, False, False, True, False, False]


@pytest.mark.parametrize(("role", "weight"), [("assistant", -1), ("assistant", float("nan")), ("user", 0.5)])
def test_invalid_weights_of_a_custom_conversation_are_refused_by_name(
    encoder_with: Any, role: str, weight: float
) -> None:
    turns = [turn._replace(weight=weight) if turn.role == role else turn for turn in (USER, ANSWER)]
    with pytest.raises(RecordError, match=rf"{role} turn \d has the loss weight {weight:g}; use 0") as caught:
        encoder_with(CHATML_TEMPLATE).encode(talk(*turns))
    assert caught.value.reason.value == "unsupported_field"


@pytest.mark.parametrize("flavor", ["PackedCaptioningSample", "PackedMultiMixQASample", "MultiMixQASample"])
def test_weights_are_stored_and_trained_on_as_they_were(encoder_with: Any, flavor: str) -> None:
    encoder, codec = encoder_with(CHATML_TEMPLATE), codec_for(flavor)
    conversation = talk(USER, Message("assistant", "First.", weight=0), USER, Message("assistant", "Second."))
    raw = {"__key__": "k", **dict(codec.write([StoredSample(conversation=conversation, length=9)]))}
    (read,) = codec.read(raw)
    assert targets(encoder, read.conversation) == targets(encoder, conversation) == "Second.<|im_end|>"
    assert "weight" not in json.dumps([m.as_dict() for m in read.conversation.messages])


def test_supervised_turns_come_from_labels(encoder_with: Any) -> None:
    conversation = talk(Message("system", "S"), USER, ANSWER, USER, Message("assistant", "Six."))
    assert supervised_turns(encoder_with(CHATML_TEMPLATE), conversation) == [False, False, True, False, True]
    assert supervised_turns(encoder_with(CHATML_TEMPLATE, loss_on="last"), conversation) == [False] * 4 + [True]
    cut = encoder_with(CHATML_TEMPLATE)
    length = cut.length(conversation)
    assert supervised_turns(cut, conversation, length - 8) == [False, False, True, False, False]
    assert supervised_turns(cut, Conversation(text="A story.")) == [True]
