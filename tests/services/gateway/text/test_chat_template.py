"""Chat templates render as transformers renders them, and refuse as errors of the caller."""

import json
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from services.gateway.text.tokenizer import ChatTemplate
from shared.errors import InvalidRequest

MESSAGES = [
    {"role": "system", "content": "Be brief. <|end|>"},
    {"role": "user", "content": " hä?\n\n{{ 1 }} "},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "why"},
]
THEIRS: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>"}
VARIABLES: dict[str, str] = THEIRS
TEMPLATES = [
    "{{ bos_token }}{% for m in messages %}\n  {% if m.role == 'user' %}\n[{{ m.content | trim }}]\n"
    "  {% endif %}\n{% endfor %}{% if add_generation_prompt %}>{% endif %}",
    "{% for m in messages %}{{ m | tojson }}{{ m.content | tojson(indent=2) }}{% endfor %}{{ tools }}",
    "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m['content'] }}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
]


@pytest.mark.parametrize("source", TEMPLATES)
def test_it_renders_as_transformers_does(source: str) -> None:
    rendered: Any = render_jinja_template(
        conversations=[MESSAGES], chat_template=source, add_generation_prompt=True, **THEIRS
    )
    assert ChatTemplate(source, VARIABLES).render(MESSAGES) == rendered[0][0]


@pytest.mark.parametrize("source", [TEMPLATES[4], "{{ messages[-1].content | trim }}."])
@pytest.mark.parametrize("content", ["", "yes", " yes, \n"])
def test_it_continues_the_last_message_as_transformers_does(source: str, content: str) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": content}]
    rendered: Any = render_jinja_template(
        conversations=[messages], chat_template=source, continue_final_message=True, **THEIRS
    )
    assert ChatTemplate(source, VARIABLES).render(messages, continues_last=True) == rendered[0][0]


def test_a_last_message_that_is_not_written_cannot_be_continued() -> None:
    with pytest.raises(InvalidRequest, match="continued"):
        ChatTemplate(TEMPLATES[0], VARIABLES).render(MESSAGES[:1], continues_last=True)


@pytest.mark.parametrize(
    "source",
    ["{{ raise_exception('only one system message') }}", "{{ messages[9].content.x }}", "{{ 1 + 'a' }}"],
)
def test_a_template_that_refuses_is_the_callers_error(source: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ChatTemplate(source, {}).render(MESSAGES)
    assert caught.value.param == "messages"


def test_a_template_is_kept_in_its_box() -> None:
    attacks = [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ namespace.__init__.__globals__ }}",
    ]
    for source in attacks:
        with pytest.raises(InvalidRequest):
            json.dumps(ChatTemplate(source, {}).render(MESSAGES))
