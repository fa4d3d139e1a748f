"""The table of fields, walked with the unchanged ``openai`` client: what is honoured has its effect, what is
refused says so, what is ignored changes nothing. A field without a case here fails."""

from __future__ import annotations

import openai
import pytest
from asking import Asker
from helpers.field_values import IGNORED, REFUSED
from honoured_fields import HONOURED

from streamllm.server.protocol import (
    NOT_SUPPORTED_YET,
    ChatRequest,
    CompletionRequest,
    field_support,
    leave_out,
)

SUPPORT = {"chat": field_support(ChatRequest), "completions": field_support(CompletionRequest)}


def fields_with(status: str) -> list[tuple[str, str]]:
    """(route, field) of all fields with this status."""
    return [(route, name) for route, table in SUPPORT.items() for name in table if table[name] == status]


@pytest.fixture
def asker(client):
    return lambda route: Asker(client, route)


def test_every_field_of_the_table_has_a_case():
    cases = {"honoured": HONOURED, "not supported yet": REFUSED, "ignored": IGNORED}
    for table in SUPPORT.values():
        missing = {name: status for name, status in table.items() if name not in cases[status]}
        assert not missing
    known = {name for table in SUPPORT.values() for name in table}
    assert set(HONOURED) | set(REFUSED) | set(IGNORED) <= known, "a case of a field that is gone"


HONOURED_CASES = sorted({(route, HONOURED[name].__name__) for route, name in fields_with("honoured")})


@pytest.mark.parametrize("route, case", HONOURED_CASES)
def test_an_honoured_field_has_its_effect(asker, route, case):
    (function,) = {function for function in HONOURED.values() if function.__name__ == case}
    function(asker(route))


@pytest.mark.parametrize("route, name", fields_with("not supported yet"))
def test_a_refused_field_says_so_and_its_neutral_values_pass(asker, route, name):
    ask = asker(route)
    for stream in (False, True):
        error = ask.refusal(**{name: REFUSED[name]}, stream=stream)
        assert isinstance(error, openai.BadRequestError)
        assert error.param == error.body["param"] == name
        assert error.body["message"] == (
            f"{name} is not supported yet; {leave_out(NOT_SUPPORTED_YET[name])}."
        )
    for neutral in (None, *NOT_SUPPORTED_YET[name]):
        assert ask(**{name: neutral}, max_tokens=1).completion_tokens == 1


@pytest.mark.parametrize("route", SUPPORT)
def test_ignored_fields_change_nothing(asker, route):
    ask = asker(route)
    plain = ask().text
    assert ask(**IGNORED).text == plain
    assert ask(some_field_of_next_year={"a": [1]}).text == plain
