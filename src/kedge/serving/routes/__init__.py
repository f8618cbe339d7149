"""The endpoints of the API, by what they are about."""

from __future__ import annotations

from fastapi import Request
from fastapi.dependencies.utils import get_flat_params
from fastapi.params import Query
from starlette.exceptions import HTTPException

__all__ = ["refuse_unknown_parameters"]


async def refuse_unknown_parameters(request: Request) -> None:
    """Refuse query parameters that the endpoint does not have: a misspelt one would silently change nothing."""
    fields = get_flat_params(request.scope["route"].dependant)
    known = [field.alias for field in fields if isinstance(field.field_info, Query)]
    if unknown := next((name for name in request.query_params if name not in known), None):
        raise HTTPException(422, f"There is no parameter {unknown[:50]!r}: this takes {', '.join(known) or 'none'}.")
