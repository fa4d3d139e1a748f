"""The errors that streamllm raises on purpose.

Everything a user can cause has a class here, so that each API (HTTP, Python, command line) can report it in
its own form. Anything else that escapes is a bug.
"""

from __future__ import annotations


class StreamLLMError(Exception):
    """Base of every error that streamllm raises on purpose. Its text is one line that a user can act on."""


class InvalidRequestError(StreamLLMError, ValueError):
    """A request that can never be served as written.

    Over HTTP it becomes a 400 in OpenAI's shape (or ``status``); offline it is a ``ValueError``.

    Args:
        message: one sentence that names the field, what is wrong and what is allowed.
        param: the field's name as the client wrote it (``"temperature"``, ``"messages[1].content"``).
        code: OpenAI's machine-readable code where it has one (``"context_length_exceeded"``).
        status: the HTTP status.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400):
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.status = status

    def renamed(self, field: str) -> InvalidRequestError:
        """The same error about ``field``, as which the client knows ``param``."""
        message = self.message.replace(self.param, field, 1) if self.param else self.message
        return InvalidRequestError(message, param=field, code=self.code, status=self.status)

    def at_index(self, param: str, index: int) -> InvalidRequestError:
        """The same error about one of several: ``param`` becomes ``param[index]``."""
        place = f"{param}[{index}]"
        known = self.param
        renamed = known.replace(param, place, 1) if known and known.startswith(param) else known
        return InvalidRequestError(
            f"{place}: {self.message}", param=renamed, code=self.code, status=self.status
        )


class QueueFullError(InvalidRequestError):
    """The queue's cap is reached: the same request may be served later (HTTP 429)."""

    def __init__(self, message: str):
        super().__init__(message, code="queue_full", status=429)


class ConfigError(StreamLLMError):
    """A flag or keyword argument that cannot be honoured. The command line prints it and exits with 2."""


class ModelLoadError(StreamLLMError):
    """A model that cannot be found, fetched, read or run. The command line prints it and exits with 1."""


class EngineDeadError(StreamLLMError):
    """The engine has stopped and serves no more requests (HTTP 503)."""


class RequestFailedError(StreamLLMError):
    """One request failed after admission, by no fault of its client (HTTP 500, or an error event)."""
