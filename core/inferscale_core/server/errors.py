"""Errors of the memory API and their HTTP form, OpenAI's: ``{"error": {...}}``."""

import logging
import math
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import ValidationError

from inferscale_core.encoding.template import TemplateError
from inferscale_core.facts.errors import (
    EmbedderError,
    FactError,
    FilterError,
    IdConflictError,
    StoreError,
)

logger = logging.getLogger(__name__)


class APIError(Exception):
    """An error with an HTTP status. ``retry_after`` in seconds becomes a header."""

    status = HTTPStatus.INTERNAL_SERVER_ERROR
    kind = "InternalServerError"

    def __init__(
        self, message: str, *, param: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after = retry_after


class BadRequestError(APIError):
    """The request cannot be served as it is."""

    status = HTTPStatus.BAD_REQUEST
    kind = "BadRequestError"


class ScopeError(BadRequestError):
    """No scope where one is needed, or one that is not valid."""

    kind = "ScopeError"


class NotFoundError(APIError):
    """No such fact, or none that the scope may see: the two look the same from outside."""

    status = HTTPStatus.NOT_FOUND
    kind = "NotFoundError"


class ConflictError(APIError):
    """The id belongs to a fact of another scope."""

    status = HTTPStatus.CONFLICT
    kind = "ConflictError"


class QueueFullError(APIError):
    """More facts wait to be encoded than the core takes."""

    status = HTTPStatus.TOO_MANY_REQUESTS
    kind = "RateLimitError"


class UnavailableError(APIError):
    """Something behind the API does not answer for now."""

    status = HTTPStatus.SERVICE_UNAVAILABLE
    kind = "ServiceUnavailableError"


def scope_error(error: ValidationError) -> ScopeError:
    """What is wrong with scope fields, without pydantic's preamble."""
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    message = str(first["msg"]).removeprefix("Value error, ")
    return ScopeError(f"{place}: {message}" if place else message, param=place or "scope")


def as_api_error(error: Exception) -> APIError:
    """The API's form of an error of the store, the embedder or the template."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, IdConflictError):
        return ConflictError(str(error), param="id")
    if isinstance(error, FactError | FilterError | TemplateError):
        return BadRequestError(str(error))
    if isinstance(error, StoreError | EmbedderError):
        logger.error("the request could not be served: %s", error)
        return UnavailableError(str(error), retry_after=1)
    raise error


def error_response(error: APIError) -> JSONResponse:
    """The HTTP answer of an error."""
    headers = {}
    if error.retry_after is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after)))
    body: dict[str, Any] = {
        "message": error.message,
        "type": error.kind,
        "param": error.param,
        "code": int(error.status),
    }
    return JSONResponse({"error": body}, status_code=int(error.status), headers=headers)


async def _answer(_request: Request, error: Exception) -> JSONResponse:
    return error_response(as_api_error(error))


def add_handlers(app: FastAPI) -> None:
    """Answer these errors on every route of ``app``; more specific than vLLM's own handlers."""
    kinds = (APIError, StoreError, FilterError, EmbedderError, TemplateError)
    for kind in (*kinds, FactError, IdConflictError):
        app.add_exception_handler(kind, _answer)
