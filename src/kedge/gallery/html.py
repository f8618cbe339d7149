"""Self-contained HTML pages: the frame that all of them share, thumbnails inside the page, and the page of a search."""

from __future__ import annotations

import base64
from contextlib import suppress
from html import escape
from pathlib import Path
from string import Template

from kedge.errors import ConfigError, ImageError
from kedge.gallery.gallery import Gallery
from kedge.gallery.search import Hit, Result
from kedge.images import is_url, read_image
from kedge.images.io import make_thumbnail

__all__ = ["frame", "search_page", "text", "thumbnail", "write_page"]

_HIT_SIDE = 256
_QUERY_SIDE = 512


def frame(title: str, style: Path, body: str) -> str:
    """A whole page that needs nothing else; `body` is HTML, `title` is not yet, `style` a CSS file."""
    page = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
    return page.substitute(title=text(title), style=style.read_text(encoding="utf-8").strip(), body=body.strip())


def write_page(page: str, path: str | Path) -> None:
    """Write a page to a file."""
    try:
        Path(path).write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}): choose another path.") from error


def thumbnail(path: str | None, side: int, *, stored: bytes | None = None) -> str:
    """A thumbnail inside the page, of the file or the one that was stored; words where there is none."""
    if path is None:
        return '<div class="hole">no picture</div>'
    try:
        content = stored or make_thumbnail(read_image(path), side)
    except ImageError:
        return '<div class="hole">the picture cannot be read any more</div>'
    data = base64.b64encode(content).decode()
    return f'<img src="data:image/jpeg;base64,{data}" alt="{text(Path(path).name)}" loading="lazy">'


def text(value: str) -> str:
    """Any text, safe inside HTML."""
    # A file name may hold bytes that are no text; they must not break the page.
    return escape(value.encode("utf-8", "replace").decode())


def search_page(gallery: Gallery, query: Path | str | int | None, result: Result, *, words: str | None = None) -> str:
    """The page: the query, which may be `words` alone, on the left, its hits on the right, nearest first."""
    path: str | None = None if query is None else str(query)
    label: str | None = None
    if isinstance(query, int):
        path, label = gallery.item(query)[1:3]
    name = words or (Path(path).name if path is not None else f"item {query}")
    anchors = [anchor for anchor in result.anchors if anchor is not None]
    facts = {"Gallery": str(gallery.location), "Items": f"{len(gallery):,}"}
    if result.rank == "looks":
        facts["Ranked"] = "by looks"
    else:
        facts["Lists searched"] = f"{len(result.anchors):,}"
        facts["Anchors"] = ", ".join(anchors[:5]) + (" …" if len(anchors) > 5 else "") or "unnamed"
    facts["Time"] = f"{result.seconds * 1000:.2f} ms"
    if result.unknown:
        facts["Unknown"] = "unlike every trained class"
    caption = f'<div class="label">{text(label)}</div>' if label is not None else ""
    caption += f'<div class="soft path">{text(name)}</div>'
    picture = '<div class="hole">a text</div>' if words else _linked(path, _QUERY_SIDE)
    count = len(result.hits)
    cells = "".join(f"<dt>{text(key)}</dt><dd>{text(value)}</dd>" for key, value in facts.items())
    heading = f"{count:,} {'hit' if count == 1 else 'hits'}, nearest first" if count else "Nothing was found"
    hits = "\n".join(_hit(gallery, rank, hit, label) for rank, hit in enumerate(result.hits, start=1))
    body = (
        f"<aside>\n<h1>Query</h1>\n<figure>{picture}<figcaption>{caption}</figcaption></figure>\n"
        f"<dl>{cells}</dl>\n</aside>\n<section>\n<h2>{heading}</h2>\n<ol>\n{hits}\n</ol>\n</section>"
    )
    return frame(f"{name} in {gallery.location.name}", Path(__file__).with_name("search.css"), body)


def _hit(gallery: Gallery, rank: int, hit: Hit, query_label: str | None) -> str:
    kind = "label same" if query_label is not None and hit.label == query_label else "label"
    label = f'<span class="{kind}">{text(hit.label)}</span>' if hit.label is not None else "<span></span>"
    name = Path(hit.path).name if hit.path is not None else ""
    stored = None
    if gallery.thumbnails:
        with suppress(ConfigError):  # it may be gone by now
            stored = gallery.thumbnail(hit.id)
    return (
        f"<li><figure>{_linked(hit.path, _HIT_SIDE, stored)}<figcaption>"
        f'<div class="row">{label}<span class="distance" title="distance">{hit.distance:.3g}</span></div>'
        f'<div class="soft path" title="{text(hit.path or "")}">{rank} · id {hit.id} · {text(name)}</div>'
        f"</figcaption></figure></li>"
    )


def _linked(path: str | None, side: int, stored: bytes | None = None) -> str:
    """A thumbnail that links to its file."""
    if path is not None and is_url(path):
        return '<div class="hole">from an address</div>'
    image = thumbnail(path, side, stored=stored)
    if path is None or not image.startswith("<img"):
        return image
    return f'<a href="{escape(Path(path).resolve().as_uri())}">{image}</a>'
