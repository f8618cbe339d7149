"""What goes wrong, as a status and one sentence."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.dependencies.models import Dependant
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from kedge.errors import ConfigError, GalleryError, KedgeError, PictureError

__all__ = ["RETRY_SECONDS", "Refused", "answer_errors", "as_response", "only_known"]

RETRY_SECONDS = 1
_log = logging.getLogger(__name__)


class Refused(Exception):
    """A request that is not answered as asked."""

    def __init__(self, status: HTTPStatus, sentence: str) -> None:
        super().__init__(sentence)
        self.status, self.sentence = status, sentence


async def only_known(request: Request) -> None:
    """Refuse parameters that the endpoint does not have: one that is misspelt would change nothing, unseen."""
    known = _parameters(request.scope["route"].dependant)
    for name in request.query_params:
        if name not in known:
            takes = f"this takes {', '.join(known)}" if known else "this takes none"
            raise Refused(HTTPStatus.UNPROCESSABLE_ENTITY, f"There is no parameter {name[:50]!r}: {takes}.")


def _parameters(endpoint: Dependant) -> list[str]:
    own = [field.alias for field in endpoint.query_params]
    return own + [name for part in endpoint.dependencies for name in _parameters(part)]


def as_response(status: int, sentence: str) -> JSONResponse:
    """The answer to give."""
    headers = {}
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        headers["Retry-After"] = str(RETRY_SECONDS)
    if status == HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse({"error": sentence}, status, headers)


def answer_errors(app: FastAPI) -> None:
    """Let every error end in one sentence."""

    @app.exception_handler(Refused)
    async def refused(request: Request, error: Refused) -> JSONResponse:
        del request
        return as_response(error.status, error.sentence)

    @app.exception_handler(KedgeError)
    async def expected(request: Request, error: KedgeError) -> JSONResponse:
        if isinstance(error, PictureError):
            return as_response(HTTPStatus.UNPROCESSABLE_ENTITY, str(error))
        # Other errors name files, which are nobody's business.
        if isinstance(error, ConfigError):
            return as_response(HTTPStatus.UNPROCESSABLE_ENTITY, "This gallery cannot be asked for that.")
        _log.error("%s %s: %s", request.method, request.url.path[:200], error)
        busy = isinstance(error, GalleryError)
        sentence = "The gallery cannot be used at the moment: try again." if busy else "The server failed: try again."
        return as_response(HTTPStatus.SERVICE_UNAVAILABLE, sentence)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        del request
        return as_response(HTTPStatus.UNPROCESSABLE_ENTITY, _sentence(error.errors()[0]))

    @app.exception_handler(HTTPException)
    async def other(request: Request, error: HTTPException) -> JSONResponse:
        answer = as_response(error.status_code, _of_status(error.status_code, request))
        answer.headers.update(error.headers or {})
        return answer


def _sentence(error: dict[str, Any]) -> str:
    name = error["loc"][-1]
    return f"{name}: {error['msg']}."


def _of_status(status: int, request: Request) -> str:
    if status == HTTPStatus.NOT_FOUND:
        return f"There is nothing at {request.url.path[:200]}."
    if status == HTTPStatus.METHOD_NOT_ALLOWED:
        return f"{request.method} cannot be done here."
    return f"{HTTPStatus(status).phrase}."
