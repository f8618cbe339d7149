"""`kedge search`: the items of a gallery that are most like images, or like other items."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, cast

import typer

import kedge
from kedge.cli.options import AddressOption, GalleryArgument, check_runner, line_console
from kedge.console import printable, short_path
from kedge.errors import ConfigError, ImageError

if TYPE_CHECKING:
    import numpy as np
    from rich.console import Console

    from kedge.gallery import Result
    from kedge.gallery.gallery import Method, Rank
    from kedge.gallery.html import Answer

Query = Path | str | int
"""An image file, a URL, or the id of an item."""
_ALL = 2**31
"""More lists than there are."""
_NEAREST = 5
"""Anchors that an answer names."""


def search(
    gallery: GalleryArgument,
    queries: Annotated[
        list[str] | None, typer.Argument(metavar="[QUERY]...", help="Images, folders of images, or ids of items.")
    ] = None,
    text: Annotated[
        str | None, typer.Option(help="Search by text instead, where the encoder has a text tower (CLIP, SigLIP).")
    ] = None,
    k: Annotated[int, typer.Option("-k", help="Number of hits per query.")] = 20,
    probes: Annotated[int, typer.Option(help="Number of lists to search: those of the nearest anchors.")] = 1,
    method: Annotated[str, typer.Option(help="two_stage, or brute_force over all items.")] = "two_stage",
    rank: Annotated[
        str,
        typer.Option(
            help="class (by the trained classes), looks (by visual features, whatever the label) or auto: by class, "
            "and by looks where the label came after training."
        ),
    ] = "auto",
    where: Annotated[str | None, typer.Option(help="Only items that match, such as \"label = 'cat'\".")] = None,
    at_least: Annotated[int, typer.Option(help="Search more lists until they hold this many items.")] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON; a list where there are several queries.")
    ] = False,
    html: Annotated[
        Path | None, typer.Option(help="Write a page with the images to this file: two-stage beside brute force.")
    ] = None,
    url: Annotated[bool, typer.Option("--url", help="Allow http(s) URLs as queries, and fetch them.")] = False,
    runner: Annotated[
        str, typer.Option(help="local, or ray: several processes, for a gallery too large for one machine.")
    ] = "local",
    address: AddressOption = None,
) -> None:
    """Find the items that are most like an image, like each of several images, or like another item."""
    started = time.perf_counter()
    check_runner(runner, address=address)
    if bool(queries) == (text is not None):
        raise ConfigError('Pass images, folders or ids to search with, or --text "a photo of a red car".')
    if runner == "ray" and text is not None:
        raise ConfigError("--text needs --runner local; ray searches by class.")
    if runner == "ray" and at_least:
        raise ConfigError("--at-least needs --runner local; with ray, pass --probes.")
    if runner == "ray" and rank == "looks":
        raise ConfigError("--rank looks needs --runner local; ray searches by class.")
    parsed, several = [], False
    if queries:
        parsed = _parse_queries(queries)
        several = len(queries) > 1 or Path(queries[0]).expanduser().is_dir()
    searcher = _Searcher(kedge.Gallery.open(gallery), k, method, probes, at_least, where, rank, url, runner, address)
    answers = searcher.answer(parsed, compare=html is not None) if text is None else [searcher.answer_text(text)]
    seconds = time.perf_counter() - started
    if html is not None:
        from kedge.gallery.html import search_page, write_page

        write_page(search_page(searcher.gallery, answers), html)
    if as_json:
        content = [_as_json(answer, seconds) for answer in answers]
        typer.echo(json.dumps(content if several else content[0], indent=2))
    else:
        console = line_console()
        for number, answer in enumerate(answers):
            if several:
                console.print(("\n" if number else "") + printable(answer.name), style="bold", markup=False)
            _print(console, answer, searcher)
        searched = sum(answer.result.seconds for answer in answers)
        count = f"\n{len(answers)} queries · " if several else ""
        console.print(f"{count}searched in {searched * 1000:.2f} ms, {seconds:.2f} s in all", style="dim")
    if html is not None:
        typer.echo(f"The page with the images: {html}", err=True)


# ---------------------------------------------------------------------- queries


def _parse_queries(texts: Sequence[str]) -> list[Query]:
    """Image files, URLs and ids; a folder stands for the images in it."""
    from kedge.images import is_url, list_images

    queries: list[Query] = []
    for text in texts:
        path = Path(text).expanduser()
        if is_url(text):
            queries.append(text)
        elif path.is_dir():
            if not (images := list_images(path)):
                raise ConfigError(f"{path} holds no images; name a folder that does.")
            queries += images
        elif path.exists() or not (text.isascii() and text.isdigit()):
            queries.append(path)
        elif len(text) > 18:  # beyond any id
            raise ConfigError(f"There is no item {text}, and no such file.")
        else:
            queries.append(int(text))
    return queries


class _Searcher(NamedTuple):
    """A gallery and how it is searched."""

    gallery: kedge.Gallery
    k: int
    method: str
    probes: int
    min_candidates: int
    where: str | None
    rank: str
    allow_url: bool
    runner: str
    address: str | None

    def answer(self, queries: Sequence[Query], *, compare: bool) -> list[Answer]:
        """An answer for each query, in order: images share the encoder's batches and one search.

        Of several images, those that cannot be read are reported and left out. With `compare`, the other method's
        result comes with each.
        """
        images, embeddings, features = self._embed([query for query in queries if not isinstance(query, int)])
        answers = dict(zip(images, self._search(images, embeddings, features, None, compare), strict=True))
        for query in queries:
            if isinstance(query, int) and query not in answers:
                vector, looks = self.gallery.item_vectors(query)
                own_features = None if looks is None else looks[None]
                [answers[query]] = self._search([query], vector[None], own_features, query, compare)
        return [answers[query] for query in queries if query in answers]

    def answer_text(self, text: str) -> Answer:
        """The answer for a text."""
        from kedge.gallery.html import Answer

        vector = self.gallery.embed_text(text)
        result = self.gallery.search_text_vector(vector, self.k, cast("Method", self.method), self.where)
        return Answer(text, self.method, result, None, vector, [], is_text=True)

    def _embed(self, images: list[Path | str]) -> tuple[list[Query], Any, Any]:
        if not images:
            return [], None, None
        try:
            return list(images), *self.gallery.image_vectors(images, allow_url=self.allow_url)
        except ImageError:
            if len(images) == 1:
                raise
        from kedge.images import is_url, read_image

        readable: list[Query] = []
        for image in images:
            try:
                if not is_url(str(image)):
                    read_image(image)
                readable.append(image)
            except ImageError as error:
                typer.echo(f"kedge: {error}", err=True)
        if not readable:
            raise ImageError("None of the images can be read.")
        return readable, *self.gallery.image_vectors(readable, allow_url=self.allow_url)

    def _search(
        self,
        queries: Sequence[Query],
        embeddings: np.ndarray,
        features: np.ndarray | None,
        exclude_id: int | None,
        compare: bool,
    ) -> list[Answer]:
        if not queries:
            return []
        from kedge.gallery.html import Answer

        gallery = self.gallery
        others: list[Result | None] = [None] * len(queries)
        if self.runner == "ray":
            from kedge.ray import search_with_ray

            lists = self.probes if self.method == "two_stage" else _ALL
            results = search_with_ray(
                gallery, embeddings, self.k, lists, self.where, exclude_id=exclude_id, address=self.address
            )
        else:
            options: dict[str, Any] = {"min_candidates": self.min_candidates, "where": self.where}
            options |= {"probes": self.probes, "exclude_id": exclude_id}

            def search(count: int) -> list[Result]:
                return gallery.search_embeddings(
                    embeddings[:count],
                    self.k,
                    cast("Method", self.method),
                    features=None if features is None else features[:count],
                    rank=cast("Rank", self.rank),
                    **options,
                )

            if compare:
                search(1)  # opens the lists, which would count for the first of the two methods alone
            results = search(len(queries))
            other: Method = "brute_force" if self.method == "two_stage" else "two_stage"
            # By the same distances, or they could not be compared; by looks, both search all items.
            for compared, same_rank in {"embedding": "class", "features": "looks"}.items() if compare else ():
                rows = [n for n, result in enumerate(results) if result.compared == compared and result.rank == "class"]
                if rows:
                    own = None if features is None else features[rows]
                    found = gallery.search_embeddings(
                        embeddings[rows], self.k, other, features=own, rank=cast("Rank", same_rank), **options
                    )
                    for row, result in zip(rows, found, strict=True):
                        others[row] = result
        anchors = gallery.snapshot().anchors
        return [
            Answer(query, self.method, result, other_result, embedding, anchors.closest(embedding, _NEAREST))
            for query, result, other_result, embedding in zip(queries, results, others, embeddings, strict=True)
        ]


# ---------------------------------------------------------------------- output


def _as_json(answer: Answer, seconds: float) -> dict[str, Any]:
    result = answer.result
    hits = [
        {"rank": rank, **hit._asdict(), "similarity": similarity}
        for rank, (hit, similarity) in enumerate(zip(result, result.similarities, strict=True), start=1)
    ]
    return {
        "query": answer.query if isinstance(answer.query, int) else str(answer.query),
        "hits": hits,
        "rank": result.rank,
        "anchors": result.anchors,
        "nearest": [{"name": name, "distance": distance} for _, name, distance in answer.nearest],
        "unknown": result.unknown,
        "seconds": result.seconds,
        "total_seconds": seconds,
    }


def _print(console: Console, answer: Answer, searcher: _Searcher) -> None:
    from rich.table import Column, Table
    from rich.text import Text

    result = answer.result
    if not result.hits:
        console.print(_nothing(searcher), markup=False)
        return
    numbers = [Column(name, justify="right") for name in ("rank", "distance", "similarity", "id")]
    label, path = (Column(name, overflow="fold") for name in ("label", "path"))
    table = Table(*numbers[:3], label, numbers[3], path, box=None, pad_edge=False, header_style="bold")
    for rank, (hit, similarity) in enumerate(zip(result, result.similarities, strict=True), start=1):
        texts = (
            f"{rank}",
            f"{hit.distance:.4g}",
            f"{similarity:.3f}",
            hit.label or "",
            f"{hit.id}",
            short_path(hit.path or ""),
        )
        table.add_row(*(Text(printable(text)) for text in texts))
    console.print(table)
    console.print(Text(printable(" · ".join(answer.how())), style="dim"))


def _nothing(searcher: _Searcher) -> str:
    """Why nothing was found, and what to do."""
    if searcher.where is not None:
        return f"No matches: no item fits --where {searcher.where!r}."
    if not len(searcher.gallery):
        return (
            f"No matches: the gallery is empty; kedge index FOLDER --gallery {searcher.gallery.location} adds images."
        )
    if searcher.method == "two_stage":
        return "No matches in the list searched; try --probes 5 or --method brute_force."
    return "No matches: the gallery holds no other item."
