"""The routes around generation: readiness, tokens, rendered prompts, documentation."""

from __future__ import annotations

import json

import httpx
import pytest
from serving import MODEL, run_server
from test_errors import check_error

from streamllm.server.app import DOCS_ROUTES, ROUTES
from streamllm.server.docs import BODIES
from streamllm.server.protocol import ChatRequest, field_support

MESSAGES = [{"role": "user", "content": "hi"}]


# -- state -------------------------------------------------------------------------------------------------


def test_a_server_is_ready_once_it_has_generated(server):
    assert httpx.get(server.url + "/ready").status_code == 200
    assert server.stats().num_steps >= 1


def test_a_server_that_generates_nothing_is_not_ready(monkeypatch):
    monkeypatch.setattr("streamllm.server.app.WARM_UP_TIMEOUT", 0.05)
    with run_server(step_seconds=0.3) as server:
        assert httpx.get(server.url + "/health").status_code == 200
        assert "No token" in check_error(httpx.get(server.url + "/ready"), 503)["message"]
        server.wait_idle()
        # The first client's token is as good as the server's own.
        assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200
        assert httpx.get(server.url + "/ready").status_code == 200


def test_the_warm_up_is_not_counted():
    with run_server() as server:
        stats = server.stats()
        assert (stats.prompt_tokens, stats.generation_tokens, stats.prefix_cache_queries) == (0, 0, 0)
        assert not any(stats.finished.values()) and server.is_idle()
        text = httpx.get(server.url + "/metrics").text
        assert 'e2e_request_latency_seconds_count{engine="0",model_name="fake-model"} 0.0' in text
        assert 'iteration_tokens_total_count{engine="0",model_name="fake-model"} 0.0' in text


def test_load():
    with run_server(step_seconds=0.005, max_num_seqs=2) as server:
        body = {"prompt": "a", "max_tokens": 3000, "stream": True, "n": 3}
        with httpx.stream("POST", server.url + "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            load = httpx.get(server.url + "/load").json()
            assert load == {"server_load": 1, "num_running": 2, "num_waiting": 1}
        server.wait_idle()
        assert httpx.get(server.url + "/load").json()["server_load"] == 0


@pytest.mark.parametrize(
    "path, known",
    [
        ("//v1/completions", "/v1/completions"),
        ("/v1/completions/", "/v1/completions"),
        ("/V1/Completions", "/v1/completions"),
        ("/v1/v1/completions", None),
        ("/completions", "/v1/completions"),
    ],
)
def test_other_spellings_of_a_route_are_named(server, path, known):
    message = check_error(server.post(path, {"prompt": "a"}), 404)["message"]
    assert known is None or f"POST {known}" in message


# -- tokens ------------------------------------------------------------------------------------------------


def test_tokenize_text(server):
    answer = server.post("/tokenize", {"model": MODEL, "prompt": "aď", "return_token_strs": True}).json()
    assert answer == {
        "count": 3,
        "max_model_len": 4096,
        "tokens": [97, 196, 143],
        "token_strs": ["a", "\ufffd", "\ufffd"],
    }
    assert server.post("/tokenize", {"prompt": ""}).json()["count"] == 0
    # Longer than the context: it is only counted.
    assert server.post("/tokenize", {"prompt": "x" * 100_000}).json()["count"] == 100_000


def test_tokenize_messages(server):
    answer = server.post("/tokenize", {"messages": MESSAGES}).json()
    assert bytes(answer["tokens"]) == b"[user] hi\n" and answer["token_strs"] is None
    chat = {"messages": MESSAGES, "max_tokens": 1}
    assert server.post("/v1/chat/completions", chat).json()["usage"]["prompt_tokens"] == answer["count"]


@pytest.mark.parametrize(
    "body, param",
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": MESSAGES}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": ["a"]}, "prompt"),
        ({"prompt": "x" * 4_000_001}, "prompt"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 30_000}]}, "messages"),
        ({"messages": MESSAGES, "chat_template": "x"}, "chat_template"),
        ({"messages": MESSAGES, "tools": [{}]}, "tools[0].function"),
    ],
)
def test_refused_by_tokenize(server, body, param):
    assert check_error(server.post("/tokenize", body), 400, code_of(body))["param"] == param


def code_of(body: dict) -> str | None:
    return "context_length_exceeded" if len(str(body.get("messages"))) > 20_000 else None


def test_detokenize(server):
    for tokens, text in (
        ([97, 196, 143], "aď"),
        ([], ""),
        ([97, 256], "a<eos>"),
        ([97] * 10_000, "a" * 10_000),
    ):
        assert server.post("/detokenize", {"tokens": tokens}).json() == {"prompt": text}


@pytest.mark.parametrize(
    "tokens", [[-1], [2**63], [2**70], [257], ["1"], [[1]], [1.5], [True], "1", None, 5, {}]
)
def test_refused_by_detokenize(server, tokens):
    assert check_error(server.post("/detokenize", {"tokens": tokens}), 400)["param"].startswith("tokens")
    assert check_error(server.post("/detokenize", {}), 400)["param"] == "tokens"


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_models_and_bodies_of_the_token_routes(server, path):
    body = {"prompt": "a", "tokens": [97]}
    check_error(server.post(path, {**body, "model": "nope"}), 404, "model_not_found")
    for broken in (b"", b"{", b"[]", b'{"prompt": "\\ud800", "tokens": [1]}', b"[" * 10_000):
        check_error(server.post(path, broken), 400)


# -- prompts -----------------------------------------------------------------------------------------------


def test_render_chat(server):
    before = server.stats().prompt_tokens
    answer = server.post("/v1/chat/completions/render", {"messages": MESSAGES, "max_tokens": 5}).json()
    assert answer["prompt_text"] == "[user] hi\n" == bytes(answer["prompt_token_ids"]).decode()
    assert (answer["count"], answer["max_model_len"], answer["model"]) == (10, 4096, MODEL)
    assert server.stats().prompt_tokens == before


def test_render_completions(server):
    answer = server.post("/v1/completions/render", {"prompt": ["a", "bc"]}).json()
    assert [prompt["prompt_token_ids"] for prompt in answer["data"]] == [[97], [98, 99]]
    (prompt,) = server.post("/v1/completions/render", {"prompt": [97, 98]}).json()["data"]
    assert prompt["prompt_text"] == "ab"


@pytest.mark.parametrize(
    "fields",
    [{"temperature": 9}, {"stop": ""}, {"n": 0}, {"prompt": ""}, {"prompt": [300]}, {"prompt": "x" * 5000}],
)
def test_what_generation_refuses_rendering_refuses(server, fields):
    body = {"prompt": "a", **fields}
    refusal, rendered = server.post("/v1/completions", body), server.post("/v1/completions/render", body)
    assert refusal.status_code == rendered.status_code == 400
    assert rendered.json() == refusal.json()


def test_content_formats_and_default_variables():
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    one = [{"role": "user", "content": "a"}]
    template = "{{ mark }}{{ messages[0].content }}"

    def rendered(server, messages, **fields):
        body = {"messages": messages, **fields}
        return server.post("/v1/chat/completions/render", body).json()["prompt_text"]

    with run_server(chat_template=template, default_chat_template_kwargs='{"mark": "!"}') as server:
        assert rendered(server, parts) == "!a\nb" and rendered(server, one) == "!a"
        assert rendered(server, one, chat_template_kwargs={"mark": "?"}) == "?a"
        for name in ("messages", "tokenize", "add_generation_prompt", "chat_template", "bos_token"):
            body = {"messages": one, "chat_template_kwargs": {name: 1}}
            error = check_error(server.post("/v1/chat/completions", body), 400)
            assert error["param"] == f"chat_template_kwargs.{name}"
    with run_server(chat_template=template, chat_template_content_format="openai") as server:
        assert rendered(server, one) == "[{'type': 'text', 'text': 'a'}]"
    with run_server(chat_template="{{ raise_exception('Only <one> turn, please.') }}") as server:
        error = check_error(server.post("/v1/chat/completions", {"messages": one}), 400)
        assert error["message"] == "Only <one> turn, please." and error["param"] == "messages"
        server.canary()


def test_templates_of_requests():
    hostile = "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"
    with run_server() as server:
        body = {"messages": MESSAGES, "chat_template": "x"}
        assert "--trust" in check_error(server.post("/v1/chat/completions", body), 400)["message"]
        body = {"messages": MESSAGES, "chat_template_kwargs": {"chat_template": "x"}}
        check_error(server.post("/v1/chat/completions", body), 400)
    with run_server(trust_request_chat_template=True) as server:

        def render(template):
            return server.post(
                "/v1/chat/completions/render", {"messages": MESSAGES, "chat_template": template}
            )

        assert render("<{{ messages[0].content }}>").json()["prompt_text"] == "<hi>"
        for template in (hostile, "{{ ''.__class__.__mro__ }}", "{{", "{{ 'a' * 10 ** 10 }}"):
            check_error(render(template), 400)
            server.canary()


# -- documentation -----------------------------------------------------------------------------------------


def test_the_openapi_document_knows_every_route_and_field(server):
    document = httpx.get(server.url + "/openapi.json").json()
    operations = {(path, method) for path, item in document["paths"].items() for method in item}
    for route in ROUTES + DOCS_ROUTES:
        for method in route.methods - {"HEAD"}:
            assert (route.path.replace(":path", ""), method.lower()) in operations
    assert all(item["summary"] for path in document["paths"].values() for item in path.values())
    schema = document["components"]["schemas"]["ChatRequest"]
    assert schema["required"] == ["messages"]
    support = {name: field["x-support"] for name, field in schema["properties"].items()}
    assert support == field_support(ChatRequest)
    for path, body_type in BODIES.items():
        reference = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert reference == {"$ref": f"#/components/schemas/{body_type.__name__}"}


def test_every_field_that_the_document_refuses_is_refused_and_its_neutral_values_are_not(server):
    schemas = httpx.get(server.url + "/openapi.json").json()["components"]["schemas"]
    for path, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": MESSAGES}),
    ):
        for name, field in schemas[BODIES[path].__name__]["properties"].items():
            if field["x-support"] == "not supported yet":
                error = check_error(server.post(path, {**body, name: "something"}), 400)
                assert error["param"] == name and "not supported" in error["message"]
                for neutral in field["enum"]:
                    answer = server.post(path, {**body, "max_tokens": 1, name: neutral})
                    assert answer.status_code == 200, (name, neutral, answer.text)
            elif field["x-support"] == "ignored":
                answer = server.post(path, {**body, "max_tokens": 1, name: {"any": ["thing"]}})
                assert answer.status_code == 200, (name, answer.text)


def test_the_document_is_valid_openapi(server):
    jsonschema = pytest.importorskip("jsonschema")
    document = httpx.get(server.url + "/openapi.json").json()
    assert document["openapi"] == "3.1.0"
    for name, schema in document["components"]["schemas"].items():
        jsonschema.Draft202012Validator.check_schema(schema)
        resolvable = {**schema, "components": document["components"]}
        validator = jsonschema.Draft202012Validator(resolvable)
        if name == "ChatRequest":
            assert validator.is_valid({"messages": MESSAGES, "temperature": 0.5, "tools": []})
            assert not validator.is_valid({"messages": MESSAGES, "temperature": "hot"})
            assert not validator.is_valid({"temperature": 1})


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens"])
def test_errors_are_as_the_document_says(server, path):
    jsonschema = pytest.importorskip("jsonschema")
    document = httpx.get(server.url + "/openapi.json").json()
    said = document["paths"][path]["post"]["responses"]["default"]["content"]["application/json"]["schema"]
    answer = httpx.post(server.url + path)
    assert answer.status_code == 400
    jsonschema.validate(answer.json(), {**said, "components": document["components"]})


def test_the_page_needs_nothing_from_elsewhere(server):
    response = httpx.get(server.url + "/docs")
    assert response.headers["content-type"].startswith("text/html")
    assert response.headers["content-security-policy"].startswith("default-src 'none'")
    assert "src=" not in response.text and "http" not in response.text.replace("http-", "")
    assert "/v1/chat/completions" in response.text and "max_completion_tokens" in response.text


def test_documentation_can_be_switched_off():
    with run_server(disable_fastapi_docs=True) as server:
        for path in ("/docs", "/openapi.json"):
            check_error(httpx.get(server.url + path), 404)


def test_answers_are_json(server):
    for path in ("/v1/models", "/version", "/load", "/openapi.json"):
        json.loads(httpx.get(server.url + path).content)


def test_paths_may_have_a_prefix_that_a_proxy_strips():
    with run_server(root_path="/llm/", api_key=("key",)) as server:
        assert httpx.get(server.url + "/health").status_code == 200
        assert httpx.get(server.url + "/v1/models").status_code == 401
        opened = {"Authorization": "Bearer key"}
        assert httpx.get(server.url + "/v1/models", headers=opened).status_code == 200
        # The same path with the prefix is another path, and no way around the key.
        assert httpx.get(server.url + "/llm/v1/models").status_code == 401
        assert httpx.get(server.url + "/llm/health").status_code == 401
