"""Records and chat templates of the tables in `test_semantics_*.py`: what each record says, by the issue's own list.

An expected value is the rendered text with the supervised part of it in brackets, or a rejection:

    <|im_start|>user
    Hi<|im_end|>                               told
    <|im_start|>assistant
    ⟦Hello.<|im_end|>⟧                         told and supervised
    not_rendered: the tool add                 rejected; the detail begins with this
"""

import io
import re
from pathlib import Path
from typing import Any

from PIL import Image

from energon_packed import ChatEncoder, EncoderSettings, RecordError, normalize
from tests.internals import IGNORE_INDEX

# As Qwen2.5-VL's: a system prompt of its own, contents as text or parts; tools, calls and reasoning have no place.
QWEN_VL = (
    "{% set n = namespace(images=0) %}{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    "{% endif %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}<|im_end|>\n"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' or 'image' in part %}{% set n.images = n.images + 1 %}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in part %}{{ part['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Qwen2.5's and Qwen3's, after Hermes: tools in the system turn, calls and their results in tags.
HERMES = (
    "{%- if tools %}{{- '<|im_start|>system\n' }}"
    "{%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}"
    "{{- '# Tools\n<tools>' }}{%- for tool in tools %}{{- '\n' + (tool | tojson) }}{%- endfor %}"
    "{{- '\n</tools><|im_end|>\n' }}"
    "{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}"
    "{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{%- elif message.role == 'assistant' %}{{- '<|im_start|>assistant\n' }}"
    "{%- if message.reasoning_content %}{{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}{%- endif %}"
    "{{- message.content }}"
    "{%- for call in message.tool_calls or [] %}"
    "{%- if message.content or not loop.first %}{{- '\n' }}{%- endif %}"
    """{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}"""
    "{{- call.function.arguments | tojson }}{{- '}\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\n' }}"
    "{%- elif message.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}"
    "{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
# As SmolLM3's and those that trainers patch: `generation` tags say what the assistant wrote; calls have no place.
TAGGED = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' }}"
    "{%- if message.role == 'assistant' %}{% generation %}"
    "{%- if message.reasoning_content %}{{- '<think>' + message.reasoning_content + '</think>' }}{%- endif %}"
    "{{- message.content + '<|im_end|>' }}{% endgeneration %}"
    "{%- else %}{{- message.content + '<|im_end|>' }}{%- endif %}{{- '\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
# As Llama 3.1's: contents trimmed, tools in the first user turn, one call a turn without text, results as JSON.
LLAMA = (
    "{{- bos_token }}{%- if messages[0].role == 'system' %}{%- set system = messages[0].content | trim %}"
    "{%- set messages = messages[1:] %}{%- else %}{%- set system = '' %}{%- endif %}"
    "{{- '<|start_header_id|>system<|end_header_id|>\n\n' + system + '<|eot_id|>' }}"
    "{%- if tools %}{%- if not messages %}"
    "{{- raise_exception('Cannot put tools in the first user message when there is none!') }}{%- endif %}"
    "{%- set first = messages[0].content | trim %}{%- set messages = messages[1:] %}"
    "{{- '<|start_header_id|>user<|end_header_id|>\n\nAnswer with a call of one of these:\n\n' }}"
    "{%- for tool in tools %}{{- tool | tojson }}{{- '\n\n' }}{%- endfor %}{{- first + '<|eot_id|>' }}{%- endif %}"
    "{%- for message in messages %}"
    "{%- if not (message.role == 'tool' or 'tool_calls' in message) %}"
    "{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content | trim + '<|eot_id|>' }}"
    "{%- elif 'tool_calls' in message %}{%- if message.tool_calls | length != 1 %}"
    "{{- raise_exception('This model only supports single tool-calls at once!') }}{%- endif %}"
    "{%- set call = message.tool_calls[0].function %}"
    """{{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + call.name + '", "parameters": ' }}"""
    "{{- call.arguments | tojson }}{{- '}<|eot_id|>' }}"
    "{%- else %}{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' }}"
    "{%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}"
    "{%- else %}{{- message.content }}{%- endif %}{{- '<|eot_id|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
_LLAMA_TOKENS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")

HI = {"role": "user", "content": "Hi"}
HELLO = {"role": "assistant", "content": "Hello."}
ASK = {"role": "user", "content": "2 + 3?"}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"x": "int"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"x": 2, "y": "drei"}'}}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": '{"sum": 5}'}
FIVE = {"role": "assistant", "content": "5."}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
HERMES_SYSTEM = 'Use these tools: <tools>{"name": "add", "parameters": {"x": "int"}}</tools>'
HERMES_CALL = '<tool_call>\n{"name": "add", "arguments": {"x": 2}}\n</tool_call>'
HERMES_RESULT = '<tool_response>\n{"sum": 5}\n</tool_response>'


def masked(**mask: Any) -> dict[str, Any]:
    """Two answers, the first with a mask."""
    return {"messages": [HI, {**HELLO, **mask}, ASK, FIVE]}


def _turn(name: str, text: str, **fields: Any) -> dict[str, Any]:
    return {"from": name, "value": text, **fields}


RECORDS: dict[str, Any] = {
    "plain": {"messages": [HI, HELLO]},
    "system": {"messages": [{"role": "system", "content": "S."}, HI, HELLO]},
    "tools": {"tools": [ADD], "messages": [HI, HELLO]},
    "tool calls": {"messages": [ASK, CALLING, RESULT, FIVE]},
    "tools and tool calls": {"tools": [ADD], "messages": [ASK, CALLING, RESULT, FIVE]},
    "tool call beside text": {"messages": [ASK, {**CALLING, "content": "Wait."}, RESULT, FIVE]},
    "function_call": {"messages": [
        ASK, {"role": "assistant", "content": "", "function_call": {"name": "add", "arguments": '{"x": 2}'}}, FIVE]},
    "function_call turn": {"conversations": [
        _turn("human", "2 + 3?"), _turn("function_call", '{"name": "add", "arguments": {"x": 2}}'),
        _turn("observation", '{"sum": 5}'), _turn("gpt", "5.")]},
    "tool turn": {"conversations": [_turn("human", "2 + 3?"), _turn("tool", "5"), _turn("gpt", "5.")]},
    "hermes, tools also in a field": {"tools": '[{"name": "add", "parameters": {"x": "int"}}]', "conversations": [
        _turn("system", HERMES_SYSTEM), _turn("human", "2 + 3?"), _turn("gpt", HERMES_CALL),
        _turn("tool", HERMES_RESULT), _turn("gpt", "5.")]},
    "reasoning_content": {"messages": [ASK, {**FIVE, "reasoning_content": "2, 3."}]},
    "reasoning": {"messages": [ASK, {**FIVE, "reasoning": "2, 3."}]},
    "thinking": {"messages": [ASK, {**FIVE, "thinking": "2, 3."}]},
    "weight 0": masked(weight=0),
    "loss false": masked(loss=False),
    "train false": masked(train=False),
    "loss_weight 0": masked(loss_weight=0.0),
    "masked true": masked(masked=True),
    "weight 0 in sharegpt": {"conversations": [
        _turn("human", "Hi"), _turn("gpt", "Hello.", weight=0), _turn("human", "2 + 3?"), _turn("gpt", "5.")]},
    "weight 0.5": masked(weight=0.5),
    "loss_weight 2": masked(loss_weight=2),
    "mask": masked(mask=True),
    "all masked": {"messages": [HI, {**HELLO, "weight": 0}]},
    "system_prompt": {"system_prompt": "S.", "messages": [HI, HELLO]},
    "system_message": {"system_message": "S.", "messages": [HI, HELLO]},
    "instruction": {"instruction": "S.", "conversations": [_turn("human", "Hi"), _turn("gpt", "Hello.")]},
    "prompt beside captions": {"prompt": "Hi", "captions": ["Hello."]},
    "<img>": {"conversations": [_turn("user", "<img>a.png</img>Hi"), _turn("assistant", "Hello.")]},
    "Picture 1:": {"conversations": [_turn("user", "Picture 1: <img>a.png</img>\nHi"), _turn("assistant", "Hello.")]},
    "objects": {"messages": [{"role": "user", "content": "<image>Where is <ref-object>?"},
                             {"role": "assistant", "content": "<bbox>"}],
                "images": ["a.png"], "objects": {"ref": ["it"], "bbox": [[1, 2, 3, 4]]}},
    "bbox": {"messages": [HI, HELLO], "bbox": [1, 2, 3, 4]},
    "min_pixels": {"messages": [{"role": "user", "content": [{"type": "image", "image": "a.png", "min_pixels": 9}]},
                                HELLO]},
    "resized_height": {"messages": [HI, HELLO], "images": [{"path": "a.png", "resized_height": 28}]},
    "url": {"messages": [HI, HELLO], "url": "u", "source": "s"},
}  # fmt: skip
WITH_IMAGES = ("<img>", "Picture 1:")


def encoder_for(tokenizer_dir: Path, template: str, **options: Any) -> ChatEncoder:
    """An encoder of the demo tokenizer with another template, and with Llama's tokens."""
    loaded = ChatEncoder.from_pretrained(tokenizer_dir)
    loaded.tokenizer.add_special_tokens({"additional_special_tokens": list(_LLAMA_TOKENS)}, False)
    loaded.tokenizer.bos_token = "<|begin_of_text|>"
    loaded.tokenizer.chat_template = template
    return ChatEncoder(loaded.tokenizer, loaded.vision, EncoderSettings(**options))


def write_image(folder: Path) -> str:
    """A folder with a.png, 56 x 56: 4 image tokens."""
    out = io.BytesIO()
    Image.new("RGB", (56, 56), "red").save(out, "PNG")
    (folder / "a.png").write_bytes(out.getvalue())
    return str(folder)


def told(encoder: ChatEncoder, record: Any, root: str | None = None) -> str:
    """What an encoder makes of a record, in the form of the tables; a run of image tokens is one."""
    try:
        sample = encoder.encode(normalize(record, image_root=root))
    except RecordError as error:
        return str(error)
    assert encoder.length(normalize(record, image_root=root)) == len(sample)
    pieces, ids, start = [], sample.input_ids.tolist(), 0
    targets = (sample.labels != IGNORE_INDEX).tolist()
    assert (sample.labels[targets] == sample.input_ids[targets]).all()
    for end in range(1, len(ids) + 1):
        if end == len(ids) or targets[end] != targets[start]:
            text = encoder.tokenizer.decode(ids[start:end])
            pieces.append(f"⟦{text}⟧" if targets[start] else text)
            start = end
    return re.sub(r"(<\|image_pad\|>)+", "<|image_pad|>", "".join(pieces))


def matches(found: str, expected: str) -> bool:
    """A rejection begins as expected; anything else is the same."""
    return found.startswith(expected) if re.match(r"[a-z_]+: ", expected) else found == expected
