"""A chat template is a stranger's program: it gets what templates need, and nothing else."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from kvpool.client import InvalidRequest
from kvpool.client.chat_template import ChatTemplate

USER = [{"role": "user", "content": "hi <b> & ü"}]


def render(source: str, messages: list[dict[str, Any]] | None = None, **arguments: Any) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>"}, now=lambda: datetime(2026, 11, 20))
    return template.render(messages or USER, arguments=arguments)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__base__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__code__ }}",
        "{{ strftime_now.__closure__[0].cell_contents.__globals__['__builtins__'] }}",
        "{{ self.__init__.__globals__.__builtins__.open('/etc/passwd').read() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ ''|attr('__class__')|attr('__mro__') }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ (messages|map(attribute='__class__')|list)[0].__mro__ }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
    ],
)
def test_a_hostile_template_does_not_escape(source: str) -> None:
    """Each is a known way out of jinja2. None may reach a class, a function's globals or a file."""
    try:
        rendered = render(source)
    except InvalidRequest:
        return
    assert rendered.strip() == ""


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append({}) }}",
        "{{ messages.clear() }}",
        "{{ messages[0].update({'content': 'other'}) }}",
        "{{ messages[0].pop('content') }}",
    ],
)
def test_a_template_changes_nothing_that_it_is_given(source: str) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
    with pytest.raises(InvalidRequest):
        render(source, messages)
    assert messages == [{"role": "user", "content": "hi"}]


def test_templates_find_what_transformers_gives_them() -> None:
    """tojson without HTML escapes, the date, loop controls, generation blocks, special tokens, trimmed blocks."""
    assert render("{{ bos_token }}") == "<s>"
    assert render("{{ messages[0].content | tojson }}") == '"hi <b> & ü"'
    assert render("{{ messages | tojson(indent=1) }}").startswith('[\n {\n  "role"')
    assert render("{{ strftime_now('%Y-%m-%d') }}") == "2026-11-20"
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("{% generation %}{{ messages[0].role }}{% endgeneration %}") == "user"
    assert render("  {% if true %}\nx\n  {% endif %}\ny") == "x\ny"
    assert render("{{ tools is none }} {{ documents is none }}") == "True True"
    assert render("{{ add_generation_prompt }} {{ enable_thinking }}", enable_thinking=False) == "True False"


@pytest.mark.parametrize("source", ["{{ messages[0].content + 1 }}", "{{ 1 / 0 }}", "{% for %}", "{{ nothing.there }}"])
def test_a_template_that_fails_is_told_as_such(source: str) -> None:
    with pytest.raises(InvalidRequest, match="chat template"):
        render(source)
