"""The chat templates of about 40 model families, as trl ships them, and conversations for them.

For many of them trl has a twin with `{% generation %}` tags, patched by hand: a second opinion on what is supervised.
"""

import copy
import re
from datetime import date
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from tests.internals import TODAY, ChatTemplate, Renderer, TokenizerParts

BAR = "\uff5c"
"""The full-width bar in DeepSeek's tokens."""
SPECIAL = re.compile(
    rf"<{BAR}[^{BAR}<>{{}}\s]+{BAR}>|"
    r"<\|[^|<>{}\s\"']+\|>|<[a-z_]+\|>|<\|[a-z_]+>|\[/?INST\]|\[gMASK\]|<sop>|</s>"
    r"|<(?:start|end)_of_(?:turn|utterance|image)>|<image>"
)
_ADDED = ["<tool_call>", "</tool_call>", "<think>", "</think>", "<tool_response>", "</tool_response>"]


def folder() -> Path:
    """The templates of the installed trl; trl itself is not imported."""
    spec = find_spec("trl")
    assert spec is not None, "pip install -c constraints.txt -e '.[dev]'"
    return Path((spec.submodule_search_locations or [])[0]) / "chat_templates"


def families() -> list[str]:
    return sorted(path.stem for path in folder().glob("*.jinja") if not path.stem.endswith("_training"))


def source(name: str) -> str:
    return (folder() / f"{name}.jinja").read_text(encoding="utf-8")


def tokenizer_of(base: Any, template: str) -> Any:
    """A tokenizer with a template and the special tokens that it writes."""
    tokenizer = copy.deepcopy(base)
    special = sorted({*SPECIAL.findall(template), "<|begin_of_text|>", "<|endoftext|>"})
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.add_tokens(_ADDED)
    tokenizer.bos_token, tokenizer.eos_token = "<|begin_of_text|>", "<|endoftext|>"
    tokenizer.chat_template = template
    return tokenizer


def renderer_of(base: Any, template: str, **options: Any) -> Renderer:
    chat = ChatTemplate(TokenizerParts.of(tokenizer_of(base, template)))
    return Renderer(chat, **{"placeholders": {}, "end": "", "loss_on": "assistant", **options})


def runs(text: str, spans: Any) -> list[str]:
    """The supervised texts; spans that touch are one."""
    merged: list[list[int]] = []
    for start, end in spans:
        if merged and merged[-1][1] == start:
            merged[-1][1] = end
        elif end > start:
            merged.append([start, end])
    return [text[start:end] for start, end in merged]


def by_transformers(tokenizer: Any, messages: list[Any], tools: Any) -> str:
    """The reference text, on the day that templates are told."""
    text: str = tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=False, date_string=TODAY.strftime("%d %b %Y")
    )
    for form in ("%Y-%m-%d", "%d %b %Y", "%d %B %Y", "%B %d, %Y"):
        text = text.replace(date.today().strftime(form), TODAY.strftime(form))
    return text


@cache
def _twin(name: str) -> str | None:
    return source(f"{name}_training") if (folder() / f"{name}_training.jinja").exists() else None


def twin_runs(name: str, tokenizer: Any, messages: list[Any], tools: Any) -> list[str] | None:
    """What the twin marks; None where trl has none."""
    template = _twin(name)
    if template is None:
        return None
    texts, spans = render_jinja_template(
        conversations=[messages],
        tools=tools,
        chat_template=template,
        return_assistant_tokens_mask=True,
        **tokenizer.special_tokens_map,
    )
    return runs(texts[0], spans[0])


def ask(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def say(content: str, *calls: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **({"tool_calls": list(calls)} if calls else {}), **fields}


def result(content: str, ident: str = "c1") -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": ident, "name": "add"}


def call(ident: str = "c1", **arguments: Any) -> dict[str, Any]:
    return {"id": ident, "type": "function", "function": {"name": "add", "arguments": arguments}}


_TEXT = {"type": "string", "description": "Two."}
_SCHEMA = {"type": "object", "properties": {"x": {"type": "integer", "description": "One."}, "y": _TEXT}}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": _SCHEMA}}]
SYSTEM = {"role": "system", "content": "Be brief."}
Q1, A1, Q2, A2 = ask("What is 2+3?"), say("It is five."), ask("And four?"), say("It is nine.")
THOUGHT = "<think>\nTwo and three.\n</think>\n\n"
NESTED = {"a": [1, None, True, "日本"], "b": {"c": -1.5}}

PLAIN: dict[str, list[Any]] = {
    "single": [Q1, A1],
    "multi": [Q1, A1, Q2, A2, ask("Thanks a lot."), say("You are welcome.")],
    "alike": [ask("Yes."), say("Yes."), ask("Yes."), say("Yes.")],
    "white space": [ask(" What is 2+3?\n"), say("\n It is five. \n"), ask("And\n\nfour? "), say(" It is nine.\n\n")],
    "tags": [
        ask("Is <b>x</b> ok?"),
        say("<b>yes</b>"),
        ask("<tool_response>no</tool_response>"),
        say("<thin> is one."),
    ],
    "question last": [Q1, A1, Q2],
}
"""Every template renders these."""
OTHERS: dict[str, list[Any]] = {
    "system": [SYSTEM, Q1, A1, Q2, A2],
    "starts with assistant": [say("Welcome here."), Q1, A1],
    "assistant after system": [SYSTEM, say("Welcome here."), Q1, A1],
    "two answers": [Q1, say("Well, hm."), A1, Q2, A2],
    "reasoning": [Q1, say("It is five.", reasoning_content="Two and three.")],
    "reasoning last": [Q1, A1, Q2, say("It is nine.", reasoning_content="Five and four.")],
    "reasoning before": [Q1, say("It is five.", reasoning_content="Two and three."), Q2, A2],
    "think tag": [Q1, say("<think> is a tag."), Q2, say("</b><think> is, too.")],
    "thought": [Q1, say(THOUGHT + "It is five.")],
    "thoughts": [Q1, say(THOUGHT + "It is five."), Q2, say(THOUGHT + "It is nine.")],
}
AGENTS: dict[str, list[Any]] = {
    "no call": [Q1, A1],
    "steps": [Q1, say("", call(x=2, y="drei")), result("five here"), say("", call("c2", x=5, y='ü"n')),
              result("nine here", "c2"), A2],
    "text and calls": [Q1, say("Let me see.", call(x=2)), result("five here"), A1, Q2,
                       say("Let me add.", call("c2", x=5)), result("nine here", "c2"), A2],
    "two calls": [Q1, say("", call(x=2), call("c2", x=3)), result("five here"), result("six here", "c2"), A1],
    "values": [Q1, say("", call(x=2.5, y=NESTED)), result('{"sum": 5}'), A1],
    "reasoning and calls": [Q1, say("", call(x=2), reasoning_content="I must add."), result("five here"),
                            say("It is five.", reasoning_content="I have it.")],
}  # fmt: skip
"""With `TOOLS`."""
