"""One observable effect for each honoured field; ``HONOURED`` is what the test walks the table with."""

from __future__ import annotations

import json
from collections.abc import Callable

from asking import EOS, NOT_GIVEN, START_OF_MESSAGE, Answer, Asker

Case = Callable[[Asker], None]
HONOURED: dict[str, Case] = {}
"""Field -> what it must do, on every route that has it."""

COUNTING = "1 2 3 1 2 3 1 2 3 1 2 3"
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def honoured(*fields: str) -> Callable[[Case], Case]:
    def register(case: Case) -> Case:
        for field in fields:
            assert field not in HONOURED
            HONOURED[field] = case
        return case

    return register


def _with_prompt(ask: Asker, text: str) -> dict:
    return {"messages": [{"role": "user", "content": text}]} if ask.is_chat else {"prompt": text}


def _finished_json(answer: Answer) -> dict:
    assert answer.finish_reasons == ["stop"]
    return json.loads(answer.text)


# -- what is asked, and of which model ---------------------------------------------------------------------


@honoured("model")
def model(ask):
    assert ask().body["model"] == "SmolLM2-135M-Instruct"
    error = ask.refusal(model="nope")
    assert (error.status_code, error.code, error.param) == (404, "model_not_found", "model")


@honoured("messages")
def messages(ask):
    question = {"role": "user", "content": "Say yes."}
    parts = {"role": "user", "content": [{"type": "text", "text": "Say yes."}]}
    short, same = ask(messages=[question]), ask(messages=[parts])
    assert short.text == same.text
    longer = ask(messages=[{"role": "system", "content": "Be kind. " * 10}, question])
    assert longer.prompt_tokens > short.prompt_tokens
    assert ask.refusal(messages=[]).param == "messages"


@honoured("prompt")
def prompt(ask):
    ids = ask(return_token_ids=True).choice["prompt_token_ids"]
    alone = ask().text
    assert ask(prompt=ids).text == alone
    batch = ask(prompt=["One two three", "The sea is blue, the sky is blue, and"])
    assert batch.texts[1] == alone and len(batch.texts) == 2
    assert ask(prompt=[ids, ids]).texts == [alone, alone]
    assert ask.refusal(prompt=[]).param == "prompt"


@honoured("truncate_prompt_tokens")
def truncate_prompt_tokens(ask):
    assert ask(truncate_prompt_tokens=4).prompt_tokens == 4
    assert ask().prompt_tokens > 4


@honoured("add_special_tokens")
def add_special_tokens(ask):
    # The default model has no BOS to add; what it does elsewhere is tested where a tokenizer has one.
    assert ask(add_special_tokens=False).text == ask(add_special_tokens=True).text
    assert ask.refusal(add_special_tokens="no").param == "add_special_tokens"


@honoured("add_generation_prompt", "continue_final_message")
def final_message(ask):
    begun = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "One, two,"}]
    cases = [{}, {"add_generation_prompt": False}, {"continue_final_message": True}]
    closed_and_opened, closed, continued = (ask(messages=begun, **case).prompt_tokens for case in cases)
    assert closed_and_opened > closed > continued
    error = ask.refusal(add_generation_prompt=True, continue_final_message=True)
    assert error.param == "continue_final_message"


@honoured("chat_template", "chat_template_kwargs")
def chat_template(ask):
    template = "{{ mark }}{{ messages[0].content }}"
    short = ask(chat_template=template, chat_template_kwargs={"mark": ""}).prompt_tokens
    assert ask(chat_template=template, chat_template_kwargs={"mark": " a" * 9}).prompt_tokens == short + 9
    assert ask.refusal(chat_template="{{ ''.__class__.__mro__ }}").status_code == 400


# -- tools and reasoning -----------------------------------------------------------------------------------

SIDES = {
    "type": "object",
    "properties": {"sides": {"enum": [6, 20]}},
    "required": ["sides"],
    "additionalProperties": False,
}
DIE = {"type": "function", "function": {"name": "throw_die", "parameters": SIDES}}


@honoured("tools", "tool_choice", "parallel_tool_calls")
def tools(ask):
    plain = ask()
    assert ask(tools=[DIE], tool_choice="none").prompt_tokens > plain.prompt_tokens
    assert ask(tools=[], tool_choice="auto").text == plain.text
    answer = ask(tools=[DIE], tool_choice="required", parallel_tool_calls=False, max_tokens=60)
    (call,) = answer.choice["message"]["tool_calls"]
    assert call["function"]["name"] == "throw_die" and answer.finish_reasons == ["tool_calls"]
    assert json.loads(call["function"]["arguments"])["sides"] in (6, 20)
    assert ask.refusal(tools=[DIE, DIE]).param == "tools[1].function.name"
    assert ask.refusal(tool_choice="required").param == "tool_choice"
    assert ask.refusal(tools=[DIE], parallel_tool_calls="no").param == "parallel_tool_calls"


@honoured("reasoning_effort")
def reasoning_effort(ask):
    # Templates decide what it does; the default model's ignores it.
    template = (
        "{{ messages[0].content }}{% if reasoning_effort == 'low' and enable_thinking %} a a a{% endif %}"
    )
    lengths = [ask(chat_template=template, reasoning_effort=each).prompt_tokens for each in ("high", "low")]
    assert lengths[1] == lengths[0] + 3
    assert ask(reasoning_effort="low").text == ask().text
    assert ask.refusal(reasoning_effort="enormous").param == "reasoning_effort"


@honoured("include_reasoning", "thinking_token_budget")
def reasoning(ask):
    # The default model marks no reasoning: there is none to leave out, and none that a budget could end.
    assert ask(include_reasoning=False, thinking_token_budget=-1).text == ask().text
    assert ask.refusal(include_reasoning="no").param == "include_reasoning"
    assert ask.refusal(thinking_token_budget=100).param == "thinking_token_budget"


# -- how many, and how long --------------------------------------------------------------------------------


@honoured("n")
def n(ask):
    answer = ask(n=3, temperature=1.5, seed=1)
    assert len(set(answer.texts)) == 3
    assert [choice["index"] for choice in answer.body["choices"]] == [0, 1, 2]
    assert ask.refusal(n=0).param == "n"


@honoured("best_of")
def best_of(ask):
    answer = ask(n=1, best_of=3, temperature=1, seed=1, ignore_eos=True)
    assert len(answer.texts) == 1 and answer.completion_tokens == 36
    assert ask.refusal(n=3, best_of=2).param == "best_of"


@honoured("max_tokens")
def max_tokens(ask):
    answer = ask(max_tokens=3)
    assert answer.completion_tokens == 3 and answer.finish_reasons == ["length"]
    assert ask.refusal(max_tokens=-1).param == "max_tokens"


@honoured("max_completion_tokens")
def max_completion_tokens(ask):
    assert ask(max_completion_tokens=3, max_tokens=5).completion_tokens == 3
    assert ask.refusal(max_completion_tokens=-1).param == "max_completion_tokens"


@honoured("min_tokens", "ignore_eos")
def endings(ask):
    only_eos = {"allowed_token_ids": [EOS, 5], "logit_bias": {str(EOS): 100}}
    assert ask(**only_eos).finish_reasons == ["stop"] and ask(**only_eos).text == ""
    assert ask(min_tokens=6, **only_eos).completion_tokens == 7
    assert ask(ignore_eos=True, **only_eos).completion_tokens == 12
    assert ask.refusal(min_tokens=99).param == "min_tokens"


@honoured("stop", "include_stop_str_in_output")
def stop(ask):
    whole = ask().text
    word = whole[5:9]
    for stream in (False, True):
        assert ask(stop=word, stream=stream).text == whole[: whole.index(word)]
        kept = ask(stop=["never so", word], include_stop_str_in_output=True, stream=stream)
        assert kept.text == whole[: whole.index(word)] + word
        assert kept.finish_reasons == ["stop"]
    assert ask(stop=word).choice["stop_reason"] == word
    assert ask.refusal(stop="").param == "stop"


@honoured("stop_token_ids")
def stop_token_ids(ask):
    ids = ask.ids()
    answer = ask(stop_token_ids=[ids[4]])
    assert answer.completion_tokens == ids.index(ids[4]) + 1
    assert answer.choice["stop_reason"] == ids[4]
    assert ask.refusal(stop_token_ids=[10**6]).param.startswith("stop_token_ids")


# -- sampling ----------------------------------------------------------------------------------------------


@honoured("temperature", "seed")
def temperature_and_seed(ask):
    hot = [ask(temperature=1.5, seed=seed).text for seed in (1, 1, 2)]
    assert hot[0] == hot[1] != hot[2]
    assert ask(temperature=0, seed=1).text == ask(temperature=0, seed=2).text
    assert ask.refusal(temperature=-1).param == "temperature"


@honoured("top_p", "top_k", "min_p")
def filters(ask):
    greedy, free = ask().text, ask(temperature=2, seed=1).text
    assert free != greedy
    for narrowest in ({"top_p": 1e-6}, {"top_k": 1}, {"min_p": 1}):
        assert ask(temperature=2, seed=1, **narrowest).text == greedy
    for name, bad in (("top_p", 1.5), ("top_k", -2), ("min_p", -0.1)):
        assert ask.refusal(**{name: bad}).param == name


@honoured("presence_penalty", "frequency_penalty", "repetition_penalty")
def penalties(ask):
    request = {**_with_prompt(ask, COUNTING), "max_tokens": 40, "ignore_eos": True}
    plain = len(set(ask.ids(**request)))
    for penalty in ({"presence_penalty": 2}, {"frequency_penalty": 2}, {"repetition_penalty": 1.8}):
        assert len(set(ask.ids(**request, **penalty))) > plain
    for name, bad in (("presence_penalty", 3), ("frequency_penalty", -3), ("repetition_penalty", 0)):
        assert ask.refusal(**{name: bad}).param == name


@honoured("logit_bias")
def logit_bias(ask):
    assert ask.ids(logit_bias={"500": 100}) == [500] * 12
    assert ask.refusal(logit_bias={"1000000": 1}).param.startswith("logit_bias")


@honoured("allowed_token_ids")
def allowed_token_ids(ask):
    assert set(ask.ids(allowed_token_ids=[500, 600])) <= {500, 600}
    assert ask.refusal(allowed_token_ids=[]).param == "allowed_token_ids"


@honoured("bad_words")
def bad_words(ask):
    whole = ask().text
    word = whole.split()[1]
    assert word not in ask(bad_words=[word]).text.split()
    assert ask.refusal(bad_words=[""]).param.startswith("bad_words")


@honoured("logits_processors", "vllm_xargs")
def logits_processors(ask):
    # A served model has those that its start registered: none here. What one does is tested with the engine.
    assert ask(logits_processors=[], vllm_xargs={"any": 1}).text == ask().text
    assert "nope" in ask.refusal(logits_processors=["nope"]).body["message"]
    assert ask.refusal(vllm_xargs=[]).param == "vllm_xargs"


@honoured("use_beam_search", "length_penalty", "early_stopping")
def beams(ask):
    request = {"n": 3, "use_beam_search": True, "max_tokens": 6}
    answer = ask(**request, length_penalty=1.2, early_stopping=True)
    assert len(set(answer.texts)) == 3
    assert ask.refusal(length_penalty=1.2).param == "length_penalty"
    assert ask.refusal(early_stopping=True).param == "early_stopping"
    assert ask.refusal(**request, stream=True).param == "stream"


# -- constraints -------------------------------------------------------------------------------------------


@honoured("response_format")
def response_format(ask):
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    person = _finished_json(ask(response_format=schema, max_tokens=80))
    assert set(person) == {"name", "age"} and isinstance(person["age"], int)
    assert ask(response_format={"type": "text"}).text == ask().text
    assert ask.refusal(response_format={"type": "json_schema"}).param == "response_format"


@honoured("structured_outputs")
def structured_outputs(ask):
    assert ask(structured_outputs={"choice": ["漢字 😀"]}, max_tokens=40).text == "漢字 😀"
    assert ask(structured_outputs={"regex": "ABCDEFGHIJ!"}, max_tokens=40).text == "ABCDEFGHIJ!"
    assert ask.refusal(structured_outputs={"regex": "["}).param == "structured_outputs"


@honoured("guided_json", "guided_whitespace_pattern")
def guided_json(ask):
    answer = ask(guided_json=PERSON, guided_whitespace_pattern=" ?", max_tokens=80)
    assert set(_finished_json(answer)) == {"name", "age"} and "\n" not in answer.text
    assert ask.refusal(guided_whitespace_pattern=" ").param == "guided_whitespace_pattern"
    assert ask.refusal(guided_json={"type": "objekt"}).param == "guided_json"


@honoured("guided_regex", "guided_choice", "guided_grammar")
def guided(ask):
    assert ask(guided_regex="[0-9]{5}", max_tokens=20).text.isdigit()
    assert ask(guided_choice=["yes", "no"]).text in ("yes", "no")
    assert ask(guided_grammar='start: "a" "b"').text == "ab"
    for name, bad in (("guided_regex", "["), ("guided_choice", []), ("guided_grammar", "start: nope")):
        assert ask.refusal(**{name: bad}).param == name


# -- what is shown -----------------------------------------------------------------------------------------


@honoured("skip_special_tokens", "spaces_between_special_tokens")
def special_tokens(ask):
    forced = {"logit_bias": {str(START_OF_MESSAGE): 100}, "max_tokens": 2}
    assert ask(**forced).text == ""
    for spaces in (True, False):
        shown = ask(**forced, skip_special_tokens=False, spaces_between_special_tokens=spaces)
        assert shown.text == "<|im_start|><|im_start|>"


@honoured("logprobs", "top_logprobs")
def logprobs(ask):
    assert ask().choice["logprobs"] is None
    if not ask.is_chat:
        answer = ask(logprobs=2, max_tokens=3)
        shown = answer.choice["logprobs"]
        assert "".join(shown["tokens"]) == answer.text and shown["text_offset"][0] == 0
        assert all(len(top) == 2 for top in shown["top_logprobs"])
        assert ask.refusal(logprobs=21).param == "logprobs"
        return
    answer = ask(logprobs=True, top_logprobs=2, max_tokens=3)
    content = answer.choice["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == answer.text
    assert all(len(entry["top_logprobs"]) == 2 and entry["logprob"] <= 0 for entry in content)
    assert ask(logprobs=True).choice["logprobs"]["content"][0]["top_logprobs"] == []
    assert ask.refusal(top_logprobs=2).param == "top_logprobs"
    assert ask.refusal(logprobs=True, top_logprobs=21).param == "top_logprobs"


@honoured("prompt_logprobs")
def prompt_logprobs(ask):
    answer = ask(prompt_logprobs=1, max_tokens=1)
    entries = answer.body["prompt_logprobs"] if ask.is_chat else answer.choice["prompt_logprobs"]
    assert len(entries) == answer.prompt_tokens and entries[0] is None
    assert ask.refusal(prompt_logprobs=1, stream=True).param == "prompt_logprobs"


@honoured("echo")
def echo(ask):
    text = "The sea is blue, the sky is blue, and"
    assert ask(echo=True).text == text + ask().text
    scored = ask(echo=True, max_tokens=0, logprobs=1)
    assert scored.text == text and scored.completion_tokens == 0
    assert len(scored.choice["logprobs"]["tokens"]) == scored.prompt_tokens


@honoured("suffix")
def suffix(ask):
    # The default model was not trained to fill in the middle: it says so, and an empty suffix asks nothing.
    assert ask.refusal(suffix="the end").param == "suffix"
    assert ask(suffix="").text == ask().text


@honoured("return_token_ids", "return_tokens_as_token_ids")
def token_ids(ask):
    logprobs = {"logprobs": True} if ask.is_chat else {"logprobs": 0}
    answer = ask(return_token_ids=True, return_tokens_as_token_ids=True, **logprobs)
    ids = answer.choice["token_ids"]
    prompt = answer.body["prompt_token_ids"] if ask.is_chat else answer.choice["prompt_token_ids"]
    assert len(ids) == answer.completion_tokens and len(prompt) == answer.prompt_tokens
    assert answer.logprob_tokens == [f"token_id:{token_id}" for token_id in ids]


# -- how it is served --------------------------------------------------------------------------------------


@honoured("stream", "stream_options")
def stream(ask):
    whole = ask()
    streamed = ask(stream=True, stream_options={"include_usage": True})
    assert streamed.texts == whole.texts and streamed.finish_reasons == whole.finish_reasons
    assert streamed.body["choices"] == [] and streamed.body["usage"] == whole.body["usage"]
    assert len(streamed.chunks) > 5
    running = ask(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [chunk["usage"]["completion_tokens"] for chunk in running.chunks]
    assert counts == sorted(counts) and counts[-1] == whole.completion_tokens
    assert all(chunk["usage"] is None for chunk in ask(stream=True).chunks)
    assert ask.refusal(stream_options={"include_usage": True}).param == "stream_options"


@honoured("cache_salt")
def cache_salt(ask):
    request = _with_prompt(ask, f"A prompt of several blocks on {ask.route}: " + "word " * 64)
    cached = [ask(**request, cache_salt=salt).cached_tokens for salt in ("one", "one", "two")]
    assert cached[0] == cached[2] == 0 < cached[1] < ask(**request).prompt_tokens
    assert ask.refusal(cache_salt="").param == "cache_salt"


@honoured("priority")
def priority(ask):
    # Without effect under the default policy; that it decides under the other is the scheduler's test.
    assert ask(priority=-5).text == ask(priority=5).text == ask(priority=NOT_GIVEN).text
    assert ask.refusal(priority=2**70).param == "priority"
