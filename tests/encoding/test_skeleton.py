"""Text joined from a skeleton is the text that Jinja renders, and so are the supervised characters."""

import copy
import pickle
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from tests.internals import (
    CHATML_TEMPLATE,
    ChatTemplate,
    ContentGuard,
    Skeleton,
    TokenizerParts,
    marker,
)

LLAMA = (
    "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n\n' + m['content'] + '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n\n' }}{% endif %}"
)
# A system prompt of its own where none is given, and roles that choose the text.
DEFAULT_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

UPPER = CHATML_TEMPLATE.replace("{{ message['content'] }}", "{{ message['content'] | upper }}")
NO_END = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
CONTENTS = st.text(st.sampled_from("ab \n\t<|>é") | st.characters(codec="utf-8"), max_size=12) | st.sampled_from(
    ["<|im_end|>", "<|im_end|>\n", " x ", "{{ messages }}", "\ue0fe1\ue0ff"]
)


@pytest.fixture(scope="module")
def template_of(tokenizer_dir: Path) -> object:
    def make(source: str) -> ChatTemplate:
        tokenizer = AutoTokenizer.from_pretrained(str(tokenizer_dir))
        tokenizer.bos_token = "<|endoftext|>"
        tokenizer.chat_template = source
        return ChatTemplate(TokenizerParts.of(tokenizer))

    return make


@pytest.mark.parametrize("source", [CHATML_TEMPLATE, LLAMA, DEFAULT_SYSTEM])
def test_a_skeleton_joins_what_jinja_renders(template_of: object, source: str) -> None:
    template = template_of(source)  # type: ignore[operator]

    @settings(max_examples=60, deadline=None)
    @given(system=st.booleans(), turns=st.lists(st.tuples(CONTENTS, CONTENTS), min_size=1, max_size=3), first=CONTENTS)
    def check(system: bool, turns: list[tuple[str, str]], first: str) -> None:
        messages = [{"role": "system", "content": first}] if system else []
        for question, answer in turns:
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        skeleton = template.skeleton(tuple(message["role"] for message in messages))
        assert skeleton is not None
        contents = [message["content"] for message in messages]
        assert skeleton.join_with_spans(contents) == template.render_with_spans(messages)

    check()


def test_a_template_that_was_analyzed_can_be_copied_and_sent_to_workers(template_of: object) -> None:
    template = template_of(LLAMA)  # type: ignore[operator]
    skeleton = template.skeleton(("user", "assistant"))
    for copied in (pickle.loads(pickle.dumps(template)), copy.deepcopy(template)):
        assert skeleton == copied.skeleton(("user", "assistant"))
        assert copied.skeleton(("user", "assistant") * 2) is not None  # not analyzed yet


@pytest.mark.parametrize("source", [LLAMA, CHATML_TEMPLATE])
def test_contents_with_the_token_that_ends_a_turn_are_rendered(template_of: object, source: str) -> None:
    skeleton = template_of(source).skeleton(("user", "assistant"))  # type: ignore[operator]
    assert not skeleton.guard.accepts(["a", "b<|im_end|>"])


@pytest.mark.parametrize(
    ("source", "roles"),
    [
        (UPPER, ("user", "assistant")),  # looks at contents
        (NO_END, ("user", "assistant")),  # where a turn ends depends on what it ends with
        (CHATML_TEMPLATE, ("assistant", "user")),  # nothing comes before the first turn
    ],
)
def test_no_skeleton_where_text_depends_on_more_than_roles(
    template_of: object, source: str, roles: tuple[str, ...]
) -> None:
    assert template_of(source).skeleton(roles) is None  # type: ignore[operator]


def test_contents_may_be_left_out_and_repeated() -> None:
    skeleton = Skeleton.from_marked(f"<{marker(1)}|{marker(0)}|{marker(1)}>.", [(1, 12)], (">.", "|"), ContentGuard())
    assert skeleton is None  # the span ends inside a content
    text = f"<{marker(1)}|{marker(0)}|{marker(1)}>."
    skeleton = Skeleton.from_marked(text, [(1, len(text))], (">.",), ContentGuard())
    assert skeleton is not None
    assert skeleton.join_with_spans(["a", "bb", "unused"]) == ("<bb|a|bb>.", [(1, 10)])


@pytest.mark.parametrize(
    "body",
    [
        "{{ m.content }}{{ loop.previtem.content | upper if loop.previtem }}",
        "{{ m.content }}{% if loop.nextitem is defined %}{% set n = loop.nextitem %}{{ n.content | trim }}{% endif %}",
    ],
)
def test_contents_that_are_changed_behind_a_name_are_noticed(template_of: object, body: str) -> None:
    source = "{% for m in messages %}<|im_start|>{{ m.role }}\n" + body + "<|im_end|>\n{% endfor %}"
    source += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    assert template_of(source).skeleton(("user", "assistant")) is None  # type: ignore[operator]


@pytest.mark.parametrize(
    "difference",
    [
        "{{ {'a': '<'} | tojson }}",  # Transformers writes `<`, Jinja by itself its code
        "{% if messages | length == 5 %}{% set ns = namespace(_x=1) %}{% endif %}",  # Transformers rejects the name
    ],
)
def test_no_skeleton_if_the_tracer_and_transformers_differ(template_of: object, difference: str) -> None:
    roles = ("user", "assistant") * 3
    assert template_of("{{ 'x' }}" + CHATML_TEMPLATE).skeleton(roles) is not None  # type: ignore[operator]
    assert template_of(difference + CHATML_TEMPLATE).skeleton(roles) is None  # type: ignore[operator]


def test_a_search_in_the_last_turn_only_counts_for_all_turns(template_of: object) -> None:
    """Turns are located by rendering the turns before them alone, in which another turn is the last."""
    source = DEFAULT_SYSTEM.replace(
        "{{ m.content }}", "{{ m.content }}{% if loop.last and m.role == 'user' and 'xy' in m.content %}!{% endif %}"
    )
    skeleton = template_of(source).skeleton(("user", "assistant"))  # type: ignore[operator]
    assert "xy" in skeleton.guard.literals
