"""What the tests of files and batches share: OpenAI's client, files of lines, waiting for a batch's end."""

from __future__ import annotations

import json
import time
from typing import Any

import openai
from serving import MODEL

CHAT = "/v1/chat/completions"
ENDED = ("completed", "failed", "expired", "cancelled")


def client_of(url: str, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=url + "/v1", api_key=key, max_retries=0)


def chat_line(custom_id: str, **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": custom_id}], **fields}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body}


def jsonl(lines: list[Any]) -> bytes:
    """Lines as a file; text stays as it is."""
    return b"".join((line if isinstance(line, str) else json.dumps(line)).encode() + b"\n" for line in lines)


def store(client: openai.OpenAI, lines: list[Any]) -> str:
    return client.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch").id


def begin(client: openai.OpenAI, lines: list[Any], endpoint: str = CHAT, **fields: Any) -> Any:
    fields = {"completion_window": "24h", **fields}
    return client.batches.create(input_file_id=store(client, lines), endpoint=endpoint, **fields)


def wait_for_end(client: openai.OpenAI, batch_id: str, timeout: float = 20.0) -> Any:
    deadline = time.monotonic() + timeout
    while (batch := client.batches.retrieve(batch_id)).status not in ENDED:
        assert time.monotonic() < deadline, batch
        time.sleep(0.02)
    return batch


def content(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    """The lines of a file of results; none if there is no file."""
    if file_id is None:
        return []
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]
