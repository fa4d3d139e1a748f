"""Anthropic's Messages API as raw HTTP sees it."""

from __future__ import annotations

import json

import httpx
import pytest
from serving import MODEL, TEXT, prompt_of, run_server, text_script

HELLO = [{"role": "user", "content": "hello"}]
WEATHER = {"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}
CALLS = 'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Kö"}}\n</tool_call>'


def events(response: httpx.Response) -> list[dict]:
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    parsed = []
    for block in blocks:
        name, data = block.split("\n", 1)
        parsed.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {parsed[-1]['type']}"
    return parsed


def accumulated(parsed: list[dict]) -> dict:
    """The message that a stream's events build up."""
    assert parsed[0]["type"] == "message_start" and parsed[-1] == {"type": "message_stop"}
    message, json_texts, open_block = parsed[0]["message"], {}, None
    for event in parsed[1:-1]:
        if event["type"] == "content_block_start":
            assert open_block is None and event["index"] == len(message["content"])
            open_block = event["index"]
            message["content"].append(event["content_block"])
        elif event["type"] == "content_block_delta":
            assert event["index"] == open_block
            delta, block = event["delta"], message["content"][open_block]
            if delta["type"] == "input_json_delta":
                json_texts[open_block] = json_texts.get(open_block, "") + delta["partial_json"]
            else:
                name = delta["type"].removesuffix("_delta")
                block[name] += delta[name]
        elif event["type"] == "content_block_stop":
            assert event["index"] == open_block
            if open_block in json_texts:
                message["content"][open_block]["input"] = json.loads(json_texts[open_block])
            open_block = None
        elif event["type"] == "message_delta":
            assert open_block is None
            message |= event["delta"]
            message["usage"] |= event["usage"]
        else:
            assert event == {"type": "ping"}
    return message


def both(server, body):
    """The whole message, which a stream of it must add up to."""
    whole = server.post("/v1/messages", body)
    assert whole.status_code == 200, whole.text
    streamed = server.post("/v1/messages", body | {"stream": True})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    first, second = whole.json(), accumulated(events(streamed))
    assert first.pop("id").startswith("msg_") and second.pop("id").startswith("msg_")
    for message in (first, second):
        for block in message["content"]:
            assert "id" not in block or block.pop("id")
        usage = message["usage"]
        # The second request finds the first one's prompt in the cache.
        usage["input_tokens"] += usage.pop("cache_read_input_tokens")
    assert first == second
    return first


def test_text(server):
    message = both(server, {"model": MODEL, "messages": HELLO, "max_tokens": 6})
    assert message == {
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": [{"type": "text", "text": "The ď"}],
        "stop_reason": "max_tokens",
        "stop_sequence": None,
        "usage": {"input_tokens": 13, "cache_creation_input_tokens": 0, "output_tokens": 6},
    }
    server.canary()


def test_stop_sequences(server):
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 60, "stop_sequences": ["answer"]}
    message = both(server, body)
    assert message["content"][0]["text"] == TEXT.partition("answer")[0]
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "answer")


def test_a_message_that_ends_by_itself():
    with run_server(script=text_script("Hi.", ends=True)) as server:
        message = both(server, {"model": MODEL, "messages": HELLO, "max_tokens": 9})
        assert message["stop_reason"] == "end_turn" and message["content"] == [
            {"type": "text", "text": "Hi."}
        ]


def test_tool_use_and_thinking():
    text = f"<think>\nHm.\n</think>\n{CALLS}"
    with run_server(script=text_script(text, ends=True), reasoning_parser="qwen3") as server:
        message = both(server, {"model": MODEL, "messages": HELLO, "max_tokens": 400, "tools": [WEATHER]})
        thinking, said, call = message["content"]
        assert (thinking["type"], thinking["thinking"]) == ("thinking", "Hm.") and thinking["signature"]
        assert said == {"type": "text", "text": "Let me see."}
        assert call == {"type": "tool_use", "name": "weather", "input": {"city": "Kö"}}
        assert message["stop_reason"] == "tool_use"


def test_a_budget_is_a_target_that_a_model_without_thinking_keeps(server):
    body = {"messages": HELLO, "max_tokens": 6, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    assert both(server, body)["content"] == [{"type": "text", "text": "The ď"}]


def test_what_coding_agents_send_besides(server):
    edits = [{"type": "clear_thinking_20251015", "keep": "all"}]
    body = {
        "messages": [*HELLO, {"role": "system", "content": "Be brief."}],
        "max_tokens": 6,
        "context_management": {"edits": edits},
        "metadata": {"user_id": "someone"},
        "system": [{"type": "text", "text": "Help.", "cache_control": {"type": "ephemeral"}}],
    }
    answer = httpx.post(server.url + "/v1/messages?beta=true", json=body, headers={"anthropic-beta": "x"})
    assert answer.status_code == 200 and answer.headers["request-id"] == answer.headers["x-request-id"]


def test_a_call_that_is_cut_off():
    with run_server(script=text_script(CALLS, ends=True)) as server:
        body = {"messages": HELLO, "max_tokens": CALLS.index('Kö"'), "tools": [WEATHER]}
        message = server.post("/v1/messages", body).json()
        assert message["stop_reason"] == "max_tokens"
        assert message["content"][-1]["input"] == {"__partial_json": '{"city": "'}


def read_by_the_model(server, **fields) -> str:
    return prompt_of(server, "/v1/messages", {"max_tokens": 1, **fields})


def test_the_conversation_in_the_prompt(server):
    conversation = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "c"},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Kö"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "rain"}]},
                {"type": "tool_result", "tool_use_id": "t1", "content": "no", "is_error": True},
                {"type": "text", "text": "d", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ]
    assert read_by_the_model(
        server, system=[{"type": "text", "text": "Be brief."}], messages=conversation
    ) == (
        "[system] Be brief.\n[user] a\nb\n"
        '[assistant] c\n\n<tool_call>\n{"name": "weather", "arguments": {"city": "Kö"}}\n</tool_call>\n'
        "[user] <tool_response>\nrain\n</tool_response>\n<tool_response>\nError: no\n</tool_response>\n"
        "[user] d\n"
    )


def test_the_model_goes_on_with_a_message_that_is_begun(server):
    begun = [*HELLO, {"role": "assistant", "content": "Well"}]
    assert read_by_the_model(server, messages=begun) == "[user] hello\n[assistant] Well"


def test_count_tokens(server):
    answer = server.post("/v1/messages/count_tokens", {"messages": HELLO})
    assert answer.json() == {"input_tokens": len("[user] hello\n")}
    assert "max_tokens" in server.post("/v1/messages", {"messages": HELLO}).json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "status", "kind", "place"),
    [
        ({"model": "nope"}, 404, "not_found_error", "model"),
        ({"messages": []}, 400, "invalid_request_error", "messages"),
        ({"messages": [{"role": "bot", "content": "x"}]}, 400, "invalid_request_error", "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            400,
            "invalid_request_error",
            "messages[0].content[0].type",
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "content": [{"type": "tool_use", "id": "a", "name": "b", "input": 1}],
                    }
                ]
            },
            400,
            "invalid_request_error",
            "messages[0].content[0].input",
        ),
        ({"max_tokens": 0}, 400, "invalid_request_error", "max_tokens"),
        ({"temperature": 3}, 400, "invalid_request_error", "temperature"),
        ({"stop_sequences": [""]}, 400, "invalid_request_error", "stop_sequences"),
        ({"tools": [WEATHER, WEATHER]}, 400, "invalid_request_error", "tools[1].name"),
        (
            {"tools": [{"type": "bash_20250124", "name": "bash"}]},
            400,
            "invalid_request_error",
            "tools[0].type",
        ),
        ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error", "tool_choice"),
        (
            {"tool_choice": {"type": "tool", "name": "zz"}, "tools": [WEATHER]},
            400,
            "invalid_request_error",
            "zz",
        ),
        ({"tool_choice": {"type": "some"}}, 400, "invalid_request_error", "tool_choice.type"),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 0}},
            400,
            "invalid_request_error",
            "thinking.budget_tokens",
        ),
        ({"output_config": {"effort": "zz"}}, 400, "invalid_request_error", "output_config.effort"),
        ({"output_config": {"format": {}}}, 400, "invalid_request_error", "output_config.format"),
        ({"mcp_servers": [{}]}, 400, "invalid_request_error", "mcp_servers"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_have_anthropics_shape(server, fields, status, kind, place, stream):
    body = {"messages": HELLO, "max_tokens": 5, "stream": stream, **fields}
    response = server.post("/v1/messages", body)
    assert response.status_code == status, response.text
    answer = response.json()
    assert (answer["type"], answer["error"]["type"]) == ("error", kind)
    assert place in answer["error"]["message"]
    assert answer["request_id"] == response.headers["x-request-id"]


def test_middleware_speaks_anthropics_language_there():
    with run_server(api_key=("secret",)) as server:
        refused = server.post("/v1/messages", {"messages": HELLO})
        assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
        body = {"messages": HELLO, "max_tokens": 1}
        for headers in ({"X-Api-Key": "secret"}, {"Authorization": "Bearer secret"}):
            answer = httpx.post(server.url + "/v1/messages", json=body, headers=headers)
            assert answer.status_code == 200
        both_keys = {"X-Api-Key": "secret", "Authorization": "Bearer secret"}
        assert httpx.post(server.url + "/v1/messages", json=body, headers=both_keys).status_code == 401
        assert "param" in server.post("/v1/chat/completions", {}).json()["error"]
        wrong = httpx.get(server.url + "/v1/messages", headers={"X-Api-Key": "secret"})
        assert (wrong.status_code, wrong.json()["type"]) == (405, "error")
