"""Search with an image, an item or a text."""

# No `from __future__ import annotations`: FastAPI evaluates those of SearchOptions without this module's names.
import time
from collections.abc import Iterable
from typing import Annotated, Literal, NamedTuple, get_args

import numpy as np
from fastapi import APIRouter, Depends, Query, Request
from starlette.exceptions import HTTPException

from kedge.gallery import Hit, Result
from kedge.gallery.gallery import Method, Rank
from kedge.serving import schemas
from kedge.serving.catalogue import Catalogue, shown_name
from kedge.serving.schemas import MAX_K, MAX_PROBES, MAX_TEXT, Id
from kedge.serving.service import QueryVectors, Service, ServiceDependency
from kedge.serving.uploads import REQUEST_BODY

__all__ = ["hit_schemas", "router"]

_METHODS: tuple[schemas.Method, ...] = get_args(schemas.Method)
_NEAREST_ANCHORS = 5
router = APIRouter(tags=["search"])


class SearchOptions(NamedTuple):
    """The parameters of a search."""

    k: int
    method: Literal["two_stage", "brute_force", "both"]
    probes: int
    rank: Rank
    label: list[str]


# Not the class itself: FastAPI calls what is not `async` in a thread, which takes longer than some searches.
async def _search_options(
    k: Annotated[int, Query(ge=1, le=MAX_K, description="How many hits.")] = 20,
    method: Annotated[
        Literal["two_stage", "brute_force", "both"], Query(description="How to search; both: one after the other.")
    ] = "two_stage",
    probes: Annotated[int, Query(ge=1, le=MAX_PROBES, description="How many lists a two-stage search reads.")] = 1,
    rank: Annotated[
        Rank, Query(description="What makes items alike; auto: the predicted class, or looks where that came later.")
    ] = "auto",
    label: Annotated[list[str], Query(max_length=64, description="Only items with one of these labels.")] = [],  # noqa: B006
) -> SearchOptions:
    return SearchOptions(k, method, probes, rank, label)


Options = Annotated[SearchOptions, Depends(_search_options)]


class Asked(NamedTuple):
    """A query (or the id of an item), when its request had arrived, and the seconds that its vectors took."""

    query: QueryVectors | int
    started: float
    encoder: float | None


@router.post("/search", openapi_extra=REQUEST_BODY)
async def search(request: Request, options: Options, service: ServiceDependency) -> schemas.Answer:
    """The items most like an image."""
    _check_rank(service, options)
    # A slot is taken once the body has arrived: who sends slowly keeps nobody else waiting.
    async with service.uploads.image(request) as upload, service.slot():
        started = time.perf_counter()
        pixels = await service.pixels(upload.content)
        decoded = time.perf_counter()
        vectors = await service.embed(pixels)
        encoder = time.perf_counter() - decoded
        return await service.searching.run(_answers, (service, options, None), Asked(vectors, started, encoder))


@router.get("/items/{id}/similar")
async def similar(id: Id, options: Options, service: ServiceDependency) -> schemas.Answer:
    """The items most like another one."""
    _check_rank(service, options)
    async with service.slot():
        return await service.searching.run(_answers, (service, options, id), Asked(id, time.perf_counter(), None))


@router.get("/search")
async def search_text(
    text: Annotated[str, Query(min_length=1, max_length=MAX_TEXT, description="What to look for, in words.")],
    options: Options,
    service: ServiceDependency,
) -> schemas.Answer:
    """The items that a text describes best, by looks; `probes` and `rank` have no effect."""
    async with service.slot():
        started = time.perf_counter()
        vector = await service.embed_text(text)
        encoder = time.perf_counter() - started
        return await service.searching.run(_text_answers, (service, options), (vector, started, encoder))


def hit_schemas(hits: Iterable[Hit]) -> list[schemas.Hit]:
    """Hits as the API gives them."""
    return [
        schemas.Hit(id=id, name=shown_name(path), label=label, distance=distance, anchor=anchor)
        for id, path, label, distance, anchor in hits
    ]


def _check_rank(service: Service, options: SearchOptions) -> None:
    if options.rank == "looks" and not service.gallery.features:
        raise HTTPException(400, "This gallery has no features beside its embeddings; leave rank=looks out.")


def _answers(kind: tuple[Service, SearchOptions, int | None], batch: list[Asked]) -> list[schemas.Answer]:
    """What one version of the gallery holds that is like each image, or like an item (its id)."""
    service, options, id = kind
    catalogue = service.catalogue()
    queries = [service.vectors(catalogue, query) if isinstance(query, int) else query for query, _, _ in batch]
    if options.rank == "looks" and queries[0].features is None:
        raise HTTPException(400, f"Item {id} was added without features; leave rank=looks out.")
    chosen = {"probes": options.probes, "where": _filter(options), "exclude_id": id}

    def search(method: Method, rank: Rank, some: list[QueryVectors]) -> list[Result]:
        results = service.search(catalogue, some, options.k, method=method, rank=rank, **chosen)
        for result in results:
            service.metrics.searched.labels(method).observe(result.seconds)
        return results

    if (asked := options.method) == "both":
        first = search("two_stage", options.rank, queries)
        # Both by the same distances, embeddings' or features': else they could not be compared. One after the other, so
        # that neither is in the other's way.
        found = [
            {method: search(method, result.rank, [query])[0] for method in _METHODS}
            for query, result in zip(queries, first, strict=True)
        ]
    else:
        first = search(asked, options.rank, queries)
        found = [{asked: result} for result in first]
    answers = []
    for (_, started, encoder), query, result, results in zip(batch, queries, first, found, strict=True):
        answers.append(
            schemas.Answer(
                searches=[
                    _search_schema(catalogue, query.embedding, method, searched) for method, searched in results.items()
                ],
                nearest=[
                    schemas.NearAnchor(anchor=number, name=name, distance=distance)
                    for number, name, distance in catalogue.snapshot.anchors.closest(query.embedding, _NEAREST_ANCHORS)
                ],
                rank=result.rank,
                unknown=result.unknown,
                place=service.place(query.embedding),
                seconds=schemas.Seconds(encoder=encoder, total=time.perf_counter() - started),
                record=catalogue.snapshot.version,
            )
        )
    return answers


def _text_answers(
    kind: tuple[Service, SearchOptions], batch: list[tuple[np.ndarray, float, float]]
) -> list[schemas.Answer]:
    """What one version of the gallery holds that texts describe: they are near no anchor, and not on the map."""
    service, options = kind
    catalogue, where = service.catalogue(), _filter(options)
    answers = []
    for vector, started, encoder in batch:
        searches = []
        for method in _METHODS if options.method == "both" else [options.method]:
            result = service.gallery.search_text_vector(vector, options.k, method, where, snapshot=catalogue.snapshot)
            service.metrics.searched.labels(method).observe(result.seconds)
            searches.append(_search_schema(catalogue, vector, method, result))
        seconds = schemas.Seconds(encoder=encoder, total=time.perf_counter() - started)
        version = catalogue.snapshot.version
        answers.append(
            schemas.Answer(
                searches=searches, nearest=[], rank="looks", unknown=None, place=None, seconds=seconds, record=version
            )
        )
    return answers


def _filter(options: SearchOptions) -> str | None:
    quoted = ", ".join("'" + label.replace("'", "''") + "'" for label in options.label)
    return f"label IN ({quoted})" if quoted else None


def _search_schema(catalogue: Catalogue, embedding: np.ndarray, method: Method, result: Result) -> schemas.Search:
    in_lists = method == "two_stage" and result.rank == "class"
    return schemas.Search(
        method=method,
        hits=hit_schemas(result),
        looked_at=result.anchors if in_lists or result.rank == "looks" else [],
        compared=catalogue.snapshot.items_in(result.anchors, embedding) if in_lists else len(catalogue),
        seconds=result.seconds,
    )
