"""Errors as an HTTP status and one sentence."""

from __future__ import annotations

import logging
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.dependencies.models import Dependant
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from kedge.errors import ConfigError, GalleryError, ImageError, KedgeError

__all__ = ["RETRY_SECONDS", "Refused", "answer_errors", "error_response", "refuse_unknown_parameters"]

RETRY_SECONDS = 1
_log = logging.getLogger(__name__)


class Refused(Exception):
    """A request that is refused, with the status and the sentence to answer."""

    def __init__(self, status: HTTPStatus, sentence: str) -> None:
        super().__init__(sentence)
        self.status, self.sentence = status, sentence


async def refuse_unknown_parameters(request: Request) -> None:
    """Refuse query parameters that the endpoint does not have: a misspelt one would silently change nothing."""
    parameters = _parameters(request.scope["route"].dependant)
    for name in request.query_params:
        if name not in parameters:
            takes = f"this takes {', '.join(parameters)}" if parameters else "this takes none"
            raise Refused(HTTPStatus.UNPROCESSABLE_ENTITY, f"There is no parameter {name[:50]!r}: {takes}.")


def _parameters(dependant: Dependant) -> list[str]:
    own = [field.alias for field in dependant.query_params]
    return own + [name for part in dependant.dependencies for name in _parameters(part)]


def error_response(status: int, sentence: str) -> JSONResponse:
    """An error as JSON, with the headers that its status asks for."""
    headers = {}
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        headers["Retry-After"] = str(RETRY_SECONDS)
    if status == HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse({"error": sentence}, status, headers)


def answer_errors(app: FastAPI) -> None:
    """Register handlers that turn every error into one sentence."""

    @app.exception_handler(Refused)
    async def refused(request: Request, error: Refused) -> JSONResponse:
        del request
        return error_response(error.status, error.sentence)

    @app.exception_handler(KedgeError)
    async def expected(request: Request, error: KedgeError) -> JSONResponse:
        if isinstance(error, ImageError):
            return error_response(HTTPStatus.UNPROCESSABLE_ENTITY, str(error))
        # Other errors name files, which are nobody's business.
        if isinstance(error, ConfigError):
            return error_response(HTTPStatus.UNPROCESSABLE_ENTITY, "This gallery cannot be asked for that.")
        _log.error("%s %s: %s", request.method, request.url.path[:200], error)
        busy = isinstance(error, GalleryError)
        sentence = "The gallery cannot be used at the moment: try again." if busy else "The server failed: try again."
        return error_response(HTTPStatus.SERVICE_UNAVAILABLE, sentence)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        del request
        first = error.errors()[0]
        return error_response(HTTPStatus.UNPROCESSABLE_ENTITY, f"{first['loc'][-1]}: {first['msg']}.")

    @app.exception_handler(HTTPException)
    async def other(request: Request, error: HTTPException) -> JSONResponse:
        answer = error_response(error.status_code, _status_sentence(error.status_code, request))
        answer.headers.update(error.headers or {})
        return answer


def _status_sentence(status: int, request: Request) -> str:
    if status == HTTPStatus.NOT_FOUND:
        return f"There is nothing at {request.url.path[:200]}."
    if status == HTTPStatus.METHOD_NOT_ALLOWED:
        return f"{request.method} cannot be done here."
    return f"{HTTPStatus(status).phrase}."
