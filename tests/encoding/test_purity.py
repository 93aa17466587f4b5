"""Which templates only join contents, so that one conversation tells of all others with the same roles."""

import pytest

from tests.internals import CHATML_TEMPLATE, ContentGuard, content_guard

LOOP = "{% for m in messages %}%s{% endfor %}"


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
        LOOP.replace("%s", "{% set other = m %}{{ other.content }}"),
        LOOP.replace("%s", "{{ m.items() }}"),
        LOOP.replace("%s", "{{ m | tojson }}"),
        "{% for m in messages if m.content %}{{ m.content }}{% endfor %}",
        "{% macro show(x) %}{{ x | upper }}{% endmacro %}" + LOOP.replace("%s", "{{ show(m.content) }}"),
        "{{ messages | tojson }}",
        "{% for m in messages %}",
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
            ContentGuard(("</t>",), False, "\n"),
        ),
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
        "{{ m.content.split('x')[1] }}",
        "{{ m.content.split(m.role)[0] }}",
        "{{ m.content.strip('xy') | length }}",
        "{% if m.content == 'x' %}a{% endif %}",
        "{% if m.content in 'xyz' %}a{% endif %}",
        "{% if m.role in m.content %}a{% endif %}",
        "{% set c = 'a' + m.content %}{{ c | trim }}",
        "{% set c = 'a' + m.content %}{% if 'ab' in c %}x{% endif %}",
        "{% set ns = namespace(c='') %}{% set ns.c = m.content %}{% set other = ns %}{{ other.c | upper }}",
        "{% macro show(c) %}{{ c }}{% endmacro %}{{ show(m.content) | upper }}",
        "{% macro show() %}{{ messages[0].content }}{% endmacro %}{{ show() | upper }}",
        "{% for letter in m.content %}{{ letter }}{% endfor %}",
        "{% set m = 'x' %}{{ m.content }}",
        "{% for x in messages %}{% for x in 'ab' %}{{ x.content }}{% endfor %}{% endfor %}",
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
