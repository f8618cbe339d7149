"""A search as one HTML page that needs nothing else: the pictures are in it, as small copies."""

from __future__ import annotations

from contextlib import suppress
from html import escape
from pathlib import Path

from kedge.errors import ConfigError
from kedge.gallery.gallery import Gallery
from kedge.gallery.html import frame, picture, text
from kedge.gallery.search import Hit, Result
from kedge.images import is_url

__all__ = ["search_page"]

_HIT_SIDE = 256
_QUERY_SIDE = 512
_STYLE = """
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
        "Gallery": str(gallery.place),
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
    return frame(f"{name} in {gallery.place.name}", _STYLE, body)


def _hit(gallery: Gallery, rank: int, hit: Hit, wanted: str | None) -> str:
    kind = "label same" if wanted is not None and hit.label == wanted else "label"
    label = f'<span class="{kind}">{text(hit.label)}</span>' if hit.label is not None else "<span></span>"
    name = Path(hit.path).name if hit.path is not None else ""
    kept = None
    if gallery.thumbnails:
        with suppress(ConfigError):  # it may be gone by now
            kept = gallery.thumbnail(hit.id)
    return (
        f"<li><figure>{_linked(hit.path, _HIT_SIDE, kept)}<figcaption>"
        f'<div class="row">{label}<span class="distance" title="distance">{hit.distance:.3g}</span></div>'
        f'<div class="soft path" title="{text(hit.path or "")}">{rank} · id {hit.id} · {text(name)}</div>'
        f"</figcaption></figure></li>"
    )


def _linked(path: str | None, side: int, kept: bytes | None = None) -> str:
    """A picture that leads to its file."""
    if path is not None and is_url(path):
        return '<div class="hole">from an address</div>'
    shown = picture(path, side, kept=kept)
    if path is None or not shown.startswith("<img"):
        return shown
    return f'<a href="{escape(Path(path).resolve().as_uri())}">{shown}</a>'
