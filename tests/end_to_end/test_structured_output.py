"""Structured output with the default model: over HTTP, through the openai client, in every kind of batch."""

import json
import threading
import time

import httpx
import jsonschema
import openai
import pydantic
import pytest
from helpers.json_schemas import ENFORCED, REFUSED

from streamllm import LLM, SamplingParams, StructuredOutputsParams

MODEL = "SmolLM2-135M-Instruct"
QUESTION = [{"role": "user", "content": "Name a fruit and say how many there are."}]
HOSTILE = [
    *({"regex": regex} for regex in (
        "[", "(?<=a)b", "(?=a)b", "(a", "a)", "a{2,1}", r"\p{Nope}", r"(a)\1", r"a\b", "x^y", "a\\",
        "(?P<n>a)(?P=n)",
        "(" * 5000 + "a" + ")" * 5000, "a" * 300_000,
    )),
    *({"json": schema} for schema in (
        {"type": "objekt"}, {"$ref": "#/nope"}, {"$ref": "https://example.com/x"}, {"enum": []},
        {"$ref": "#"},
        {"type": "object", "required": ["a"], "additionalProperties": False},
        {"type": "string", "pattern": "(?<=x)y"}, {"type": "string", "pattern": "["},
        {"type": "string", "maxLength": "3"},
        {"type": "integer", "minimum": 5, "maximum": 1}, {"items": 5}, {"properties": []}, {"anyOf": []},
        {"description": "x" * 5_000_000}, {"const": 2**70}, {"type": "integer", "multipleOf": 0},
        {"properties": {f"p{i}": {"type": "integer"} for i in range(10_000)}},
        {"allOf": [{"type": "string", "pattern": f".*a.{{{i}}}"} for i in range(10, 25)]},
        {"allOf": [{"anyOf": [{"properties": {f"k{i}": {"const": j}}} for j in range(5)]} for i in range(8)]},
        "{", "5", "[]",
    )),
    *({"grammar": grammar} for grammar in (
        "", "start: x", "start: start", 'start: "a', 'root ::= "a"\nroot ::= "b"', 'x ::= "a"',
        "start: " + "(" * 20_000,
        "start: r0\n" + "\n".join(f'r{i}: "a" r{i + 1}' for i in range(10_000)) + '\nr10000: "x"',
        "start: A0\n" + "\n".join(f"A{i}: A{i + 1} A{i + 1}" for i in range(40)) + '\nA40: "x"',
    )),
    {"choice": []}, {"choice": [""]}, {"choice": [5]}, {"structural_tag": {}}, {"structural_tag": "nothing"},
    {"json_object": False}, {"regex": "a", "json": {}}, {"mystery": 1},
]  # fmt: skip
assert len(HOSTILE) >= 50


@pytest.fixture(scope="module")
def llm(default_model_path):
    return LLM(model=str(default_model_path), max_model_len=1024, kv_cache_memory_bytes="128M")


def constrained(**constraint):
    return StructuredOutputsParams(**constraint)


# -- over HTTP ---------------------------------------------------------------------------------------------


def test_a_pydantic_model_is_parsed_by_the_openai_client(client):
    class Fruit(pydantic.BaseModel):
        name: str = pydantic.Field(max_length=20)
        count: int = pydantic.Field(ge=0, le=99)
        ripe: bool | None

    answer = client.chat.completions.parse(
        model=MODEL, messages=QUESTION, response_format=Fruit, temperature=0, max_tokens=120
    )
    fruit = answer.choices[0].message.parsed
    assert isinstance(fruit, Fruit) and answer.choices[0].finish_reason == "stop"
    with client.chat.completions.stream(
        model=MODEL, messages=QUESTION, response_format=Fruit, temperature=0, max_tokens=120
    ) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == fruit


@pytest.mark.parametrize("ensure_ascii", [True, False])
def test_values_that_are_not_ascii_come_out_as_they_are(server, ensure_ascii):
    values = ["在线", "Sjöfart", "😀", 'a"b\\c\nd']
    body = {
        "messages": QUESTION, "n": 8, "temperature": 1.5, "seed": 1,
        "response_format": {"type": "json_schema", "json_schema": {
            "name": "x", "schema": {"type": "object", "properties": {"状态": {"enum": values}},
                                    "required": ["状态"], "additionalProperties": False}}},
    }  # fmt: skip
    answer = httpx.post(
        f"{server.url}/v1/chat/completions", content=json.dumps(body, ensure_ascii=ensure_ascii), timeout=60
    ).json()
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert {json.loads(text)["状态"] for text in texts} <= set(values)
    assert not any("\\u" in text for text in texts)


def test_a_stream_equals_the_answer_that_is_not_streamed(client):
    request = {
        "model": MODEL, "prompt": "A list:", "temperature": 1.2, "seed": 5, "max_tokens": 60, "n": 3,
        "logprobs": 2,
        "extra_body": {"structured_outputs": {"regex": r"(- [a-zé]{2,9}\n){2,4}(漢字 )?end[.!]"}},
    }  # fmt: skip
    whole = client.completions.create(**request)
    texts, tokens, reasons = [""] * 3, [[] for _ in range(3)], [None] * 3
    for chunk in client.completions.create(**request, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            tokens[choice.index] += choice.logprobs.tokens if choice.logprobs else []
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.text for choice in whole.choices]
    assert tokens == [choice.logprobs.tokens for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert len(set(texts)) > 1


@pytest.mark.parametrize("name", REFUSED)
def test_a_schema_that_is_not_enforced_is_never_answered(client, name):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model=MODEL, messages=QUESTION,
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": REFUSED[name][0]}},
        )  # fmt: skip
    assert caught.value.body["param"] == "response_format"


def test_hostile_constraints_get_400_while_a_stream_goes_on(server, client):
    canary = {"prompt": "The capital of France is", "temperature": 0, "max_tokens": 8}
    expected = httpx.post(f"{server.url}/v1/completions", json=canary, timeout=60).json()["choices"]
    gaps, done = [], threading.Event()

    def read():
        last = time.monotonic()
        while not done.is_set():
            body = {"prompt": "Once", "max_tokens": 900, "ignore_eos": True, "stream": True}
            with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as stream:
                for _ in stream.iter_lines():
                    now = time.monotonic()
                    gaps.append(now - last)
                    last = now
                    if done.is_set():
                        break

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for constraint in HOSTILE:
            began = time.monotonic()
            body = {"prompt": "x", "max_tokens": 5, "structured_outputs": constraint}
            answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
            assert answer.status_code == 400, f"{str(constraint)[:200]}: {answer.text}"
            assert answer.json()["error"]["param"] == "structured_outputs", answer.text
            assert time.monotonic() - began < 5, str(constraint)[:200]
    finally:
        done.set()
        reader.join()
    assert len(gaps) > 50 and max(gaps) < 2
    again = httpx.post(f"{server.url}/v1/completions", json=canary, timeout=60).json()["choices"]
    assert again == expected
    server.wait_until_quiet()


# -- in every kind of batch --------------------------------------------------------------------------------


def sampled(llm: LLM, schema, count: int, seed: int):
    """Texts at temperature 1 that came to their end."""
    params = SamplingParams(
        n=count, seed=seed, max_tokens=200,
        structured_outputs=constrained(json=schema, disable_any_whitespace=seed % 2 == 0),
    )  # fmt: skip
    outputs = llm.generate("Some JSON:\n", params, use_tqdm=False)[0].outputs
    return [output.text for output in outputs if output.finish_reason == "stop"]


def check(schema, texts):
    validator = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    for text in texts:
        validator(schema, format_checker=jsonschema.FormatChecker()).validate(json.loads(text))


@pytest.mark.parametrize("name", ENFORCED)
def test_sampled_texts_validate(llm, name):
    texts = sampled(llm, ENFORCED[name], 4, seed=2)
    assert texts
    check(ENFORCED[name], texts)


@pytest.mark.slow
@pytest.mark.parametrize("name", ENFORCED)
def test_a_hundred_sampled_texts_validate(llm, name):
    texts = []
    for seed in range(20):
        texts += sampled(llm, ENFORCED[name], 50, seed)
        if len(texts) >= 100:
            break
    assert len(texts) >= 100
    check(ENFORCED[name], texts)


@pytest.mark.slow
def test_preemption_does_not_change_a_constrained_text(default_model_path):
    """Eight sequences in a pool that holds two of them."""
    params = [
        SamplingParams(
            temperature=1.0, seed=seed, n=2, max_tokens=100,
            structured_outputs=constrained(regex=r"([A-Z][a-z]{2,8} ){12}[A-Z][a-z]+\. (é|漢){3,20}!"),
        )
        for seed in range(4)
    ]  # fmt: skip
    prompts = ["Names:", "More names:", "Towns:", "Rivers:"]

    def texts(**settings):
        llm = LLM(model=str(default_model_path), max_model_len=256, enable_prefix_caching=False, **settings)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        preemptions = sum(output.metrics.num_preemptions for output in outputs)
        return [[(c.text, c.finish_reason) for c in output.outputs] for output in outputs], preemptions

    roomy, none = texts(num_gpu_blocks_override=200)
    tight, some = texts(num_gpu_blocks_override=16, max_num_batched_tokens=16, max_num_seqs=8)
    assert none == 0 and some > 0
    assert tight == roomy


def test_a_constraint_changes_no_neighbour(llm):
    plain = SamplingParams(temperature=1.0, seed=3, max_tokens=30)
    alone = llm.generate("Once upon a time", plain, use_tqdm=False)[0].outputs[0].token_ids
    others = [
        SamplingParams(seed=index, max_tokens=30, structured_outputs=constrained(**constraint))
        for index, constraint in enumerate(
            [{"regex": "[a-z ]+"}, {"json_object": True}, {"choice": ["x", "yy"]}, {"regex": "(.|\n)*"}] * 3
        )
    ]
    outputs = llm.generate(["Once upon a time"] * 13, [plain, *others], use_tqdm=False)
    assert outputs[0].outputs[0].token_ids == alone
    everything = SamplingParams(
        temperature=1.0, seed=3, max_tokens=30, structured_outputs=constrained(regex="(.|\n)*")
    )
    text = llm.generate("Once upon a time", everything, use_tqdm=False)[0].outputs[0].text
    assert text == llm.get_tokenizer().decode(alone)


def test_structural_tags_leave_text_free_and_tags_not(llm):
    pair = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 2}
    tags = {"triggers": ["<tool="], "structures": [{"begin": "<tool=add>", "schema": pair, "end": "</tool>"}]}
    params = SamplingParams(
        temperature=0,
        max_tokens=60,
        stop="</tool>",
        structured_outputs=constrained(structural_tag=tags),
    )
    prompt = "Q: 1+2 A: <tool=add>[1,2]</tool>\nQ: 2+1 A: <tool=add>[2,1]</tool>\nQ: 5+5 A:"
    text = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].text
    free, tag, call = text.partition("<tool=add>")
    assert (free, tag) == (" ", "<tool=add>")
    jsonschema.validate(json.loads(call), pair)


def test_a_constraint_that_cannot_be_enforced_is_a_value_error(llm):
    with pytest.raises(ValueError, match="uniqueItems"):
        llm.generate("x", SamplingParams(structured_outputs=constrained(json={"uniqueItems": True})))
