"""Self-contained HTML pages: the frame that all of them share, thumbnails inside the page, and the page of a search."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from html import escape
from pathlib import Path
from string import Template
from typing import NamedTuple

import numpy as np

from kedge.errors import ConfigError, ImageError
from kedge.gallery.anchors import NearAnchor
from kedge.gallery.gallery import Gallery
from kedge.gallery.result import Hit, Result, similarity
from kedge.images import is_url, read_image
from kedge.images.io import make_thumbnail

__all__ = ["Answer", "frame", "search_page", "text", "thumbnail", "write_page"]

_HIT_SIDE = 256
_QUERY_SIDE = 512
_NEXT = 3
"""Anchors that are named beside those whose lists were searched."""
_METHODS = {"two_stage": "Two-stage", "brute_force": "Brute force"}
_NEAR, _FAR = 0.5, 0.95
"""Quantiles of the items' distances to their nearest neighbour: near is up to the first, far beyond the second."""


class Answer(NamedTuple):
    """What a search found for one query."""

    query: Path | str | int
    method: str
    result: Result
    other: Result | None
    """What the other method found, by the same distances."""
    embedding: np.ndarray
    nearest: list[NearAnchor]
    is_text: bool = False
    """Whether the query is a text, and not the path of an image."""

    @property
    def name(self) -> str:
        """What to call the query."""
        return f"item {self.query}" if isinstance(self.query, int) else str(self.query)

    def how(self) -> list[str]:
        """How the items were ranked, the anchors that came next and how alike those are, and whether it is unknown."""
        result, length = self.result, float(np.linalg.norm(self.embedding))
        near = [(name, similarity(distance, length)) for _, name, distance in self.nearest if name is not None]
        what = "nearest anchors"
        if result.rank == "looks":
            lines = [f"by looks: {result.anchors[0]}, which came after training" if result.anchors else "by looks"]
        elif not any(result.anchors):
            lines = ["by distance"]
        elif self.method == "brute_force":
            lines = ["by class, all lists"]
        else:
            names = ", ".join(name if name is not None else "unnamed" for name in result.anchors[:3])
            more = f" and {len(result.anchors) - 3:,} more" if len(result.anchors) > 3 else ""
            lines = [f"by class: {names}{more}"]
            near = [(name, alike) for name, alike in near if name not in result.anchors]
            what = "next anchors"
        if near:
            lines.append(f"{what}: " + ", ".join(f"{name} {alike:.2f}" for name, alike in near[:_NEXT]))
        if result.unknown:
            lines.append("unknown: unlike every trained class")
        return lines


def frame(title: str, style: Path, body: str) -> str:
    """A whole page that needs nothing else; `body` is HTML, `title` is not yet, `style` a CSS file."""
    page = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    return page.substitute(title=text(title), style=style.read_text(encoding="utf-8").strip(), body=body.strip())


def write_page(page: str, path: str | Path) -> None:
    """Write a page to a file."""
    try:
        Path(path).write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}); choose another path.") from error


def thumbnail(path: str | None, side: int, *, stored: bytes | None = None) -> str:
    """A thumbnail inside the page, of the file or the one that was stored; words where there is none."""
    if path is None:
        return '<div class="hole">no image</div>'
    try:
        content = stored or make_thumbnail(read_image(path), side)
    except ImageError:
        return '<div class="hole">the image can no longer be read</div>'
    data = base64.b64encode(content).decode()
    return f'<img src="data:image/jpeg;base64,{data}" alt="{text(Path(path).name)}" loading="lazy">'


def text(value: str) -> str:
    """Any text, safe inside HTML."""
    # A file name may hold bytes that are no text; they must not break the page.
    return escape(value.encode("utf-8", "replace").decode())


def search_page(gallery: Gallery, answers: Sequence[Answer]) -> str:
    """The page: a section for each query, which stands beside its hits: two-stage beside brute force."""
    items, bounds = len(gallery), dict[str, tuple[float, float] | None]()
    for answer in answers:
        if answer.result.compared not in bounds:
            distances = gallery.neighbour_distances(answer.result.compared)
            near, far = np.quantile(distances, [_NEAR, _FAR]).tolist() if len(distances) else (0.0, 0.0)
            bounds[answer.result.compared] = (near, far) if len(distances) else None
    image = cache(lambda id, path: _linked(path, _HIT_SIDE, _stored(gallery, id)))
    sections = (_section(gallery, items, answer, bounds[answer.result.compared], image) for answer in answers)
    what = Path(answers[0].name).name if len(answers) == 1 else f"{len(answers)} queries"
    return frame(f"{what} in {gallery.location.name}", Path(__file__).with_name("search.css"), "\n".join(sections))


def _section(
    gallery: Gallery,
    items: int,
    answer: Answer,
    bounds: tuple[float, float] | None,
    image: Callable[[int, str | None], str],
) -> str:
    """One query and what both methods found."""
    query, result, other = answer.query, answer.result, answer.other
    path, label = (None if answer.is_text else str(query), None)
    if isinstance(query, int):
        path, label = gallery.item(query)[1:3]
    facts = {"Gallery": str(gallery.location), "Items": f"{items:,}"}
    facts["Ranked"], *more = answer.how()
    facts |= dict((line[0].upper() + line[1:]).split(": ", 1) for line in more)
    if bounds is not None:
        facts["Near"] = f"up to {bounds[0]:.3g}: nearer than half of the items are to their nearest neighbour"
        facts["Far"] = f"beyond {bounds[1]:.3g}: farther than 95 in 100 items are from theirs"
    cells = "".join(f"<dt>{text(key)}</dt><dd>{_wrapped(value)}</dd>" for key, value in facts.items())
    caption = f'<div class="label">{text(label)}</div>' if label is not None else ""
    caption += f'<div class="soft path">{_wrapped(Path(path).name if path is not None else answer.name)}</div>'
    picture = '<div class="hole">a text</div>' if answer.is_text else _linked(path, _QUERY_SIDE)
    results = {answer.method: result}
    if other is not None:
        results = {method: result if method == answer.method else other for method in _METHODS}
    columns = []
    for method, found in results.items():
        others = None if other is None else {*(other if found is result else result).ids}
        hits = "\n".join(
            _hit(rank, hit, alike, label, bounds, others, image)
            for rank, (hit, alike) in enumerate(zip(found, found.similarities, strict=True), start=1)
        )
        everything = method == "brute_force" or found.rank == "looks"
        compared = items if everything else gallery.snapshot().items_in(found.anchors, answer.embedding)
        time = f"{found.seconds * 1000:.2f} ms"
        columns.append(
            f'<section>\n<h2>{_METHODS[method]} <span class="soft">{time} · compared with {compared:,} of {items:,}'
            f"</span></h2>\n<ol>\n{hits}\n</ol>{'' if hits else '<p>No matches</p>'}\n</section>"
        )
    return (
        f"<article>\n<aside>\n<h1>Query</h1>\n<figure>{picture}"
        f"<figcaption>{caption}</figcaption></figure>\n<dl>{cells}</dl>\n</aside>\n<div>\n"
        f'<p class="verdict">{_verdict(result, other)}</p>\n<div class="columns">\n{"".join(columns)}\n</div>\n'
        "</div>\n</article>"
    )


def _verdict(result: Result, other: Result | None) -> str:
    """How the two methods compare, in a sentence."""
    count = max(len(result), len(other or result))
    if other is None:
        how = "; by looks, all items are compared" if result.rank == "looks" else ""
        return f"{count:,} {'hit' if count == 1 else 'hits'}, nearest first{how}."
    common = len({*result.ids} & {*other.ids})
    if common == count:
        return f"Two-stage search and brute force found the same {count:,} items."
    return f"Two-stage search and brute force have {common:,} of {count:,} hits in common."


def _hit(
    rank: int,
    hit: Hit,
    alike: float,
    query_label: str | None,
    bounds: tuple[float, float] | None,
    others: set[int] | None,
    image: Callable[[int, str | None], str],
) -> str:
    kind = "label same" if query_label is not None and hit.label == query_label else "label"
    label = f'<span class="{kind}">{_wrapped(hit.label)}</span>' if hit.label is not None else "<span></span>"
    name = Path(hit.path).name if hit.path is not None else ""
    marks = ""
    if bounds is not None:
        word = "near" if hit.distance <= bounds[0] else "far" if hit.distance > bounds[1] else "typical"
        marks = f'<span class="{word}">{word}</span>'
    if others is not None and hit.id not in others:
        marks += '<span class="only">only here</span>'
    return (
        f"<li><figure>{image(hit.id, hit.path)}<figcaption>"
        f'<div class="row">{label}<span class="marks">{marks}</span></div>'
        f'<div class="row numbers"><span>distance {hit.distance:.3g}</span><span>similarity {alike:.2f}</span></div>'
        f'<div class="path" title="{text(hit.path or "")}">{_wrapped(name)}</div>'
        f'<div class="soft numbers">{rank} · id {hit.id}</div>'
        f"</figcaption></figure></li>"
    )


def _stored(gallery: Gallery, id: int) -> bytes | None:
    """The thumbnail that the gallery keeps of an item."""
    with suppress(ConfigError):  # it may be gone by now
        return gallery.thumbnail(id) if gallery.thumbnails else None
    return None


def _wrapped(value: str) -> str:
    """Text that may break after the separators of a file name, before it breaks anywhere else."""
    return re.sub(r"([_\-/\\]+|\.(?=\D))(?=\w)", r"\1<wbr>", text(value))


def _linked(path: str | None, side: int, stored: bytes | None = None) -> str:
    """A thumbnail that links to its file."""
    if path is not None and is_url(path):
        return '<div class="hole">from a URL</div>'
    image = thumbnail(path, side, stored=stored)
    if path is None or not image.startswith("<img"):
        return image
    return f'<a href="{escape(Path(path).resolve().as_uri())}">{image}</a>'
