from __future__ import annotations

import jinja2
import pytest
from sample_templates import PARTS_TEMPLATES, STRING_TEMPLATES

from streamllm.text.chat_template import ChatTemplate
from streamllm.text.content_format import ContentFormat, detect_content_format

LOOPS_OVER_PARTS = [
    "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}",
    "{% for m in messages %}{% for p in m['content'] | list %}{{ p.text }}{% endfor %}{% endfor %}",
    "{% for p in messages[0]['content'] %}{{ p }}{% endfor %}",
    "{% set first = messages[0] %}{% for p in first.content %}{{ p }}{% endfor %}",
    "{% for m in messages[1:] %}{% set c = m.content %}{% for p in c[1:] %}{{ p }}{% endfor %}{% endfor %}",
    "{% set x = messages | list %}{% for m in x %}{% for p in m.content %}{% endfor %}{% endfor %}",
    "{% macro show(c) %}{% for p in c %}{{ p }}{% endfor %}{% endmacro %}{{ show(messages[0].content) }}",
]
LOOPS_OVER_OTHER_THINGS = [
    "{% for m in messages %}{% for t in m.tool_calls %}{{ t }}{% endfor %}{% endfor %}",
    "{% for d in documents %}{% for p in d.content %}{{ p }}{% endfor %}{% endfor %}",
    "{% for m in messages %}{% for p in m.content.split() %}{{ p }}{% endfor %}{% endfor %}",
    "{% for a, b in messages %}{% for p in a.content %}{% endfor %}{% endfor %}",
]


def detect(source: str) -> ContentFormat:
    return detect_content_format(jinja2.Environment().parse(source))


@pytest.mark.parametrize("source", LOOPS_OVER_PARTS)
def test_a_loop_over_the_content_wants_parts(source: str) -> None:
    assert detect(source) == ContentFormat(parts=True, string=False)


@pytest.mark.parametrize("source", LOOPS_OVER_OTHER_THINGS)
def test_other_loops_do_not(source: str) -> None:
    assert detect(source) == ContentFormat(parts=False, string=True)


def test_the_well_known_templates() -> None:
    formats = {
        name: ChatTemplate(source, {}).content_format
        for name, source in {**STRING_TEMPLATES, **PARTS_TEMPLATES}.items()
    }
    parts = formats.pop("parts"), formats.pop("parts_or_string")
    assert parts == (ContentFormat(parts=True, string=False), ContentFormat(parts=True, string=True))
    assert set(formats.values()) == {ContentFormat(parts=False, string=True)}
