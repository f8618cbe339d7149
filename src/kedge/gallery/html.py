"""Self-contained HTML pages: the frame that all of them share, thumbnails inside the page, and the page of a search."""

from __future__ import annotations

import base64
from contextlib import suppress
from html import escape
from pathlib import Path

from kedge.errors import ConfigError, ImageError
from kedge.gallery.gallery import Gallery
from kedge.gallery.search import Hit, Result
from kedge.images import is_url, read_image
from kedge.images.io import make_thumbnail

__all__ = ["frame", "search_page", "text", "thumbnail", "write_page"]

_HIT_SIDE = 256
_QUERY_SIDE = 512

_FRAME = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
:root {{
  color-scheme: light dark;
  --paper: light-dark(#f6f6f4, #161719);
  --card: light-dark(#fff, #212327);
  --ink: light-dark(#1d1e20, #ececec);
  --soft: light-dark(#63666b, #a2a6ad);
  --line: light-dark(#dedfe0, #34373c);
  --hole: light-dark(#ececea, #2a2c31);
  --good: light-dark(#12703f, #6bd19b);
  --warn: light-dark(#a33a12, #f0a07a);
}}
* {{ box-sizing: border-box; }}
body {{ margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.45 system-ui, sans-serif; }}
ol {{ list-style: none; display: grid; gap: 16px; margin: 0; padding: 0; }}
.hole {{ display: grid; place-items: center; padding: 16px; color: var(--soft); text-align: center; font-size: 13px; }}
.row {{ display: flex; justify-content: space-between; gap: 8px; }}
{style}
</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


def frame(title: str, style: str, body: str) -> str:
    """A whole page that needs nothing else; `body` is HTML, `title` is not yet."""
    return _FRAME.format(title=text(title), style=style.strip(), body=body.strip())


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


_SEARCH_STYLE = """
main { display: grid; grid-template-columns: minmax(200px, 300px) 1fr; gap: 32px; max-width: 1500px;
  margin: 0 auto; padding: 32px; align-items: start; }
aside { position: sticky; top: 32px; }
h1, h2 { font-size: 15px; font-weight: 600; margin: 0 0 12px; }
ol { grid-template-columns: repeat(auto-fill, minmax(160px, 1fr)); }
figure { margin: 0; background: var(--card); border: 1px solid var(--line); border-radius: 10px; overflow: hidden; }
figure img, .hole { display: block; width: 100%; aspect-ratio: 1; object-fit: contain; background: var(--hole); }
figcaption { padding: 10px 12px; }
.label { font-weight: 600; overflow-wrap: anywhere; }
.same { color: var(--good); }
.distance { font-variant-numeric: tabular-nums; }
.soft, .distance { color: var(--soft); }
.path { font-size: 12px; white-space: nowrap; overflow: hidden; text-overflow: ellipsis; }
aside .path { white-space: normal; overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: auto 1fr; gap: 4px 12px; margin: 16px 0 0; font-size: 13px; }
dt { color: var(--soft); }
dd { margin: 0; overflow-wrap: anywhere; }
a { color: inherit; }
@media (max-width: 700px) {
  main { grid-template-columns: 1fr; padding: 16px; gap: 20px; }
  aside { position: static; }
  aside figure { max-width: 240px; }
  ol { grid-template-columns: repeat(auto-fill, minmax(130px, 1fr)); gap: 12px; }
}
"""


def search_page(gallery: Gallery, query: Path | str | int, result: Result) -> str:
    """The page: the query on the left, its hits on the right, nearest first."""
    path, label = (str(query), None) if isinstance(query, (Path, str)) else gallery.item(query)[1:3]
    name = Path(path).name if path is not None else f"item {query}"
    anchors = [anchor for anchor in result.anchors if anchor is not None]
    facts = {
        "Gallery": str(gallery.location),
        "Items": f"{len(gallery):,}",
        "Lists searched": f"{len(result.anchors):,}",
        "Anchors": ", ".join(anchors[:5]) + (" …" if len(anchors) > 5 else "") or "unnamed",
        "Time": f"{result.seconds * 1000:.2f} ms",
    }
    if result.unknown:
        facts["Unknown"] = "far from every anchor"
    caption = f'<div class="label">{text(label)}</div>' if label is not None else ""
    caption += f'<div class="soft path">{text(name)}</div>'
    count = len(result.hits)
    cells = "".join(f"<dt>{text(key)}</dt><dd>{text(value)}</dd>" for key, value in facts.items())
    heading = f"{count:,} {'hit' if count == 1 else 'hits'}, nearest first" if count else "Nothing was found"
    hits = "\n".join(_hit(gallery, rank, hit, label) for rank, hit in enumerate(result.hits, start=1))
    body = (
        f"<aside>\n<h1>Query</h1>\n<figure>{_linked(path, _QUERY_SIDE)}<figcaption>{caption}</figcaption></figure>\n"
        f"<dl>{cells}</dl>\n</aside>\n<section>\n<h2>{heading}</h2>\n<ol>\n{hits}\n</ol>\n</section>"
    )
    return frame(f"{name} in {gallery.location.name}", _SEARCH_STYLE, body)


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
