"""The load generator's client: one request at a time over httpx, timed at its server-sent events, and many of
them at once, in a closed loop or at given arrival times. Works against any OpenAI-compatible server.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx
import orjson

from streamllm.bench.prompts import WORDS, Request, TokensPerWord
from streamllm.http_transport import LeanTransport

Outcome = TypeVar("Outcome")

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
_GAUGE_LINE = re.compile(rf"^(?:streamllm|vllm):({'|'.join(GAUGES)})(?:\{{.*\}})?\s+(\S+)", re.MULTILINE)


class RequestFailure(Exception):
    """Why a request failed: a short ``kind`` to count by, and the details in the server's words."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}" if message else kind)
        self.kind = kind
        self.message = message


@dataclass(slots=True)
class Result:
    """What came back for one request. Times are in seconds of one monotonic clock.

    Attributes:
        index: the request's number.
        due: when it was to be sent, from the start of the load; every latency counts from here, so that a
            generator held up by a slow server does not hide the wait.
        text: the generated text (reasoning included).
        prompt_tokens, completion_tokens: from the server's usage; ``None`` where it reports none.
        num_chunks: events that carried text; stands in for ``completion_tokens`` where that is missing.
        ttft: until the first text, ``None`` if there was none.
        itls: gaps between successive events with text.
        e2e: until the stream's end.
        finish_reason: as sent.
        error: ``None`` for a request that succeeded.
    """

    index: int
    due: float
    text: str = ""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    num_chunks: int = 0
    ttft: float | None = None
    itls: list[float] = field(default_factory=list)
    e2e: float = 0.0
    finish_reason: str | None = None
    error: RequestFailure | None = None

    @property
    def output_tokens(self) -> int:
        return self.num_chunks if self.completion_tokens is None else self.completion_tokens

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first: (e2e - ttft) / (tokens - 1)."""
        if self.ttft is None or self.output_tokens < 2:
            return None
        return (self.e2e - self.ttft) / (self.output_tokens - 1)

    def take(self, body: dict[str, Any]) -> str:
        """Add what one event, or one whole answer, says; returns its text."""
        if usage := body.get("usage"):
            self.prompt_tokens = usage.get("prompt_tokens")
            self.completion_tokens = usage.get("completion_tokens")
        new_text = ""
        for choice in body.get("choices") or ():
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            part = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
            new_text += (part.get("reasoning_content") or "") + (part.get("content") or "")
        self.text += new_text
        return new_text


class Client:
    """Sends requests to one server.

    Args:
        base_url: the server's address, with or without ``/v1``.
        model: the model to ask for; ``None`` takes the first one that the server lists.
        endpoint: ``"completions"`` or ``"chat"``.
        path: where the endpoint is, if not at OpenAI's path.
        api_key: sent as a bearer token.
        headers: sent with every request.
        temperature: 0 is greedy.
        ignore_eos: ask for exactly ``max_tokens`` tokens (an extension of vLLM's that OpenAI itself refuses).
        extra_body: further fields of every request; they win over the client's own.
        request_id_prefix: with it each request has the header ``X-Request-Id``: the prefix and its index.
        timeout: seconds that one whole request may take.
    """

    def __init__(
        self,
        base_url: str,
        *,
        model: str | None = None,
        endpoint: str = "completions",
        path: str | None = None,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        temperature: float = 0.0,
        ignore_eos: bool = True,
        extra_body: Mapping[str, Any] | None = None,
        request_id_prefix: str | None = None,
        timeout: float = 600.0,
    ) -> None:
        self.model = model
        self.endpoint = endpoint
        self.path = path or PATHS[endpoint]
        self.timeout = timeout
        self._request_id_prefix = request_id_prefix
        self._options: dict[str, Any] = {"temperature": temperature}
        if ignore_eos:
            self._options["ignore_eos"] = True
        self._options |= extra_body or {}
        url = base_url.rstrip("/").removesuffix("/v1")
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={**({"Authorization": f"Bearer {api_key}"} if api_key else {}), **(headers or {})},
            # No pool limit: how many requests run at once is the load's decision alone.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            transport=LeanTransport() if url.startswith("http://") else None,
            timeout=timeout,
        )

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._http.aclose()

    async def find_model(self) -> str:
        """The model in use, asked of ``/v1/models`` if none was named. Raises :class:`RequestFailure`."""
        if self.model is None:
            models = _parse((await self._get("/v1/models")).content).get("data")
            if not models:
                raise RequestFailure("no model", "the server lists none; name one with --model")
            self.model = models[0]["id"]
        return self.model

    async def gauges(self) -> dict[str, float]:
        """The server's :data:`GAUGES`, each summed over its series; raises :class:`RequestFailure` if one is
        missing."""
        values: dict[str, float] = {}
        for name, value in _GAUGE_LINE.findall((await self._get("/metrics")).text):
            values[name] = values.get(name, 0.0) + float(value)
        if missing := [name for name in GAUGES if name not in values]:
            raise RequestFailure("no metrics", f"/metrics does not report {', '.join(missing)}")
        return values

    async def complete(self, request: Request) -> Result:
        """Send ``request`` without streaming. Never raises for the server's faults: see ``Result.error``."""

        async def receive(result: Result) -> None:
            response = await self._http.post(self.path, json=self._body(request))
            _raise_for_status(response)
            result.take(_parse(response.content))

        return await self._timed(request, 0.0, time.perf_counter(), receive)

    async def stream(self, request: Request, *, due: float, load_start: float) -> Result:
        """Send ``request`` streaming and time its events. ``due`` is in seconds after ``load_start``, a
        reading of ``time.perf_counter()``. Never raises for the server's faults: see ``Result.error``."""
        body = self._body(request) | {"stream": True, "stream_options": {"include_usage": True}}
        prefix = self._request_id_prefix
        headers = None if prefix is None else {"X-Request-Id": f"{prefix}{request.index}"}

        async def receive(result: Result) -> None:
            async with self._http.stream("POST", self.path, json=body, headers=headers) as response:
                if response.status_code != 200:
                    await response.aread()
                    _raise_for_status(response)
                await self._receive_events(response, result, load_start + due)

        return await self._timed(request, due, load_start + due, receive)

    async def _receive_events(self, response: httpx.Response, result: Result, sent: float) -> None:
        last = None
        async for data in sse_data(response.aiter_raw()):
            if data == b"[DONE]":
                break
            event = _parse(data)
            if error := event.get("error"):
                raise RequestFailure("error event", error_message(error))
            if not result.take(event):
                continue
            now = time.perf_counter()
            result.num_chunks += 1
            if last is None:
                result.ttft = now - sent
            else:
                result.itls.append(now - last)
            last = now
        if result.finish_reason is None:
            raise RequestFailure("stream cut short", "it ended without a finish_reason")

    async def _timed(
        self, request: Request, due: float, sent: float, receive: Callable[[Result], Any]
    ) -> Result:
        result = Result(request.index, due)
        try:
            await asyncio.wait_for(receive(result), self.timeout)
        except RequestFailure as failure:
            result.error = failure
        except (asyncio.TimeoutError, httpx.TimeoutException):
            result.error = RequestFailure("timeout", f"not finished after {self.timeout:g} s")
        except httpx.HTTPError as error:
            result.error = _transport_failure(error)
        except (AttributeError, TypeError) as error:  # JSON, but not in OpenAI's shape
            result.error = RequestFailure("unexpected answer", str(error))
        result.e2e = time.perf_counter() - sent
        return result

    def _body(self, request: Request) -> dict[str, Any]:
        prompt: dict[str, Any] = {"prompt": request.prompt}
        if self.endpoint == "chat":
            prompt = {"messages": [{"role": "user", "content": request.prompt}]}
        return {"model": self.model, **prompt, "max_tokens": request.max_tokens, **self._options}

    async def _get(self, path: str) -> httpx.Response:
        try:
            response = await self._http.get(path, timeout=10.0)
        except httpx.HTTPError as error:
            raise _transport_failure(error) from error
        _raise_for_status(response)
        return response


async def calibrate(client: Client, input_len: int, seed: int) -> TokensPerWord:
    """Ask the server how it counts a short prompt and one of about ``input_len`` tokens; where it reports no
    usage, one token a word is assumed. Raises :class:`RequestFailure`."""
    rng = random.Random(f"probes {seed}")
    probes = []
    for num_words in (4, max(input_len, 8)):
        prompt = " ".join(rng.choices(WORDS, k=num_words))
        result = await client.complete(Request(index=0, prompt=prompt, max_tokens=1))
        if result.error is not None:
            raise result.error
        if result.prompt_tokens is None:
            return TokensPerWord()
        probes.append((num_words, result.prompt_tokens))
    return TokensPerWord.from_probes(*probes)


async def sse_data(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The ``data`` of each server-sent event, one line each as OpenAI's streams have it; comments and other
    fields are skipped. Lines end at ``\\n`` or ``\\r\\n`` only: text may hold U+2028 and its like, at which
    httpx's own line iterator would cut."""
    rest = b""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


async def run_load(
    client: Client,
    requests: Sequence[Request],
    *,
    concurrency: int | None,
    arrivals: Sequence[float] | None = None,
    on_result: Callable[[Result], None] = lambda result: None,
) -> tuple[list[Result], float]:
    """Send all requests streaming, at most ``concurrency`` at once (``None``: no limit).

    Without ``arrivals`` a closed loop: the next request leaves when one ends. With them an open loop: request
    ``i`` is due ``arrivals[i]`` seconds after the start; one that must wait for a free slot counts its wait.

    Returns the results in the order of the requests, and the seconds from the first sending to the last end.
    """
    results: list[Result | None] = [None] * len(requests)
    queue = iter(range(len(requests)))
    start = time.perf_counter()

    async def worker() -> None:
        for position in queue:
            now = time.perf_counter() - start
            due = now if arrivals is None else arrivals[position]
            if due > now:
                await asyncio.sleep(due - now)
            result = await client.stream(requests[position], due=due, load_start=start)
            results[position] = result
            on_result(result)

    num_workers = min(concurrency or len(requests), len(requests))
    await asyncio.gather(*(worker() for _ in range(num_workers)))
    return [result for result in results if result is not None], time.perf_counter() - start


def run_lean(main: Coroutine[Any, Any, Outcome]) -> Outcome:
    """``asyncio.run``, on uvloop where it is installed: its loop takes less from the server beside it."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)


def error_message(error: Any) -> str:
    """The message inside OpenAI's error shape, or the thing itself."""
    return str(error["message"] if isinstance(error, dict) and "message" in error else error)


def _parse(data: bytes) -> dict[str, Any]:
    try:
        body = orjson.loads(data)
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise RequestFailure("not JSON", data[:200].decode(errors="replace"))
    return body


def _raise_for_status(response: httpx.Response) -> None:
    if response.status_code == 200:
        return
    try:
        body = response.json()
    except ValueError:
        body = response.text[:200]
    error = body.get("error", body) if isinstance(body, dict) else body
    raise RequestFailure(f"HTTP {response.status_code}", error_message(error))


def _transport_failure(error: httpx.HTTPError) -> RequestFailure:
    if isinstance(error, httpx.TimeoutException):
        return RequestFailure("timeout", type(error).__name__)
    if isinstance(error, httpx.ConnectError):
        return RequestFailure("cannot connect", str(error))
    return RequestFailure("connection broken", str(error) or type(error).__name__)
