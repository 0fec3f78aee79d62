"""Errors of the client, each of one kind, with what was wrong and what to do in the message."""

# The names say what happened; "Error" at the end of each would add nothing.
# ruff: noqa: N818

from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = [
    "AddressInUse", "BadRequest", "Conflict", "ConnectionFailed", "InferScaleError",
    "ModelNotFound", "NotEnoughMemory", "NotFound", "RateLimited", "ScopeError", "ServerError",
    "StartupError", "StoreLocked", "Timeout", "UnsupportedArchitecture", "error_from_response",
]  # fmt: skip


class InferScaleError(Exception):
    """Base of every error of the client.

    ``status`` is the HTTP status, ``code`` and ``param`` come from the error body; all are None
    for an error that did not come from a server.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        code: str | None = None,
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code
        self.param = param


class ConnectionFailed(InferScaleError, ConnectionError):
    """No core answers at the address, or the connection broke before an answer came."""


class Timeout(InferScaleError, TimeoutError):
    """No answer within the time allowed; the core may still be working on the request."""


class BadRequest(InferScaleError, ValueError):
    """The request cannot be served as it is (4xx)."""


class ScopeError(BadRequest):
    """The operation names no scope, or one that it must not have."""


class NotFound(InferScaleError, LookupError):
    """No fact, collection or model of that name within the scope (404)."""


class Conflict(InferScaleError):
    """The id is taken by a fact of another scope (409)."""


class RateLimited(InferScaleError):
    """The core is taking no more for now (429); ``retry_after`` in seconds when it said so."""

    retry_after: float | None = None


class ServerError(InferScaleError):
    """The core failed to serve a request (5xx)."""


class StartupError(InferScaleError):
    """A private core did not start. ``log`` is its log file, ``tail`` the last lines of it."""

    def __init__(self, message: str, *, log: Path | None = None, tail: str = "") -> None:
        text = message
        if log is not None:
            text += f"\nLog: {log}"
        if tail:
            text += "\nLast lines:\n" + "\n".join(f"  {line}" for line in tail.splitlines())
        super().__init__(text)
        self.log = log
        self.tail = tail


class ModelNotFound(StartupError):
    """The model is neither a directory nor on the hub."""


class NotEnoughMemory(StartupError):
    """The model, its KV cache and the arena do not fit in the memory that is free."""


class UnsupportedArchitecture(StartupError):
    """vLLM or InferScale cannot serve this kind of model."""


class AddressInUse(StartupError):
    """The port or socket is taken by another process."""


class StoreLocked(StartupError):
    """The fact store is in use by another core."""


_BY_STATUS: dict[int, type[InferScaleError]] = {
    404: NotFound,
    408: Timeout,
    409: Conflict,
    429: RateLimited,
    504: Timeout,
}


def _error_fields(body: Any, fallback: str) -> tuple[str, str, str | None, str]:
    """``(message, code, param, type)`` of an OpenAI error body, or of FastAPI's ``detail``."""
    if isinstance(body, Mapping):
        error = body.get("error", body)
        if isinstance(error, Mapping):
            message = error.get("message") or error.get("detail") or fallback
            return (
                str(message),
                str(error.get("code") or ""),
                None if error.get("param") is None else str(error["param"]),
                str(error.get("type") or ""),
            )
        if error:
            return str(error), "", None, ""
    return fallback, "", None, ""


def error_from_response(
    status: int, body: Any, *, retry_after: float | None = None
) -> InferScaleError:
    """The typed error of an HTTP answer.

    Args:
        status: HTTP status, 400 or more.
        body: decoded JSON (``{"error": {"message", "type", "param", "code"}}``) or plain text.
        retry_after: seconds, from the header of that name.
    """
    text = body if isinstance(body, str) and body.strip() else f"HTTP status {status}"
    message, code, param, kind = _error_fields(body, text)
    cls = _BY_STATUS.get(status)
    if cls is None:
        cls = ServerError if status >= 500 else BadRequest
    if cls is BadRequest and "scope" in f"{code} {kind} {param or ''}".lower():
        cls = ScopeError
    error = cls(message, status=status, code=code or None, param=param)
    if isinstance(error, RateLimited):
        error.retry_after = retry_after
    return error
