"""The contents that a template only joins, so that one conversation tells the text of others with the same roles."""

import os
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from tests.internals import CHATML_TEMPLATE, ContentGuard, NotJoined, Tracer, marker

LOOP = "{% for m in messages %}%s{% endfor %}"
ROLES = ("user", "assistant") * 2
EXAMPLES = min(int(os.environ.get("ENERGON_PACKED_FUZZ", "100")), 1000)  # templates


def content_guard(source: str) -> ContentGuard | None:
    tracer = Tracer(source, {})
    try:
        tracer.render([{"role": role, "content": marker(turn)} for turn, role in enumerate(ROLES)], prompt=False)
    except NotJoined:
        return None
    return tracer.guard


@pytest.mark.parametrize(
    "source",
    [
        CHATML_TEMPLATE,
        LOOP.replace("%s", "{{ m['content'] }}"),
        LOOP.replace("%s", "{{ '<' + m.role + '>' + m.content ~ '</s>' }}"),
        LOOP.replace("%s", "{% if m.role == 'user' and not loop.first %}[{{ m.content }}]{% endif %}"),
        LOOP.replace("%s", "{% if m.content is string %}{{ m.content }}{% else %}{{ m.content | tojson }}{% endif %}"),
        LOOP.replace("%s", "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}{{ m.content }}"),
        "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}{% endif %}"
        "{% for m in messages[1:] %}{{ m.content }}{% endfor %}",
        LOOP.replace("%s", "{% if messages[loop.index0 - 1].role != 'tool' %}x{% endif %}{{ m.content }}"),
        "{{ messages | length }}",
        LOOP.replace("%s", "{% set text = m.content %}{{ text }}"),
        LOOP.replace("%s", "{% set other = m %}{{ other.content }}"),
        LOOP.replace("%s", "{{ m.content }}{% if m.content == messages[loop.index0].content %}{% endif %}"),
        "{% set all = messages %}{% for m in all %}{{ m.content }}{% endfor %}",
    ],
)
def test_templates_that_only_join(source: str) -> None:
    assert content_guard(source) == ContentGuard()


@pytest.mark.parametrize(
    "source",
    [
        LOOP.replace("%s", "{{ m.content | trim }}"),
        LOOP.replace("%s", "{{ m['content'].strip() }}"),
        LOOP.replace("%s", "{{ m['content'][0] }}"),
        LOOP.replace("%s", "{% if m.content == 'x' %}a{% endif %}"),
        LOOP.replace("%s", "{% if 'x' in m.content %}a{% endif %}"),
        LOOP.replace("%s", "{% if m.content %}{{ m.content }}{% endif %}"),
        LOOP.replace("%s", "{{ m.items() }}"),
        LOOP.replace("%s", "{{ m | tojson }}"),
        "{% for m in messages if m.content %}{{ m.content }}{% endfor %}",
        "{% macro show(x) %}{{ x | upper }}{% endmacro %}" + LOOP.replace("%s", "{{ show(m.content) }}"),
        "{{ messages | tojson }}",
    ],
)
def test_templates_that_search_contents(source: str) -> None:
    assert content_guard(source) != ContentGuard()


SPLIT = "{% set c = m.content.split('</t>')[-1].lstrip('\n') %}"


@pytest.mark.parametrize(
    ("body", "guard"),
    [
        ("{{ m.content | trim }}", ContentGuard(stripped=" ")),
        ("{{ m.content.strip() }}", ContentGuard(stripped=" ")),
        ("{% set c = m['content'].strip('\n') %}{{ c }}", ContentGuard(stripped="\n")),
        ("{% if 'x' in m.content %}a{% endif %}", ContentGuard(("x",))),
        ("{% if not m.content.startswith('<r>') %}{{ m.content }}{% endif %}", ContentGuard(("<r>",))),
        ("{% if m.content %}{{ m.content }}{% endif %}", ContentGuard(filled=True)),
        (
            "{% set c = m.content %}{% if '</t>' in c %}" + SPLIT + "{% endif %}{{ c }}",
            ContentGuard(("</t>",)),
        ),
        ("{{ m.content.split('x')[1] }}", ContentGuard(("x",))),
        ("{{ m.content.split(m.role)[0] }}", ContentGuard(("assistant", "user"))),
        ("{% set c %}{{ m.content }}{% endset %}{{ c | trim }}", ContentGuard(stripped=" ")),
        ("{% filter trim %}{{ m.content }}{% endfilter %}", ContentGuard(stripped=" ")),
        ("{% if m.content.strip('xy') | length > 0 %}a{% endif %}", ContentGuard((), True, "xy")),
        ("{{ 'a' if m.content | length == 0 }}", ContentGuard(filled=True)),
        ("{% set ns = namespace(c='') %}{% set ns.c = m.content %}{{ ns.c + '.' }}", ContentGuard()),
        ("{% macro show(c) %}{% if c is string %}{{ c }}{% else %}{{ c[0] }}{% endif %}{% endmacro %}"
         "{% set c = show(m.content) | trim %}{{ c }}", ContentGuard(stripped=" ")),
        ("{% if loop.previtem and loop.previtem.role == 'user' %}x{% endif %}{{ m.content }}", ContentGuard()),
    ],
)  # fmt: skip
def test_literals_of_the_guard(body: str, guard: ContentGuard) -> None:
    assert content_guard(LOOP.replace("%s", body)) == guard


@pytest.mark.parametrize(
    "body",
    [
        "{{ m.content | upper }}",
        "{{ m.content[0] }}",
        "{{ m.content | length > 2 }}",
        "{{ m.content | length is number }}",
        "{{ messages[m.content | length].role }}",
        "{{ m[m.content] }}",
        "{{ '%s' % m.content }}",
        "{{ '%s%s' % (m.role, m.content) }}",
        "{{ '{}'.format(m.content) }}",
        "{{ [m.content] | join }}",
        "{{ ''.join([m.content]) }}",
        "{{ [m.content] }}",
        "{{ m.content in ['a', 'b'] }}",
        "{{ m.content < 'b' }}",
        "{{ m.content * 2 }}",
        "{{ {m.content: 1} }}",
        "{{ loop.changed(m.content) }}",
        "{{ m.content | trim(messages[0].content) }}",
        "{{ 'a' in m.content in ['b'] }}",
        "{{ messages | map(attribute='content') | first }}",
        "{% autoescape true %}{{ m.content }}{% endautoescape %}",
        "{% if m.content == 'x' %}a{% endif %}",
        "{% if m.content in 'xyz' %}a{% endif %}",
        "{% set c = 'a' + m.content %}{{ c | trim }}",
        "{% set c = 'a' + m.content %}{% if 'ab' in c %}x{% endif %}",
        "{% set ns = namespace(c='') %}{% set ns.c = m.content %}{% set other = ns %}{{ other.c | upper }}",
        "{% macro show(c) %}{{ c }}{% endmacro %}{{ show(m.content) | upper }}",
        "{% macro show() %}{{ messages[0].content }}{% endmacro %}{{ show() | upper }}",
        "{% for letter in m.content %}{{ letter }}{% endfor %}",
        "{% set c = m.content %}{% set c = [1] if loop.first else c %}{% if c is string %}{{ c }}{% else %}"
        "{{ m.content | upper }}{% endif %}",
        "{{ loop.previtem.content | upper if loop.previtem }}",
        "{{ {'a': m.content}['a'] | upper }}",
    ],
)
def test_templates_that_may_change_contents_have_no_guard(body: str) -> None:
    assert content_guard(LOOP.replace("%s", body)) is None


@pytest.mark.parametrize(
    ("guard", "kept", "changed"),
    [
        (ContentGuard(), ["", " a\n"], []),
        (ContentGuard(("</t>",)), ["", "<t>", "< /t>"], ["a</t>b"]),
        (ContentGuard(filled=True), [" "], [""]),
        (ContentGuard(stripped="\n"), ["", " a ", "a\nb"], ["a\n", "\na"]),
        (ContentGuard(stripped=" "), ["", "a b"], ["a\u2003", "\ta", " "]),
    ],
)
def test_the_guard_accepts_only_joined_contents(guard: ContentGuard, kept: list[str], changed: list[str]) -> None:
    assert all(guard.accepts([content]) for content in kept)
    assert not any(guard.accepts(["a", content]) for content in changed)


# Parts of templates: expressions with a content, conditions, and statements. C, E and F are places for others.
EXPRESSIONS = (
    "m.content", "m['content']", "messages[0].content", "loop.previtem.content", "ns.c", "E", "E", "(E | trim)",
    "E.strip()", "E.lstrip('\n')", "E.rstrip('x<')", "E.split('</t>')[-1]", "E.split('</t>')[0]", "E.split('a', 1)[0]",
    "('<' + E)", "(E ~ '>')", "('' ~ E)", "(E + '')", "(E ~ F)", "(E if C else F)", "(E or F)", "(E and F)",
    "(E | default('x'))", "(E | default('x', true))", "(E | trim(F))", "(E | string)", "echo(E)", "trimmed(E)",
    "(E | upper)", "E[:2]", "E[0]", "E.replace('a', 'b')", "('%s' % E)", "('%s!' % (E,))", "'{}'.format(E)",
    "([E, F] | join('|'))", "(m | tojson)", "(m ~ '')", "(E | e)", "(E | length)", "[E, 'c'][-1]", "{'k': E}.k",
    "[E][E | length]", "(E * 2)", "(messages | map(attribute='content') | list)[0]", "(messages | last).content",
)  # fmt: skip
CONDITIONS = (
    "E", "not E", "'</t>' in E", "'<r>' not in E", "E in 'ab </t>'", "E == ''", "E != 'a'", "E == F",
    "E in ['a', '']", "E in {'a': 1}", "E.startswith('<r>')", "E.endswith('a')", "E | length > 0",
    "E | trim | length == 0", "E | length > 2", "E | length in [0, 3]", "(E | length) is number",
    "messages[E | length] is defined", "E is string", "E is mapping", "E is defined", "E is none", "E < 'b'",
    "'a' in E in ['b']", "E.isspace()", "loop.last", "m.role == 'user'", "C and C", "C or C",
    "messages | selectattr('content') | list | length > 3", "messages | selectattr('content', 'equalto', 'a') | list",
    "m in messages", "E in messages",
)  # fmt: skip
STATEMENTS = (
    "{{ E }}", "{{ E }}", "{{ E }}{{ F }}", "{% if C %}S{% else %}S{% endif %}",
    "{% if C %}{% set ns.c = E %}{% endif %}", "{% set ns.c = E %}S", "{% set c = E %}{{ c }}",
    "{% set c %}{{ E }}{% endset %}{{ c | trim }}", "{% filter trim %}S{% endfilter %}",
    "{% autoescape true %}S{% endautoescape %}", "{% for x in E %}x{% endfor %}",
    "{% if C %}{{ raise_exception('no') }}{% endif %}{{ E }}", "{% if C %}{% continue %}{% endif %}S",
)  # fmt: skip
MACROS = (
    "{% macro echo(c) %}{% if c is string %}{{ c }}{% endif %}{% endmacro %}"
    "{% macro trimmed(c) %}{{- c | trim -}}{% endmacro %}{% set ns = namespace(c='') %}"
)
PLACES = {"E": EXPRESSIONS, "F": EXPRESSIONS, "C": CONDITIONS, "S": STATEMENTS}
_PLACE = re.compile(r"(\b[EFCS]\b|(?<=})S|S(?={))")
WORDS = ("</t>", "<r>", "a", "b", "x", " ", "\n", "<b>&", "{{ 1 }}", "c" * 40)


@st.composite
def templates(draw: Any) -> str:
    body = draw(st.sampled_from(STATEMENTS))
    for depth in range(6):
        most = 100 if depth < 3 else 1
        parts = [draw(st.sampled_from(PLACES[part][:most])) if part in PLACES else part for part in _PLACE.split(body)]
        body = "".join(parts)
    return MACROS + LOOP.replace("%s", "[" + body + "]")


def rendered(source: str, contents: list[str]) -> str | None:
    messages = [{"role": role, "content": content} for role, content in zip(ROLES, contents, strict=True)]
    try:
        return str(render_jinja_template(conversations=[messages], chat_template=source)[0][0])
    except Exception:
        return None


def test_contents_that_the_guard_accepts_are_joined_by_jinja() -> None:
    outcomes = dict.fromkeys(("joined", "rejected", "refused"), 0)

    @settings(max_examples=EXAMPLES, deadline=None, derandomize=True)
    @given(source=templates(), data=st.data())
    def check(source: str, data: Any) -> None:
        marked = [marker(turn) for turn in range(len(ROLES))]
        messages = [{"role": role, "content": content} for role, content in zip(ROLES, marked, strict=True)]
        tracer, text = Tracer(source, {}), None
        try:
            text = tracer.render(messages, prompt=False)
        except NotJoined:
            outcomes["refused"] += 1
            return
        except Exception:
            text = None
        if text != rendered(source, marked):
            outcomes["refused"] += 1
            return
        outcomes["rejected" if text is None else "joined"] += 1
        for _ in range(4):
            words = st.lists(st.sampled_from(WORDS), max_size=3).map("".join)
            contents = [data.draw(words) for _ in ROLES]
            contents = [content if tracer.guard.accepts([content]) else "Ab cD" for content in contents]
            if not tracer.guard.accepts(contents):
                continue
            parts = None if text is None else re.split("\ue0fe(.)\ue0ff", text)
            expected = parts and "".join([contents[int(p)] if i % 2 else p for i, p in enumerate(parts)])
            assert rendered(source, contents) == expected, source

    check()
    assert min(outcomes["joined"], outcomes["refused"]) > EXAMPLES // 5, outcomes
