"""Which templates only join contents, so that one conversation tells of all others with the same roles."""

import pytest

from energon_packed.demo.tokenizer import CHATML_TEMPLATE
from energon_packed.encoding.purity import only_joins_content

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
    ],
)
def test_templates_that_only_join(source: str) -> None:
    assert only_joins_content(source)


@pytest.mark.parametrize(
    "source",
    [
        LOOP.replace("%s", "{{ m.content | trim }}"),
        LOOP.replace("%s", "{{ m['content'].strip() }}"),
        LOOP.replace("%s", "{{ m['content'][0] }}"),
        LOOP.replace("%s", "{% if m.content == 'x' %}a{% endif %}"),
        LOOP.replace("%s", "{% if 'x' in m.content %}a{% endif %}"),
        LOOP.replace("%s", "{% if m.content %}{{ m.content }}{% endif %}"),
        LOOP.replace("%s", "{% set text = m.content %}{{ text }}"),
        LOOP.replace("%s", "{% set other = m %}{{ other.content }}"),
        LOOP.replace("%s", "{{ m.items() }}"),
        LOOP.replace("%s", "{{ m | tojson }}"),
        "{% for m in messages if m.content %}{{ m.content }}{% endfor %}",
        "{% set all = messages %}{% for m in all %}{{ m.content }}{% endfor %}",
        "{% macro show(x) %}{{ x | upper }}{% endmacro %}" + LOOP.replace("%s", "{{ show(m.content) }}"),
        "{{ messages | tojson }}",
        "{% for m in messages %}",
    ],
)
def test_templates_that_look_at_contents(source: str) -> None:
    assert not only_joins_content(source)
