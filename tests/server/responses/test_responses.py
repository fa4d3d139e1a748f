"""OpenAI's Responses API as its own client and raw HTTP see it."""

from __future__ import annotations

import functools
import json
import time

import httpx
import openai
import pytest
from serving import MODEL, TEXT, prompt_of, run_server, text_script

WEATHER = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
NESTED: dict = functools.reduce(lambda inner, _: {"a": inner}, range(300), {})
CALLS = (
    "<think>\nHm.\n</think>\nLet me see.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Ko"}}\n</tool_call>'
)


@pytest.fixture(scope="module")
def brief():
    """A model that says "Hi there." and ends."""
    with run_server(script=text_script("Hi there.", ends=True)) as server:
        yield server


@pytest.fixture(scope="module")
def calling():
    """A model that thinks, speaks and calls."""
    with run_server(script=text_script(CALLS, ends=True), reasoning_parser="qwen3") as server:
        yield server


def client_of(server):
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def events_of(response: httpx.Response) -> list[dict]:
    """The events of a stream: named by their types, numbered from 0, no [DONE]."""
    assert response.headers["content-type"].startswith("text/event-stream")
    parsed = []
    for block in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n", 1)
        parsed.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {parsed[-1]['type']}"
    assert [event["sequence_number"] for event in parsed] == list(range(len(parsed)))
    return parsed


def timeless(response: dict) -> dict:
    """A response without what two equal ones differ in."""
    usage = response["usage"] and {**response["usage"], "input_tokens_details": None}
    output = [{**item, "id": None, "call_id": None} for item in response["output"]]
    return {
        **response,
        "id": None,
        "created_at": None,
        "completed_at": None,
        "usage": usage,
        "output": output,
    }


def test_events_of_a_message(brief):
    body = {"model": MODEL, "input": "hi", "stream": True}
    events = events_of(brief.post("/v1/responses", body))
    kinds = [event["type"].removeprefix("response.") for event in events]
    deltas = kinds.count("output_text.delta")
    assert deltas > 3 and kinds == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * deltas,
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    item_id = events[2]["item"]["id"]
    for event in events[3:-2]:
        assert (event["item_id"], event["output_index"], event["content_index"]) == (item_id, 0, 0)
    assert events[0]["response"]["output"] == [] and events[0]["response"]["status"] == "in_progress"
    assert "".join(event.get("delta", "") for event in events) == "Hi there."
    whole = brief.post("/v1/responses", body | {"stream": False}).json()
    assert timeless(events[-1]["response"]) == timeless(whole)
    assert whole["output"][0]["content"] == [
        {"type": "output_text", "text": "Hi there.", "annotations": [], "logprobs": []}
    ]


def test_reasoning_text_and_calls(calling):
    body = {"model": MODEL, "input": "hi", "tools": [WEATHER]}
    whole = calling.post("/v1/responses", body).json()
    reasoning, message, call = whole["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm."}] and reasoning["summary"] == []
    assert message["content"][0]["text"] == "Let me see."
    assert (call["type"], call["name"], call["arguments"]) == ("function_call", "weather", '{"city": "Ko"}')
    assert all(item["status"] == "completed" for item in whole["output"])
    assert 0 < whole["usage"]["output_tokens_details"]["reasoning_tokens"] < whole["usage"]["output_tokens"]
    events = events_of(calling.post("/v1/responses", body | {"stream": True}))
    assert timeless(events[-1]["response"]) == timeless(whole)
    added = [event for event in events if event["type"] == "response.output_item.added"]
    done = [event for event in events if event["type"] == "response.output_item.done"]
    assert (
        [event["output_index"] for event in added] == [event["output_index"] for event in done] == [0, 1, 2]
    )
    assert [event["item"] for event in done] == events[-1]["response"]["output"]
    pieces = [e["delta"] for e in events if e["type"] == "response.function_call_arguments.delta"]
    assert "".join(pieces) == '{"city": "Ko"}' and len(pieces) > 3


def test_the_client_accumulates_the_same(calling):
    with (
        client_of(calling) as client,
        client.responses.stream(model=MODEL, input="hi", tools=[WEATHER]) as stream,
    ):
        kinds = {event.type for event in stream}
        final = stream.get_final_response()
    assert "response.function_call_arguments.delta" in kinds
    assert final.output_text == "Let me see." and final.output[2].arguments == '{"city": "Ko"}'


def test_an_answer_that_is_cut_off(calling):
    body = {"input": "hi", "tools": [WEATHER], "max_output_tokens": len(CALLS) - 20}
    answer = calling.post("/v1/responses", body).json()
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert answer["output"][-1]["status"] == "incomplete"
    assert answer["output"][-1]["arguments"] and '"city": "Ko"'.startswith(
        answer["output"][-1]["arguments"][1:]
    )
    last = events_of(calling.post("/v1/responses", body | {"stream": True}))[-1]
    assert last["type"] == "response.incomplete" and timeless(last["response"]) == timeless(answer)


def test_logprobs(brief):
    body = {"input": "hi", "include": ["message.output_text.logprobs"], "top_logprobs": 1}
    (item,) = brief.post("/v1/responses", body).json()["output"]
    entries = item["content"][0]["logprobs"]
    assert "".join(entry["token"] for entry in entries).startswith("Hi there.")
    assert all(len(entry["top_logprobs"]) == 1 for entry in entries)


def read_by_the_model(server, **fields) -> str:
    return prompt_of(server, "/v1/responses", fields)


def test_items_in_the_prompt(brief):
    items = [
        {"role": "developer", "content": "b"},
        {"role": "user", "content": [{"type": "input_text", "text": "c"}]},
        {
            "type": "reasoning",
            "id": "rs",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "r"}],
        },
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "d"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "x"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "y"}]},
    ]
    call = '<tool_call>\n{"name": "%s", "arguments": {}}\n</tool_call>'
    assert read_by_the_model(brief, instructions="a", input=items) == (
        f"[system] a\n\nb\n[user] c\n[assistant] d\n\n{call % 'f'}\n{call % 'g'}\n"
        "[user] <tool_response>\nx\n</tool_response>\n<tool_response>\ny\n</tool_response>\n"
    )


def test_turns_follow_each_other(calling):
    first = calling.post("/v1/responses", {"input": "hi", "tools": [WEATHER]}).json()
    call = first["output"][-1]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "rain"}
    fields = {"previous_response_id": first["id"], "input": [output]}
    prompt = read_by_the_model(calling, **fields)
    assert (
        prompt.startswith("[user] hi\n[assistant] Let me see.")
        and '"city": "Ko"' in prompt
        and "rain" in prompt
    )
    second = calling.post("/v1/responses", fields).json()
    third = read_by_the_model(
        calling, previous_response_id=second["id"], input="more", instructions="Be brief."
    )
    assert third.startswith("[system] Be brief.\n[user] hi\n") and third.endswith("[user] more\n")
    assert third.count("rain") == 1


def test_kept_and_forgotten(brief):
    with client_of(brief) as client:
        kept = client.responses.create(model=MODEL, input="hi", metadata={"a": "b"})
        assert client.responses.retrieve(kept.id).model_dump() == kept.model_dump()
        (item,) = client.responses.input_items.list(kept.id).data
        assert item.content[0].text == "hi"
        client.responses.delete(kept.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(kept.id)
        passed = client.responses.create(model=MODEL, input="hi", store=False)
        for refused in (
            lambda: client.responses.retrieve(passed.id),
            lambda: client.responses.delete(passed.id),
            lambda: client.responses.input_items.list(passed.id),
            lambda: client.responses.create(model=MODEL, input="x", previous_response_id=passed.id),
        ):
            with pytest.raises(openai.NotFoundError):
                refused()


def test_input_items_by_page(brief):
    items = [{"role": "user", "content": str(number)} for number in range(5)]
    response_id = brief.post("/v1/responses", {"input": items}).json()["id"]
    path = f"{brief.url}/v1/responses/{response_id}/input_items"

    def page(**query):
        return httpx.get(path, params=query).json()

    def texts(listed):
        return [item["content"][0]["text"] for item in listed["data"]]

    assert texts(page()) == ["4", "3", "2", "1", "0"] and not page()["has_more"]
    first = page(order="asc", limit=2)
    assert texts(first) == ["0", "1"] and first["has_more"]
    second = page(order="asc", limit=3, after=first["last_id"])
    assert texts(second) == ["2", "3", "4"] and not second["has_more"]
    for query in ({"limit": 0}, {"limit": "x"}, {"order": "up"}, {"after": "nope"}):
        assert page(**query)["error"]["param"] == next(iter(query))


def test_responses_survive_a_restart_and_belong_to_their_key(tmp_path):
    def run():
        return run_server(
            script=text_script("Hi.", ends=True), data_dir=str(tmp_path / "data"), api_key=("one", "two")
        )

    def call(server, method, path, key, **options):
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.request(method, server.url + path, headers=headers, **options)

    with run() as server:
        assert not (tmp_path / "data").exists()
        made = call(server, "POST", "/v1/responses", "one", json={"input": "hi"}).json()
    assert (tmp_path / "data").stat().st_mode & 0o777 == 0o700
    with run() as server:
        path = f"/v1/responses/{made['id']}"
        assert call(server, "GET", path, "one").json() == made
        assert call(server, "GET", path, "two").status_code == 404
        assert call(server, "DELETE", path, "two").status_code == 404
        follow = {"input": "x", "previous_response_id": made["id"]}
        assert call(server, "POST", "/v1/responses", "two", json=follow).status_code == 404
        assert call(server, "POST", "/v1/responses", "one", json=follow).status_code == 200


# -- in the background -------------------------------------------------------------------------------------


def ended(server, response_id) -> dict:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        response = httpx.get(f"{server.url}/v1/responses/{response_id}").json()
        if response["status"] not in ("queued", "in_progress"):
            return response
        time.sleep(0.01)
    raise AssertionError("it did not end")


def test_in_the_background(brief):
    made = brief.post("/v1/responses", {"input": "hi", "background": True}).json()
    assert (made["status"], made["output"], made["background"]) == ("queued", [], True)
    assert ended(brief, made["id"])["output"][0]["content"][0]["text"] == "Hi there."
    brief.canary()


def test_a_stream_in_the_background_can_be_taken_up_again(brief):
    body = {"input": "hi", "background": True, "stream": True}
    events = events_of(brief.post("/v1/responses", body))
    assert [event["type"] for event in events[:3]] == [
        "response.created",
        "response.queued",
        "response.in_progress",
    ]
    path = f"{brief.url}/v1/responses/{events[0]['response']['id']}"
    again = httpx.get(path, params={"stream": "true", "starting_after": 4}).text
    assert [json.loads(line[6:]) for line in again.splitlines() if line.startswith("data: ")] == events[5:]
    for wrong in (-7, "x", "nan"):
        refused = httpx.get(path, params={"stream": "true", "starting_after": wrong})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "starting_after")


def test_a_response_in_the_background_outlives_its_client_and_can_be_cancelled():
    with run_server(step_seconds=0.02) as server:
        body = {"input": "hi", "background": True, "stream": True, "max_output_tokens": 4000}
        with httpx.stream("POST", server.url + "/v1/responses", json=body) as response:
            line = next(line for line in response.iter_lines() if line.startswith("data: "))
        response_id = json.loads(line[6:])["response"]["id"]
        time.sleep(0.2)
        path = f"{server.url}/v1/responses/{response_id}"
        assert httpx.get(path).json()["status"] == "in_progress" and not server.is_idle()
        cancelled = httpx.post(path + "/cancel").json()
        assert cancelled["status"] == "cancelled"
        assert cancelled["output"][0]["content"][0]["text"].startswith(TEXT[:3])
        assert httpx.post(path + "/cancel").json() == httpx.get(path).json() == cancelled
        server.wait_idle()


def test_what_a_stopped_server_had_not_finished_has_failed(tmp_path):
    with run_server(step_seconds=0.05, data_dir=str(tmp_path), shutdown_timeout=0.0) as server:
        body = {"input": "hi", "background": True, "max_output_tokens": 4000}
        response_id = server.post("/v1/responses", body).json()["id"]
        time.sleep(0.2)
    with run_server(data_dir=str(tmp_path)) as server:
        stored = httpx.get(f"{server.url}/v1/responses/{response_id}").json()
        assert stored["status"] == "failed"
        assert "stop" in stored["error"]["message"] or "shut" in stored["error"]["message"]


def test_only_what_runs_in_the_background_can_be_cancelled(brief):
    response_id = brief.post("/v1/responses", {"input": "hi"}).json()["id"]
    assert httpx.post(f"{brief.url}/v1/responses/{response_id}/cancel").status_code == 400
    assert httpx.get(f"{brief.url}/v1/responses/{response_id}?stream=true").status_code == 400
    for method, path in (("POST", "x/cancel"), ("GET", "x"), ("DELETE", "x"), ("GET", "x/input_items")):
        assert httpx.request(method, f"{brief.url}/v1/responses/{path}").status_code == 404


def test_a_client_that_leaves_its_stream_ends_it():
    with run_server(step_seconds=0.02) as server:
        body = {"input": "hi", "stream": True, "max_output_tokens": 4000}
        with httpx.stream("POST", server.url + "/v1/responses", json=body) as response:
            next(line for line in response.iter_lines() if "output_text.delta" in line)
        server.wait_idle()


# -- refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"model": "nope"}, 404, "model"),
        ({"input": []}, 400, "input"),
        ({"input": [5]}, 400, "input[0]"),
        ({"input": [{"role": "bot", "content": "x"}]}, 400, "input[0].role"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, 400, "input[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            400,
            "input[0].content[0].type",
        ),
        ({"input": [{"type": "function_call", "call_id": "1", "name": "f"}]}, 400, "input[0].arguments"),
        ({"input": [{"role": "user", "content": "x", "status": NESTED}]}, 400, "input"),
        ({"input": [{"role": "user", "content": "x", "status": 10**30}]}, 400, "input"),
        ({"tools": [{**WEATHER, "parameters": {"properties": {"a": NESTED}}}]}, 400, "tools"),
        ({"previous_response_id": "resp_none"}, 404, "previous_response_id"),
        ({"max_output_tokens": 0}, 400, "max_output_tokens"),
        ({"temperature": 9}, 400, "temperature"),
        ({"tools": [{"type": "web_search"}]}, 400, "tools[0].type"),
        ({"tools": [WEATHER, WEATHER]}, 400, "tools[1].name"),
        ({"tool_choice": "required"}, 400, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "zz"}, "tools": [WEATHER]}, 400, "tool_choice.name"),
        ({"reasoning": {"effort": "zz"}}, 400, "reasoning.effort"),
        ({"text": {"format": {"type": "xml"}}}, 400, "text.format"),
        ({"truncation": "some"}, 400, "truncation"),
        ({"include": ["file_search_call.results"]}, 400, "include[0]"),
        ({"background": True, "store": False}, 400, "background"),
        ({"metadata": {str(i): "x" for i in range(17)}}, 400, "metadata"),
        ({"conversation": "conv_1"}, 400, "conversation"),
        ({"prompt": {"id": "x"}}, 400, "prompt"),
    ],
)
def test_refusals(brief, fields, status, param, stream):
    response = brief.post("/v1/responses", {"input": "hi", "stream": stream, **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (status, param), response.text


def test_a_role_means_something_in_messages_only(brief):
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "role": ["odd"]}
    assert brief.post("/v1/responses", {"input": [call]}).status_code == 200


def test_input_tokens(brief):
    answer = brief.post("/v1/responses/input_tokens", {"input": "hi"}).json()
    assert answer == {"object": "response.input_tokens", "input_tokens": len("[user] hi\n")}
