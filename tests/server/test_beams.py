"""best_of and beam search over HTTP: the choices, the usage, and every contradiction refused by name."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from helpers.fake_model import FakeRunner
from serving import run_server

from streamllm.sampling_params import BeamSearchParams

PATHS = {
    "/v1/completions": {"prompt": "hello world"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
}
BEAMS = {"use_beam_search": True, "n": 4, "max_tokens": 12}


@pytest.fixture(scope="module")
def beams():
    """A model with many candidates, whose folder recommends to sample."""
    settings = {
        "runner": FakeRunner(block_size=16, max_num_batched_tokens=64),
        "default_sampling": {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1},
        "debug_kv_blocks": True,
    }
    with run_server(engine_settings=settings) as running:
        yield running


def search(server, prompt: str, params: BeamSearchParams):
    """The same search through the engine itself."""

    async def run():
        return await anext(await server.engine.add_request(prompt, params))

    return asyncio.run_coroutine_threadsafe(run(), server.engine._task.get_loop()).result(10).outputs


def texts(answer: httpx.Response) -> list[str]:
    assert answer.status_code == 200, answer.text
    choices = answer.json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(len(choices)))
    return [c["text"] if "text" in c else c["message"]["content"] for c in choices]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"length_penalty": 2.0},
        {"length_penalty": -1, "early_stopping": True},
        {"early_stopping": "never"},
    ],
)
def test_the_choices_are_the_hypotheses_best_first(beams, fields):
    expected = search(beams, "hello world", BeamSearchParams(beam_width=4, max_tokens=12, **fields))
    answer = beams.post("/v1/completions", {"prompt": "hello world", **BEAMS, **fields})
    assert texts(answer) == [choice.text for choice in expected]
    assert [c["finish_reason"] for c in answer.json()["choices"]] == [c.finish_reason for c in expected]
    assert answer.json()["usage"]["completion_tokens"] == sum(len(c.token_ids) for c in expected)
    assert len(set(texts(answer))) == 4
    penalty = fields.get("length_penalty", 1.0)
    scores = [c.cumulative_logprob / len(c.token_ids) ** penalty for c in expected]
    assert scores == sorted(scores, reverse=True)
    beams.wait_idle()


def test_chat_and_batches_of_prompts(beams):
    body = {"prompt": ["one prompt", "another"], **BEAMS}
    both = texts(beams.post("/v1/completions", body))
    alone = [texts(beams.post("/v1/completions", {**body, "prompt": prompt})) for prompt in body["prompt"]]
    assert both == alone[0] + alone[1]
    chat = beams.post("/v1/chat/completions", {**PATHS["/v1/chat/completions"], **BEAMS})
    assert len(texts(chat)) == 4 and chat.json()["choices"][0]["logprobs"] is None
    beams.wait_idle()


def test_best_of_is_the_width_and_n_what_is_returned(beams):
    body = {"prompt": "hello world", "use_beam_search": True, "max_tokens": 12}
    four = beams.post("/v1/completions", {**body, "n": 4})
    two = beams.post("/v1/completions", {**body, "n": 2, "best_of": 4})
    assert texts(two) == texts(four)[:2]
    assert two.json()["usage"] == four.json()["usage"]
    assert texts(beams.post("/v1/completions", {**body, "best_of": 4})) == texts(four)[:1]
    assert texts(beams.post("/v1/completions", {**body, "n": 2, "best_of": 4, "echo": True})) == [
        "hello world" + text for text in texts(two)
    ]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "fields, param",
    [
        ({"stream": True}, "stream"),
        ({"temperature": 0.5}, "temperature"),
        ({"top_p": 0.9}, "top_p"),
        ({"top_k": 3}, "top_k"),
        ({"min_p": 0.1}, "min_p"),
        ({"seed": 0}, "seed"),
        ({"stop": "x"}, "stop"),
        ({"stop_token_ids": [5]}, "stop_token_ids"),
        ({"min_tokens": 2}, "min_tokens"),
        ({"skip_special_tokens": False}, "skip_special_tokens"),
        ({"length_penalty": 11}, "length_penalty"),
        ({"length_penalty": "1"}, "length_penalty"),
        ({"early_stopping": "always"}, "early_stopping"),
        ({"early_stopping": 1}, "early_stopping"),
        ({"use_beam_search": 1}, "use_beam_search"),
        ({"n": 0}, "n"),
        ({"n": -1}, "n"),
        ({"n": 17}, "n"),
        ({"n": 9}, "n"),  # more than --max-num-seqs
        ({"n": 10**6}, "n"),
        ({"n": 2.5}, "n"),
        ({"n": True}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"use_beam_search": False, "length_penalty": 2}, "length_penalty"),
        ({"use_beam_search": None, "early_stopping": True}, "early_stopping"),
    ],
)
def test_contradictions_name_the_field(beams, path, fields, param):
    response = beams.post(path, {**PATHS[path], **BEAMS, **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param and error["message"].startswith(param)
    assert beams.is_idle()


@pytest.mark.parametrize(
    "path, fields, param",
    [
        ("/v1/completions", {"logprobs": 0}, "logprobs"),
        ("/v1/chat/completions", {"logprobs": True}, "logprobs"),
        ("/v1/completions", {"best_of": 3}, "best_of"),  # n is 4
        ("/v1/completions", {"best_of": 12}, "best_of"),
        ("/v1/completions", {"best_of": 200}, "best_of"),
        ("/v1/completions", {"prompt": ["a", "b"], "n": 9}, "n"),
        ("/v1/chat/completions", {"max_completion_tokens": 0}, "max_completion_tokens"),
    ],
)
def test_contradictions_of_one_route(beams, path, fields, param):
    error = beams.post(path, {**PATHS[path], **BEAMS, **fields}).json()["error"]
    assert error["param"] == param and param in error["message"]
    assert "beam_width" not in error["message"]


@pytest.mark.parametrize("path", PATHS)
def test_fields_that_ask_for_nothing_are_accepted(beams, path):
    neutral = {"stream": False, "temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0, "seed": None,
               "stop": [], "stop_token_ids": [], "min_tokens": 0, "length_penalty": 1.0,
               "early_stopping": False, "priority": 0}  # fmt: skip
    expected = texts(beams.post(path, {**PATHS[path], **BEAMS}))
    assert texts(beams.post(path, {**PATHS[path], **BEAMS, **neutral})) == expected
    plain = {**PATHS[path], "length_penalty": 1, "early_stopping": False, "use_beam_search": False}
    assert beams.post(path, {**plain, "max_tokens": 1}).status_code == 200


def test_a_client_that_leaves_frees_all_beams():
    runner = FakeRunner(block_size=16, max_num_batched_tokens=64)
    with run_server(step_seconds=0.005, engine_settings={"runner": runner}) as server:
        body = {"prompt": "a", "use_beam_search": True, "n": 4, "max_tokens": 200, "ignore_eos": True}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(server.url + "/v1/completions", json=body, timeout=0.15)
        assert server.stats().num_steps > 0
        server.wait_idle()
        assert server.stats().finished["abort"] == 1


# -- best_of of samples ------------------------------------------------------------------------------------


def test_best_of_returns_n_and_counts_all(beams):
    body = {"prompt": "hello", "max_tokens": 8, "seed": 1}
    answer = beams.post("/v1/completions", {**body, "n": 2, "best_of": 6})
    assert len(texts(answer)) == 2
    assert answer.json()["choices"][0]["logprobs"] is None
    # As with OpenAI, all that was generated counts.
    assert answer.json()["usage"]["completion_tokens"] == 6 * 8
    answer = beams.post("/v1/completions", {**body, "best_of": 3, "logprobs": 1})
    assert len(texts(answer)) == 1 and len(answer.json()["choices"][0]["logprobs"]["tokens"]) == 8


@pytest.mark.parametrize(
    "fields",
    [{"best_of": 2, "stream": True}, {"best_of": 1, "n": 2}, {"best_of": 0}, {"best_of": True},
     {"best_of": 1.5}, {"best_of": 10**6}, {"best_of": "3"}],
)  # fmt: skip
def test_best_of_that_cannot_be(beams, fields):
    response = beams.post("/v1/completions", {"prompt": "a", **fields})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "best_of" in response.json()["error"]["message"]


def test_best_of_equal_to_n_may_stream(beams):
    body = {"prompt": "a", "best_of": 2, "n": 2, "stream": True, "max_tokens": 2}
    assert beams.post("/v1/completions", body).status_code == 200
