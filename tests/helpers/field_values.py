"""A realistic value of each field, as a program written for OpenAI or vLLM sends it."""

from __future__ import annotations

from typing import Any

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}

REFUSED: dict[str, Any] = {
    "add_special_tokens": True,
    "audio": {"voice": "alloy", "format": "wav"},
    "chat_template": "{{ messages }}",
    "documents": [{"title": "a", "text": "b"}],
    "ec_transfer_params": {"a": 1},
    "echo": True,
    "function_call": {"name": "f"},
    "functions": [TOOL["function"]],
    "include_reasoning": False,
    "kv_transfer_params": {"do_remote_decode": True},
    "logprob_token_ids": [5],
    "media_io_kwargs": {"video": {"num_frames": 4}},
    "mm_processor_kwargs": {"num_crops": 4},
    "modalities": ["text", "audio"],
    "parallel_tool_calls": "sometimes",
    "prompt_embeds": "AAAA",
    "reasoning_effort": "low",
    "repetition_detection": {"max_pattern_size": 4, "min_count": 2},
    "return_prompt_text": True,
    "return_token_offsets": True,
    "routed_experts_prompt_start": 0,
    "stream_interval": 4,
    "suffix": "the end",
    "thinking_token_budget": 100,
    "tool_choice": "required",
    "tools": [TOOL],
    "truncation_side": "right",
    "verbosity": "low",
    "watermarking": True,
    "web_search_options": {},
}

IGNORED: dict[str, Any] = {
    "guided_decoding_backend": "xgrammar",
    "metadata": {"run": "7"},
    "prediction": {"type": "content", "content": "The sea"},
    "prompt_cache_key": "key",
    "prompt_cache_retention": "24h",
    "request_id": "mine",
    "safety_identifier": "someone",
    "service_tier": "auto",
    "session_id": "mine",
    "store": False,
    "user": "someone",
}

ACCEPTED: dict[str, Any] = {
    "add_generation_prompt": True,
    "add_special_tokens": True,
    "allowed_token_ids": [500, 600],
    "bad_words": ["blue"],
    "best_of": 1,
    "cache_salt": "mine",
    "chat_template": "{{ messages[0].content }}",
    "chat_template_kwargs": {"enable_thinking": False},
    "continue_final_message": False,
    "early_stopping": False,
    "echo": True,
    "frequency_penalty": 0.5,
    "guided_choice": ["yes", "no"],
    "guided_grammar": 'start: "a"',
    "guided_json": {"type": "integer"},
    "guided_regex": "[a-z]+",
    "guided_whitespace_pattern": " ?",
    "ignore_eos": True,
    "include_reasoning": False,
    "include_stop_str_in_output": True,
    "length_penalty": 1,
    "logit_bias": {"500": 5},
    "logits_processors": [],
    "max_completion_tokens": 2,
    "max_tokens": 2,
    "min_p": 0.1,
    "min_tokens": 1,
    "model": "SmolLM2-135M-Instruct",
    "n": 2,
    "parallel_tool_calls": False,
    "presence_penalty": 0.5,
    "priority": 1,
    "prompt_logprobs": 1,
    "reasoning_effort": "low",
    "repetition_penalty": 1.1,
    "response_format": {"type": "json_object"},
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "seed": 7,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "stop": ["\n"],
    "stop_token_ids": [5],
    "stream": True,
    "stream_options": {"include_usage": True},
    "structured_outputs": {"choice": ["yes"]},
    "suffix": "",
    "temperature": 0.5,
    "thinking_token_budget": -1,
    "tool_choice": "auto",
    "tools": [TOOL],
    "top_k": 5,
    "top_logprobs": 0,
    "top_p": 0.9,
    "truncate_prompt_tokens": 8,
    "use_beam_search": True,
    "vllm_xargs": {"a": 1},
}
"""Of honoured fields; ``messages``, ``prompt`` and ``logprobs`` differ between the routes."""

GOES_WITH: dict[str, dict[str, Any]] = {
    "guided_whitespace_pattern": {"guided_json": {"type": "integer"}},
    "stream_options": {"stream": True},
}
"""What an accepted field needs beside it."""


def accepted_fields(route: str, name: str, request: dict[str, Any]) -> dict[str, Any]:
    """A request's fields with an honoured one set; ``request`` has those that are required."""
    if name in request:
        value = request[name]
    elif name == "logprobs":
        value = True if route == "chat" else 1
    else:
        value = ACCEPTED[name]
    return {**request, **GOES_WITH.get(name, {}), name: value}
