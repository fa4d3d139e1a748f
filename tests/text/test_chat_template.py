from __future__ import annotations

import datetime
from typing import Any

import pytest
from sample_templates import CHATML, GEMMA, LLAMA2, LLAMA3, PARTS_TEMPLATES, QWEN3, STRING_TEMPLATES

from streamllm.errors import InvalidRequestError, ModelLoadError
from streamllm.text.chat_template import RESERVED_VARIABLES, ChatTemplate
from streamllm.text.messages import normalise_messages

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TEMPLATES = STRING_TEMPLATES | PARTS_TEMPLATES
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Wetter für <einen> Ort & Tag",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Brno"}}}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


CONVERSATIONS = {
    "one": [user("Hi <there> & 'you' \"all\"  ")],
    "three": [user(" Hello\n"), assistant("<think>\nhm\n</think>\n\nHi! "), user("ďábel 漢字 😀")],
    "system": [{"role": "system", "content": "Be brief. "}, user("Hello")],
    "answered": [user("Hello"), {**assistant("Yes"), "reasoning_content": "because"}],
    "twice": [user("a"), user("b")],
    "tools": [
        user("Weather?"),
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": '{"sun": true}'},
        assistant("Sunny."),
        user("Thanks"),
    ],
}


@pytest.fixture(scope="module")
def reference(byte_level_backend):
    """Transformers' rendering; the error that it raises, if it does."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level_backend, **SPECIAL)

    def render(source: str, messages, **options) -> str | Exception:
        try:
            return tokenizer.apply_chat_template(messages, chat_template=source, tokenize=False, **options)
        except Exception as error:
            return error

    return render


@pytest.mark.parametrize("options", [{}, {"tools": [TOOL]}, {"enable_thinking": False, "date_string": "now"}])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_renders_as_transformers(reference, name: str, conversation: str, options: dict) -> None:
    messages = CONVERSATIONS[conversation]
    if name == "parts":
        messages = [
            {**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages
        ]
    template = ChatTemplate(TEMPLATES[name], SPECIAL)
    for add_generation_prompt in (True, False):
        expected = reference(
            TEMPLATES[name], messages, add_generation_prompt=add_generation_prompt, **options
        )

        def render() -> str:
            return template.render(messages, add_generation_prompt=add_generation_prompt, **options)  # noqa: B023

        if isinstance(expected, Exception):
            with pytest.raises(InvalidRequestError) as caught:
                render()
            assert caught.value.message == str(expected)
            assert caught.value.param == "messages"
        else:
            assert render() == expected
            assert normalise_messages(messages, template) == messages, "nothing to change in them"


@pytest.mark.parametrize("name", TEMPLATES)
def test_continues_the_final_message_as_transformers(reference, name: str) -> None:
    for end in ("The answer is", "The answer is ", "  spaced  ", "one\n"):
        messages = [user("Hello"), assistant(end)]
        if name == "parts":
            messages[0]["content"] = [{"type": "text", "text": "Hello"}]
            messages[1]["content"] = [{"type": "text", "text": "x"}, {"type": "text", "text": end}]
        template = ChatTemplate(TEMPLATES[name], SPECIAL)
        text = template.render(messages, add_generation_prompt=False, continue_final_message=True)
        assert text == reference(
            TEMPLATES[name], messages, add_generation_prompt=False, continue_final_message=True
        )
        assert text.rstrip().endswith(end.strip())


def test_what_cannot_be_continued() -> None:
    template = ChatTemplate(CHATML, SPECIAL)
    with pytest.raises(InvalidRequestError, match="add_generation_prompt") as caught:
        template.render([user("a")], continue_final_message=True)
    assert caught.value.param == "continue_final_message"
    no_text = {"role": "assistant", "content": []}
    silent = ChatTemplate("nothing", SPECIAL)
    for refusing, messages in [(template, [no_text]), (silent, [user("a")]), (template, [])]:
        with pytest.raises(InvalidRequestError, match="continue_final_message"):
            refusing.render(messages, add_generation_prompt=False, continue_final_message=True)


def test_the_templates_own_words_reach_the_client() -> None:
    with pytest.raises(InvalidRequestError, match=r"^Conversation roles must alternate user/assistant"):
        ChatTemplate(LLAMA2, SPECIAL).render(CONVERSATIONS["twice"])
    with pytest.raises(InvalidRequestError, match=r"^System role not supported$"):
        ChatTemplate(GEMMA, SPECIAL).render(CONVERSATIONS["system"])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0]['content'] + 1 }}",
        "{{ messages[7].content.x }}",
        "{{ 1 / 0 }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__.keys() }}",
    ],
)
def test_whatever_else_goes_wrong_is_the_clients_error(source: str) -> None:
    with pytest.raises(InvalidRequestError, match="chat template cannot render") as caught:
        ChatTemplate(source, SPECIAL).render([user("a")])
    assert caught.value.param == "messages"


def test_a_broken_template_is_refused_at_start() -> None:
    with pytest.raises(ModelLoadError, match="line 2"):
        ChatTemplate("{{ messages }}\n{% if %}", SPECIAL)


def test_no_tools_and_an_empty_list_of_tools_are_the_same() -> None:
    template = ChatTemplate(LLAMA3, SPECIAL)
    assert template.render([user("a")], tools=[]) == template.render([user("a")])


def test_strftime_now() -> None:
    today = datetime.datetime.now()
    text = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}", SPECIAL).render([user("a")])
    assert abs(datetime.datetime.fromisoformat(text) - today) < datetime.timedelta(days=2)


def test_variables_reach_the_template() -> None:
    template = ChatTemplate(QWEN3, SPECIAL)
    assert "<think>" not in template.render([user("a")])
    assert template.render([user("a")], enable_thinking=False).endswith("<think>\n\n</think>\n\n")
    assert "messages" in RESERVED_VARIABLES
