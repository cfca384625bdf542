"""Chat templates: the same text as transformers, inside a sandbox with bounds."""

from typing import Any

import pytest
from evenflow.control.gateway import chat_template
from evenflow.control.gateway.chat_template import ChatTemplate, TemplateError
from gateway_harness import smollm

CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hi"}],
    [{"role": "system", "content": ""}, {"role": "user", "content": "<b>&'\"</b> {{ x }}"}],
    [
        {"role": "user", "content": "naïve 東京 🧑‍🚀"},
        {"role": "assistant", "content": "ok\n\n"},
        {"role": "user", "content": ""},
    ],
]
TEMPLATES = [
    smollm().chat_template,
    "{{ bos_token }}{% for m in messages %}\n  {% if loop.first %}first {% endif %}\n{{ m | tojson }}\n{% endfor %}",
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m['content'] | trim | upper }}{% endif %}{% if loop.index > 1 %}{% break %}{% endif %}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + m.content | length %}{% endfor %}"
    "{{ ns.n }}{% if tools is none and not documents %}none{% endif %}{{ {'a': [1, 'ü']} | tojson(indent=2) }}",
]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("opening", [True, False])
def test_equal_to_transformers(template: str, messages: list[dict[str, Any]], opening: bool) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    specials = smollm().specials
    ours = ChatTemplate(template, specials).render(messages, add_generation_prompt=opening)
    theirs, _ = render_jinja_template(
        conversations=[messages], chat_template=template, add_generation_prompt=opening, **specials
    )
    assert ours == theirs[0]


def test_tok_4_the_templates_own_words() -> None:
    source = "{% if messages[0].role != 'user' %}{{ raise_exception('roles must alternate') }}{% endif %}x"
    with pytest.raises(TemplateError, match="roles must alternate"):
        ChatTemplate(source, {}).render([{"role": "assistant", "content": ""}])


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].content + 1 }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{{ undefined_thing.attribute }}",
    ],
)
def test_what_a_template_may_not_do(source: str) -> None:
    with pytest.raises(TemplateError):
        ChatTemplate(source, {}).render([{"role": "user", "content": "hi"}])


def test_a_template_that_does_not_compile() -> None:
    with pytest.raises(TemplateError, match="does not compile"):
        ChatTemplate("{% if %}", {})


def test_tok_4_bounds_of_time_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    loops = "{% for i in range(90000) %}{% for j in range(90000) %}xxxxxxxxxx{% endfor %}{% endfor %}"
    monkeypatch.setattr(chat_template, "MAX_TEMPLATE_CHARS", 10_000)
    with pytest.raises(TemplateError, match="more than 10000 characters"):
        ChatTemplate(loops, {}).render([])
    monkeypatch.setattr(chat_template, "MAX_TEMPLATE_CHARS", 1 << 40)
    monkeypatch.setattr(chat_template, "TEMPLATE_SECONDS", 0.05)
    with pytest.raises(TemplateError, match=r"more than 0\.05 s"):
        ChatTemplate(loops, {}).render([])


def test_a_request_cannot_replace_the_messages() -> None:
    template = ChatTemplate("{{ messages[0].content }}{{ extra }}", {})
    variables = {"messages": [{"content": "other"}], "extra": "!"}
    assert template.render([{"role": "user", "content": "hi"}], variables=variables) == "hi!"
