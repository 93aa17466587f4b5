"""Which tokens are supervised."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors

from energon_packed import (
    ChatEncoder,
    ConfigError,
    EncodedSample,
    EncoderSettings,
    RecordError,
    Reject,
    TemplateError,
    normalize,
)
from tests.internals import CHATML_TEMPLATE

CONVERSATION = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 2 plus 3?"},
        {"role": "assistant", "content": "It is 5."},
        {"role": "user", "content": "And 4?"},
        {"role": "assistant", "content": "Nine.\n"},
    ]
}
TAGGED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m['content'] }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Forgets the thoughts of earlier turns, as reasoning models do.
FORGETTING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split('</think>')[-1] }}"
    "{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def encoder_with(tokenizer_dir: Path, template: str | None, **options: Any) -> ChatEncoder:
    loaded = ChatEncoder.from_pretrained(tokenizer_dir)
    loaded.tokenizer.chat_template = template
    return ChatEncoder(loaded.tokenizer, loaded.vision, EncoderSettings(**options))


def supervised(encoder: ChatEncoder, record: Any) -> list[str]:
    """Supervised text, one string per run of targets."""
    encoded = encoder.encode(normalize(record))
    runs: list[list[int]] = [[]]
    for token, label in zip(encoded.input_ids.tolist(), encoded.labels.tolist(), strict=True):
        if label != -100:
            assert label == token
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [encoder.tokenizer.decode(run) for run in runs if run]


@pytest.mark.parametrize("template", [CHATML_TEMPLATE, TAGGED])
def test_assistant_turns_with_their_end_are_supervised(tokenizer_dir: Path, template: str) -> None:
    found = supervised(encoder_with(tokenizer_dir, template), CONVERSATION)
    assert found == ["It is 5.<|im_end|>", "Nine.\n<|im_end|>"]


@pytest.mark.parametrize("template", [CHATML_TEMPLATE, TAGGED])
def test_loss_on_the_last_turn_or_on_all_text(tokenizer_dir: Path, template: str) -> None:
    last = encoder_with(tokenizer_dir, template, loss_on="last")
    assert supervised(last, CONVERSATION) == ["Nine.\n<|im_end|>"]
    everything = supervised(encoder_with(tokenizer_dir, template, loss_on="all"), CONVERSATION)
    assert len(everything) == 1
    assert everything[0].startswith("<|im_start|>system\nBe brief.")
    assert everything[0].endswith("Nine.\n<|im_end|>\n")


def test_tags_around_the_content_alone_still_supervise_the_end_of_turn(tokenizer_dir: Path) -> None:
    template = TAGGED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
    assert template != TAGGED
    assert supervised(encoder_with(tokenizer_dir, template), CONVERSATION) == [
        "It is 5.<|im_end|>",
        "Nine.\n<|im_end|>",
    ]


def test_the_last_turn_has_all_of_its_tagged_parts(tokenizer_dir: Path) -> None:
    block = "{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}"
    template = TAGGED.replace(block, "{% generation %}Hm. {% endgeneration %}So: " + block)
    assert template != TAGGED
    found = supervised(encoder_with(tokenizer_dir, template, loss_on="last"), CONVERSATION)
    assert [text.strip() for text in found] == ["Hm.", "Nine.\n<|im_end|>"]


def test_a_turn_begins_with_what_it_shares_with_the_prompt(tokenizer_dir: Path) -> None:
    """As DeepSeek-R1's: the prompt opens a thought, and no turn has one."""
    template = CHATML_TEMPLATE.replace("assistant\n' }}{% endif %}", "assistant\n<think>\n' }}{% endif %}")
    assert template != CHATML_TEMPLATE
    encoder = encoder_with(tokenizer_dir, template)
    assert supervised(encoder, CONVERSATION) == ["It is 5.<|im_end|>", "Nine.\n<|im_end|>"]
    tag = {"messages": [*CONVERSATION["messages"][:2], {"role": "assistant", "content": "<thin>"}]}
    assert supervised(encoder, tag) == ["<thin><|im_end|>"]


def test_a_template_whose_answers_never_begin_with_its_prompt_stops_the_run(tokenizer_dir: Path) -> None:
    template = CHATML_TEMPLATE.replace("{{ '<|im_start|>assistant\n' }}", "{{ 'Answer: ' }}")
    assert template != CHATML_TEMPLATE
    with pytest.raises(TemplateError, match="even in a plain question and answer.*generation %} tags"):
        encoder_with(tokenizer_dir, template).length(normalize(CONVERSATION))


@pytest.mark.parametrize("end", ["<|im_end|>\n", "\n", " \n\n"])
def test_a_turn_of_a_long_conversation_is_supervised_as_in_a_short_conversation(tokenizer_dir: Path, end: str) -> None:
    """Margins around answers are remembered in long conversations, and some answers need margins of their own."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}END{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ).replace("END", end)
    loaded = ChatEncoder.from_pretrained(tokenizer_dir)
    loaded.tokenizer.add_tokens(["</call>", "<note>"])
    loaded.tokenizer.chat_template = template
    encoder = ChatEncoder(loaded.tokenizer)
    answers = [
        "Yes.",
        "</call>",
        "No </call>",
        "<note>No",
        "x <note>",
        "Yes. ",
        "assistant\nYes.",
        "Yes.\n",
        "start\nYes",
    ]
    answers += ["It is <|im_end|>", "<|im_start|>assistant\nYes.", "Yes. </call> ", "Maybe."]
    turns = []
    for number, answer in enumerate(answers * 3):
        question = "Is it so?" if number % 3 else f"And {number}? <|im_start|>"
        turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    turns.append({"role": "user", "content": "Thanks."})
    found = supervised(encoder, {"messages": turns})
    # Two answers that are next to each other would be one run.
    expected = [supervised(encoder, {"messages": turns[at : at + 3]}) for at in range(0, len(turns) - 1, 2)]
    assert found == [text for runs in expected for text in runs]
    assert all(len(runs) == 1 for runs in expected)


def test_documents_end_once(tokenizer_dir: Path) -> None:
    encoder = ChatEncoder.from_pretrained(tokenizer_dir)
    end = encoder.tokenizer.eos_token_id
    assert encoder.encode(normalize({"text": "Once."})).input_ids.tolist().count(end) == 1
    encoder.tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <|im_end|>", special_tokens=[("<|im_end|>", end)]
    )
    adding = ChatEncoder(encoder.tokenizer)
    assert adding.encode(normalize({"text": "Once."})).input_ids.tolist().count(end) == 1


def test_broken_image_settings_are_named(tokenizer_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"preprocessor_config.json is not valid JSON"):
        ChatEncoder.from_pretrained(tokenizer_dir, tmp_path)


def test_the_model_type_decides_the_family(tokenizer_dir: Path, tmp_path: Path) -> None:
    settings = json.loads((tokenizer_dir / "preprocessor_config.json").read_text())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text('{"model_type": "llava_onevision1_5"}')
    vision = ChatEncoder.from_pretrained(tokenizer_dir, tmp_path).vision
    assert type(vision).__name__ == "LlavaOnevision15Vision"


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("newline", ["{{ '\\n' }}", ""])
def test_a_tool_call_ends_with_the_end_of_its_turn(tokenizer_dir: Path, special: bool, newline: str) -> None:
    """The tokenizers of Qwen2.5 and Qwen3 add </tool_call> as a token; a model must still learn to stop after it."""
    tokenizer = ChatEncoder.from_pretrained(tokenizer_dir).tokenizer
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"], special_tokens=special)
    tagged = TAGGED.replace("{{ '\n' }}", newline)
    call = {"messages": [{"role": "user", "content": "Rain?"}, {"role": "assistant", "content": "x</tool_call>"}]}
    call["messages"] += [{"role": "user", "content": "So?"}, {"role": "assistant", "content": "Yes."}]
    for template in (tagged, tagged.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")):
        tokenizer.chat_template = template
        ends = [text[-20:] for text in supervised(ChatEncoder(tokenizer), call)]
        assert [end.replace(" ", "") for end in ends] == ["x</tool_call><|im_end|>"[-20:], "Yes.<|im_end|>"]


@pytest.mark.parametrize(
    ("between", "last", "expected"),
    [
        ("", "<|im_end|>", ["b", "d<|im_end|>"]),  # no turn but the last has an end
        ("{{ '\n' }}<|im_end|>", "{{ '\n' }}<|im_end|>", ["b\n<|im_end|>", "d\n<|im_end|>"]),
        ("", "", ["b", "d"]),
    ],
)
def test_ends_of_turns_that_the_tags_leave_out(
    tokenizer_dir: Path, between: str, last: str, expected: list[str]
) -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
        "{% generation %}{{ m['content'] }}{% endgeneration %}{% if loop.last %}LAST{% else %}BETWEEN{% endif %}"
        "{% else %}{{ m['content'] }}<|im_end|>{% endif %}{% endfor %}"
    )
    encoder = encoder_with(tokenizer_dir, template.replace("LAST", last).replace("BETWEEN", between))
    turns = [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 2, "abcd", strict=True)]
    assert supervised(encoder, {"messages": turns}) == expected


def test_images_are_never_supervised(tokenizer_dir: Path, demo: Any) -> None:
    record = next(r for line in demo.jsonl.open() if "images" in (r := _parsed(line)) and "captions" in r)
    encoder = encoder_with(tokenizer_dir, CHATML_TEMPLATE, loss_on="all")
    encoded = encoder.encode(normalize(record, image_root=str(demo.jsonl.parent)))
    pads = encoded.input_ids == encoder.image_token_id
    assert pads.any()
    assert (encoded.labels[pads] == -100).all()
    assert (encoded.labels[~pads] == encoded.input_ids[~pads]).all()


def test_a_conversation_may_start_with_the_assistant(tokenizer_dir: Path) -> None:
    record = {"messages": [{"role": "assistant", "content": "Welcome."}, {"role": "user", "content": "Hi"}]}
    assert supervised(encoder_with(tokenizer_dir, CHATML_TEMPLATE), record) == ["Welcome.<|im_end|>"]


def test_tool_calls_are_supervised_and_tool_results_are_not(tokenizer_dir: Path) -> None:
    record = {
        "messages": [
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": "", "tool_calls": [{"name": "weather"}]},
            {"role": "tool", "content": "sunny"},
            {"role": "assistant", "content": "Sunny."},
        ],
        "tools": [{"name": "weather"}],
    }
    template = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML_TEMPLATE
    found = supervised(encoder_with(tokenizer_dir, template), record)
    call = '[{"type": "function", "function": {"name": "weather", "arguments": {}}}]'  # as templates expect calls
    assert found == [f"{call}<|im_end|>", "Sunny.<|im_end|>"]


def test_a_template_that_forgets_earlier_thoughts_costs_the_records_that_have_them(tokenizer_dir: Path) -> None:
    encoder = encoder_with(tokenizer_dir, FORGETTING)
    turns = [
        {"role": "user", "content": "2 + 3?"},
        {"role": "assistant", "content": "<think>easy</think>5"},
        {"role": "user", "content": "+ 4?"},
        {"role": "assistant", "content": "<think>hm</think>9"},
    ]
    for call in (encoder.encode, encoder.length):
        with pytest.raises(RecordError, match="content of turn 1 .* drops it once later turns follow") as caught:
            call(normalize({"messages": turns}))
        assert caught.value.reason.value == "not_rendered"
    assert supervised(encoder, {"messages": turns[:2]}) == ["<think>easy</think>5<|im_end|>"]
    turns[1]["content"] = "5"
    assert supervised(encoder, {"messages": turns}) == ["5<|im_end|>", "<think>hm</think>9<|im_end|>"]


def test_a_template_that_refuses_turns_rejects_the_record(tokenizer_dir: Path) -> None:
    template = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('user first') }}{% endif %}" + CHATML_TEMPLATE
    encoder = encoder_with(tokenizer_dir, template)
    for call in (encoder.encode, encoder.length):
        with pytest.raises(RecordError, match="bad_role: .*user first"):
            call(normalize(CONVERSATION))


def test_no_template_no_messages(tokenizer_dir: Path) -> None:
    encoder = encoder_with(tokenizer_dir, None)
    with pytest.raises(ConfigError, match="no chat template"):
        encoder.length(normalize(CONVERSATION))
    assert encoder.length(normalize({"text": "Once upon a time."})) > 1


def test_nothing_supervised_is_refused(encoder: ChatEncoder) -> None:
    for record in (
        {"messages": [{"role": "user", "content": "Anybody?"}]},
        {"input_ids": [1, 2, 3], "loss_mask": [0, 0, 0]},
    ):
        for call in (encoder.encode, encoder.length):
            with pytest.raises(RecordError, match="no_supervised_tokens"):
                call(normalize(record))


def test_image_tokens_in_text_are_refused(tokenizer_dir: Path) -> None:
    encoder = ChatEncoder.from_pretrained(tokenizer_dir, allow_special_in_text=True)
    for token, reason in (("<|image_pad|>", "image_count_mismatch"), ("<|video_pad|>", "video_count_mismatch")):
        record = {"prompts": [f"What is {token}?"], "captions": ["A token."]}
        for call in (encoder.encode, encoder.length):
            with pytest.raises(RecordError, match=reason):
                call(normalize(record))


def test_ids_that_the_tokenizer_does_not_have_reject_their_record_alone(encoder: ChatEncoder) -> None:
    most = encoder.rules.vocabulary
    assert most is not None
    *context, last = encoder.encode(normalize({"text": "A document."})).input_ids.tolist()
    labels = [-100] * len(context) + [last]
    records = [{"input_ids": [last, most]}, {"input_ids": [*context, last], "labels": labels}]
    rejected, sample = encoder.encode_many([normalize(record) for record in records])
    assert isinstance(rejected, Reject)
    assert rejected.detail == f"input_ids contains {most}, outside the {most} tokens of the tokenizer"
    assert isinstance(sample, EncodedSample)
    assert sample.labels.tolist() == labels


def test_images_without_an_image_processor_stop_the_run(text_tokenizer_dir: Path) -> None:
    encoder = ChatEncoder.from_pretrained(text_tokenizer_dir)
    with pytest.raises(
        ConfigError,
        match=r"record a has images or videos, but .*text-tokenizer has no image settings .*Set `processor`",
    ):
        encoder.length(normalize({"id": "a", "images": [b"x"], "captions": ["c"]}))


def test_truncation_keeps_images_whole_and_a_target(encoder: ChatEncoder, demo: Any) -> None:
    text = encoder.encode(normalize(CONVERSATION))
    cut = text.truncated(len(text) - 1)
    assert (len(cut), cut.input_ids.tolist()) == (len(text) - 1, text.input_ids[:-1].tolist())
    assert text.truncated(len(text)) is text
    with pytest.raises(RecordError, match="no_supervised_tokens: .* the first 5 contain no target"):
        text.truncated(5)
    record = next(r for line in demo.jsonl.open() if "images" in (r := _parsed(line)) and "captions" in r)
    with_image = encoder.encode(normalize(record, image_root=str(demo.jsonl.parent)))
    with pytest.raises(RecordError, match="overlong: .* would remove part of an image"):
        with_image.truncated(8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_on": "nothing"}, "`loss_on` must be one of assistant, last, all, got 'nothing'"),
        ({"image_processor": "Pixtral"}, "unknown vision family 'Pixtral'. .* one of .*qwen25vl"),
        ({"factor": 31}, r"`factor` must be patch size times merge size .*, got `factor` 31"),
        ({"factor": 48, "patch_size": 14}, "`factor` must be .*, got `factor` 48, `patch_size` 14"),
        ({"vision_family": "pixtral"}, "unknown vision family 'pixtral'. Set `vision_family`"),
        ({"patch_order": "col"}, "`patch_order` must be one of auto, row, block, got 'col'"),
        ({"min_pixels": 100, "max_pixels": 50}, "`min_pixels` must be at most `max_pixels` 50, got 100"),
        ({"processor": "/nowhere"}, "/nowhere is not a folder"),
    ],
)
def test_bad_options_are_named(tokenizer_dir: Path, options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ChatEncoder.from_pretrained(tokenizer_dir, **options)


def test_folders_without_a_tokenizer_or_processor_are_named(text_tokenizer_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no tokenizer"):
        ChatEncoder.from_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"has no preprocessor_config\.json"):
        ChatEncoder.from_pretrained(text_tokenizer_dir, tmp_path)
    with pytest.raises(ConfigError, match="need an image processor. Set `image_processor`"):
        ChatEncoder.from_pretrained(text_tokenizer_dir, min_pixels=100)


def test_fingerprints_see_every_setting(tokenizer_dir: Path) -> None:
    options: list[dict[str, Any]] = [{}, {"loss_on": "last"}, {"max_pixels": 50_000}, {"image_processor": "Qwen3VL"}]
    prints = [ChatEncoder.from_pretrained(tokenizer_dir, **o).fingerprint() for o in options]
    assert len({*prints, encoder_with(tokenizer_dir, TAGGED).fingerprint()}) == len(options) + 1
    encoder = ChatEncoder.from_pretrained(tokenizer_dir)
    assert encoder.fingerprint() == prints[0]
    encoder.tokenizer.eos_token = "<|im_start|>"  # the end of a document; tokenizer.json is the same
    other = ChatEncoder(encoder.tokenizer, encoder.vision)
    assert other.text_tokenizer.serialized == encoder.text_tokenizer.serialized
    assert other.fingerprint() != prints[0]


def _parsed(line: str) -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads(line)
    except json.JSONDecodeError:
        return {}
    return value
