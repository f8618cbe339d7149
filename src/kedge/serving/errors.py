"""Errors as an HTTP status and one sentence: the server raises Starlette's `HTTPException` with that sentence."""

from __future__ import annotations

import logging
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.dependencies.utils import get_flat_params
from fastapi.exceptions import RequestValidationError
from fastapi.params import Query
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from kedge.errors import ConfigError, GalleryError, ImageError, KedgeError

__all__ = ["answer_errors", "error_response", "refuse_unknown_parameters"]

_HEADERS = {HTTPStatus.TOO_MANY_REQUESTS: {"Retry-After": "1"}, HTTPStatus.UNAUTHORIZED: {"WWW-Authenticate": "Bearer"}}
_log = logging.getLogger(__name__)


async def refuse_unknown_parameters(request: Request) -> None:
    """Refuse query parameters that the endpoint does not have: a misspelt one would silently change nothing."""
    fields = get_flat_params(request.scope["route"].dependant)
    parameters = [field.alias for field in fields if isinstance(field.field_info, Query)]
    for name in request.query_params:
        if name not in parameters:
            takes = f"this takes {', '.join(parameters)}" if parameters else "this takes none"
            raise HTTPException(HTTPStatus.UNPROCESSABLE_ENTITY, f"There is no parameter {name[:50]!r}: {takes}.")


def error_response(status: int, sentence: str) -> JSONResponse:
    """An error as JSON, with the headers that its status asks for."""
    return JSONResponse({"error": sentence}, status, _HEADERS.get(HTTPStatus(status)))


def answer_errors(app: FastAPI) -> None:
    """Register handlers that turn every error into one sentence."""

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> JSONResponse:
        status, sentence = HTTPStatus(error.status_code), error.detail
        if sentence == status.phrase:  # the framework's own
            own = {404: f"There is nothing at {request.url.path[:200]}.", 405: f"{request.method} cannot be done here."}
            sentence = own.get(status, f"{status.phrase}.")
        answer = error_response(status, sentence)
        answer.headers.update(error.headers or {})
        return answer

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        del request
        first = error.errors()[0]
        return error_response(HTTPStatus.UNPROCESSABLE_ENTITY, f"{first['loc'][-1]}: {first['msg']}.")

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
