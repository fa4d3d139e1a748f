"""What a template may spend, and what it cannot reach."""

from __future__ import annotations

import threading
import time

import pytest

from streamllm.errors import InvalidRequestError
from streamllm.text import template_environment
from streamllm.text.chat_template import ChatTemplate

MESSAGES = [{"role": "user", "content": "hello"}]


def render(source: str, **options) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(MESSAGES, **options)


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr("streamllm.text.chat_template.TIME_LIMIT", 0.1)


ENDLESS = [
    "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
    "{% set x = 'a' * 100000 %}{% for a in x %}{% for b in x %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{{ range(99999) | map('abs') | list | length }}{% endfor %}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "{% for a in [[1]] recursive %}{{ loop([a]) }}{{ loop([a]) }}{% endfor %}",
]


@pytest.mark.parametrize("source", ENDLESS)
def test_a_template_that_does_not_end_is_stopped(short, source):
    began = time.monotonic()
    with pytest.raises(InvalidRequestError, match=r"takes too long|recursion") as refusal:
        render(source)
    assert refusal.value.param == "messages"
    assert time.monotonic() - began < 5


LARGE = [
    "{{ 'a' * 10 ** 10 }}",
    "{{ 10 ** (10 ** 9) }}",
    "{{ [1] * 10 ** 10 }}",
    "{% set ns = namespace(x='ab' * 1000) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns = namespace(x='ab' * 1000) %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% set ns = namespace(x=[1] * 1000) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set x = 'a' * 1000000 %}{% for i in range(100000) %}{{ x }}{% endfor %}",
    "{% set x %}{% set y = 'a' * 1000000 %}{% for i in range(100000) %}{{ y }}{% endfor %}{% endset %}",
    "{% set x = 'a' * 60000000 %}{% set ns = namespace(l=[]) %}{% for i in range(60) %}"
    "{% set ns.l = ns.l + [x + 'b'] %}{% endfor %}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%1000000000d' | format(1) }}",
    "{{ '{:1000000000d}'.format(1) }}",
    "{{ 'a'.ljust(10 ** 10) }}",
    "{{ 'a' | center(10 ** 10) }}",
    "{{ 'a' | indent(10 ** 10) }}",
    "{{ ['a', 'b'] | batch(10 ** 9, 'x') | list }}",
    "{{ messages | tojson(indent=10 ** 9) }}",
    "{% set x = 'a' * 1000000 %}{{ x.replace('a', x) }}",
    "{% set x = 'a' * 1000000 %}{{ x | replace('a', x) }}",
    "{% set x = 'a' * 1000000 %}{{ range(100000) | list | join(x) }}",
    "{% set x = 'a' * 1000000 %}{{ x.join(x) }}",
    "{{ range(10 ** 9) | list }}",
]


@pytest.mark.parametrize("source", LARGE)
def test_a_template_that_builds_too_much_is_stopped(source):
    began = time.monotonic()
    with pytest.raises(InvalidRequestError):
        render(source)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__ }}{{ messages.__init__.__globals__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ self.__init__ }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{{ ('{0.__cla' ~ 'ss__}').format(1) }}",
        "{{ (messages | map(attribute='__class__') | list)[0].__mro__ }}",
    ],
)
def test_the_sandbox_holds(source):
    try:
        text = render(source)
    except InvalidRequestError:
        return
    assert "class" not in text and "built-in" not in text


@pytest.mark.parametrize(
    "source", ["{{ messages.append(1) }}", "{{ messages[0].update(a=1) }}", "{{ lipsum() }}"]
)
def test_nothing_is_changed_or_made_up(source):
    with pytest.raises(InvalidRequestError):
        render(source)


def test_ordinary_operations_are_what_they_were():
    source = (
        "{% for a in messages %}{{ loop.index }}/{{ loop.length }} {{ loop.first }}{{ loop.last }}"
        "{{ loop.previtem is defined }} {% endfor %}"
        "{% for k, v in messages[0].items() %}{{ k ~ '=' ~ v ~ none ~ 1 }};{% else %}no{% endfor %}"
        "{% for a in missing %}x{% else %}none{% endfor %} {{ 2 * 3 + 2 ** 5 % 7 }} {{ 'a' * 3 + 'b' }}"
        " {{ '%s-%05d' % ('a', 3) }} {{ ', '.join(['a', 'b']) }} {{ ['a', 'b'] | join('|') }}"
        " {{ 'a.b'.split('.') | replace('a', 'c') }} {{ [1] + [2] }} {{ (x ~ 'y') if x is defined else '-' }}"
    )
    assert render(source) == (
        "1/1 TrueTrueFalse role=userNone1;content=helloNone1;none 10 aaab a-00003 a, b "
        "a|b ['c', 'b'] [1, 2] -"
    )


def test_the_time_of_other_threads_does_not_count(monkeypatch):
    monkeypatch.setattr("streamllm.text.chat_template.TIME_LIMIT", 0.3)
    stop = threading.Event()

    def spin():
        while not stop.is_set():
            sum(range(1000))

    threads = [threading.Thread(target=spin, daemon=True) for _ in range(6)]
    for thread in threads:
        thread.start()
    try:
        # 50 ms of its own work, and several times as long by the clock.
        assert render("{% for a in range(20000) %}{% endfor %}done") == "done"
    finally:
        stop.set()


def test_limits_end_with_the_rendering(short):
    with pytest.raises(InvalidRequestError):
        render(ENDLESS[0])
    assert not hasattr(template_environment._spending, "end")
    assert render("{{ messages[0].content }}") == "hello"
