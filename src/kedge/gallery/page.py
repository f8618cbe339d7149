"""A search as one HTML page that needs nothing else: the pictures are in it, as small copies."""

from __future__ import annotations

import base64
import io
from html import escape
from pathlib import Path

from kedge.errors import PictureError
from kedge.gallery.gallery import Gallery
from kedge.gallery.search import Hit, Result
from kedge.images import read_picture

__all__ = ["search_page"]

_HIT_SIDE = 256
_QUERY_SIDE = 512

_PAGE = """<!DOCTYPE html>
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
}}
* {{ box-sizing: border-box; }}
body {{ margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.45 system-ui, sans-serif; }}
main {{ display: grid; grid-template-columns: minmax(200px, 300px) 1fr; gap: 32px; max-width: 1500px;
  margin: 0 auto; padding: 32px; align-items: start; }}
aside {{ position: sticky; top: 32px; }}
h1, h2 {{ font-size: 15px; font-weight: 600; margin: 0 0 12px; }}
ol {{ list-style: none; display: grid; grid-template-columns: repeat(auto-fill, minmax(160px, 1fr)); gap: 16px;
  margin: 0; padding: 0; }}
figure {{ margin: 0; background: var(--card); border: 1px solid var(--line); border-radius: 10px; overflow: hidden; }}
figure img, .hole {{ display: block; width: 100%; aspect-ratio: 1; object-fit: contain; background: var(--hole); }}
.hole {{ display: grid; place-items: center; padding: 16px; color: var(--soft); text-align: center; font-size: 13px; }}
figcaption {{ padding: 10px 12px; }}
.row {{ display: flex; justify-content: space-between; gap: 8px; }}
.label {{ font-weight: 600; overflow-wrap: anywhere; }}
.same {{ color: var(--good); }}
.distance {{ font-variant-numeric: tabular-nums; }}
.soft, .distance {{ color: var(--soft); }}
.path {{ font-size: 12px; white-space: nowrap; overflow: hidden; text-overflow: ellipsis; }}
aside .path {{ white-space: normal; overflow-wrap: anywhere; }}
dl {{ display: grid; grid-template-columns: auto 1fr; gap: 4px 12px; margin: 16px 0 0; font-size: 13px; }}
dt {{ color: var(--soft); }}
dd {{ margin: 0; overflow-wrap: anywhere; }}
a {{ color: inherit; }}
@media (max-width: 700px) {{
  main {{ grid-template-columns: 1fr; padding: 16px; gap: 20px; }}
  aside {{ position: static; }}
  aside figure {{ max-width: 240px; }}
  ol {{ grid-template-columns: repeat(auto-fill, minmax(130px, 1fr)); gap: 12px; }}
}}
</style>
</head>
<body>
<main>
<aside>
<h1>Query</h1>
{query}
<dl>{facts}</dl>
</aside>
<section>
<h2>{heading}</h2>
<ol>
{hits}
</ol>
</section>
</main>
</body>
</html>
"""


def search_page(gallery: Gallery, query: Path | int, result: Result) -> str:
    """The page: the query on the left, its hits on the right, nearest first."""
    path, label = (str(query), None) if isinstance(query, Path) else _item(gallery, query)
    name = Path(path).name if path is not None else f"item {query}"
    anchors = [anchor for anchor in result.anchors if anchor is not None]
    facts = {
        "Gallery": str(gallery.path),
        "Items": f"{len(gallery):,}",
        "Lists searched": f"{len(result.anchors):,}",
        "Anchors": ", ".join(anchors[:5]) + (" …" if len(anchors) > 5 else "") or "unnamed",
        "Time": f"{result.seconds * 1000:.2f} ms",
    }
    if result.unknown:
        facts["Unknown"] = "far from every anchor"
    caption = f'<div class="label">{_text(label)}</div>' if label is not None else ""
    caption += f'<div class="soft path">{_text(name)}</div>'
    count = len(result.hits)
    return _PAGE.format(
        title=_text(f"{name} in {gallery.path.name}"),
        query=f"<figure>{_picture(path, _QUERY_SIDE)}<figcaption>{caption}</figcaption></figure>",
        facts="".join(f"<dt>{_text(key)}</dt><dd>{_text(value)}</dd>" for key, value in facts.items()),
        heading=f"{count:,} {'hit' if count == 1 else 'hits'}, nearest first" if count else "Nothing was found",
        hits="\n".join(_hit(rank, hit, label) for rank, hit in enumerate(result.hits, start=1)),
    )


def _hit(rank: int, hit: Hit, wanted: str | None) -> str:
    kind = "label same" if wanted is not None and hit.label == wanted else "label"
    label = f'<span class="{kind}">{_text(hit.label)}</span>' if hit.label is not None else "<span></span>"
    name = Path(hit.path).name if hit.path is not None else ""
    return (
        f"<li><figure>{_picture(hit.path, _HIT_SIDE)}<figcaption>"
        f'<div class="row">{label}<span class="distance" title="distance">{hit.distance:.3g}</span></div>'
        f'<div class="soft path" title="{_text(hit.path or "")}">{rank} · id {hit.id} · {_text(name)}</div>'
        f"</figcaption></figure></li>"
    )


def _picture(path: str | None, side: int) -> str:
    """A small copy inside the page, which leads to the file; words where there is no picture."""
    if path is None:
        return '<div class="hole">no picture</div>'
    try:
        image = read_picture(path)
    except PictureError:
        return '<div class="hole">the picture cannot be read any more</div>'
    image.thumbnail((side, side))
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=82)
    data = base64.b64encode(stream.getvalue()).decode()
    link = escape(Path(path).resolve().as_uri())
    return f'<a href="{link}"><img src="data:image/jpeg;base64,{data}" alt="{_text(Path(path).name)}"></a>'


def _item(gallery: Gallery, id: int) -> tuple[str | None, str | None]:
    """Path and label of an item."""
    table = gallery._record.columns(["path", "label"], f"id = {id}")
    return table.column("path")[0].as_py(), table.column("label")[0].as_py()


def _text(value: str) -> str:
    # A file name may hold bytes that are no text; they must not break the page.
    return escape(value.encode("utf-8", "replace").decode())
