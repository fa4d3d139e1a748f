"""Tools in the prompt of a model whose template knows none."""

import json

from helpers.byte_tokenizer import ByteTokenizer

from streamllm.text.chat_renderer import ChatRenderer
from streamllm.text.chat_template import ChatTemplate
from streamllm.text.tools_as_text import tools_as_text

TOOL = {"type": "function", "function": {"name": "weather", "description": "…", "parameters": {}}}
CALL = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}}
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


def test_without_tools_or_calls_nothing_changes():
    messages = [{"role": "user", "content": "hi"}]
    assert tools_as_text(messages, []) is messages


def test_tools_join_the_system_message_or_become_one():
    first, second = tools_as_text([{"role": "user", "content": "hi"}], [TOOL])
    assert first["role"] == "system" and json.dumps(TOOL["function"], ensure_ascii=False) in first["content"]
    assert second == {"role": "user", "content": "hi"}
    (joined,) = tools_as_text([{"role": "system", "content": "Be brief."}], [TOOL])
    assert joined["content"] == f"Be brief.\n\n{first['content']}"


def test_calls_and_results_become_text_even_when_no_tools_are_offered_any_more():
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]},
        {"role": "tool", "tool_call_id": "a", "content": "rain"},
        {"role": "tool", "tool_call_id": "b", "content": [{"type": "text", "text": "sun"}]},
        {"role": "assistant", "content": "Mixed."},
    ]
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
    assert tools_as_text(messages, []) == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": f"{call}\n{call}"},
        {
            "role": "user",
            "content": "<tool_response>\nrain\n</tool_response>\n<tool_response>\nsun\n</tool_response>",
        },
        {"role": "assistant", "content": "Mixed."},
    ]


def test_arguments_that_were_cut_off_stay_text():
    cut = {"id": "a", "function": {"name": "weather", "arguments": '{"city": "Kö'}}
    (message,) = tools_as_text([{"role": "assistant", "content": "Well.", "tool_calls": [cut]}], [])
    assert message["content"] == (
        'Well.\n\n<tool_call>\n{"name": "weather", "arguments": "{\\"city\\": \\"Kö"}\n</tool_call>'
    )


async def test_a_template_that_takes_tools_gets_them_and_another_gets_text():
    takes = ChatTemplate("{% if tools %}{{ tools[0].function.name }}{% endif %}", {})
    plain = ChatTemplate(PLAIN, {})
    assert takes.takes_tools and not plain.takes_tools

    async def text(template):
        renderer = ChatRenderer(ByteTokenizer(), template, lambda text, **_: None)
        return (await renderer.render([{"role": "user", "content": "hi"}], tools=[TOOL])).text

    assert await text(takes) == "weather"
    assert (await text(plain)).startswith("[system]You can call") and (await text(plain)).endswith("[user]hi")
