"""An audit as one HTML page that needs nothing else: the pictures are in it, as small copies."""

from __future__ import annotations

import base64
import io
from html import escape
from pathlib import Path

from kedge.audit.findings import Audit, Finding
from kedge.errors import ConfigError, PictureError
from kedge.images import read_picture

__all__ = ["audit_page"]

_SIDE = 160

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
  --warn: light-dark(#a33a12, #f0a07a);
}}
* {{ box-sizing: border-box; }}
body {{ margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.45 system-ui, sans-serif; }}
main {{ max-width: 1400px; margin: 0 auto; padding: 32px; }}
h1 {{ font-size: 20px; margin: 0 0 4px; overflow-wrap: anywhere; }}
p {{ margin: 0 0 24px; color: var(--soft); }}
ol {{ list-style: none; display: grid; grid-template-columns: repeat(auto-fill, minmax(280px, 1fr)); gap: 16px;
  margin: 0; padding: 0; }}
li {{ background: var(--card); border: 1px solid var(--line); border-radius: 10px; overflow: hidden; }}
.pictures {{ display: flex; gap: 1px; background: var(--line); }}
.pictures > * {{ flex: 1 1 0; min-width: 0; height: 160px; object-fit: contain; background: var(--hole); }}
.hole {{ display: grid; place-items: center; padding: 12px; color: var(--soft); text-align: center; font-size: 13px; }}
.words {{ padding: 10px 12px; }}
.row {{ display: flex; justify-content: space-between; gap: 8px; }}
.kind {{ font-weight: 600; }}
.score {{ font-variant-numeric: tabular-nums; color: var(--soft); }}
.labels {{ overflow-wrap: anywhere; }}
.labels b {{ color: var(--warn); }}
.path {{ font-size: 12px; color: var(--soft); overflow-wrap: anywhere; }}
@media (max-width: 700px) {{ main {{ padding: 16px; }} }}
</style>
</head>
<body>
<main>
<h1>{title}</h1>
<p>{summary}</p>
<ol>
{findings}
</ol>
</main>
</body>
</html>
"""


def audit_page(audit: Audit, path: str | Path, *, rows: int = 200) -> None:
    """Write the first `rows` findings with their pictures as a page."""
    shown = audit.findings[:rows]
    more = f" The first {len(shown):,} of {len(audit):,} findings, the surest first." if len(shown) < len(audit) else ""
    page = _PAGE.format(
        title=_text(f"Audit of {Path(audit.gallery).name}"),
        summary=_text(audit.summary() + more),
        findings="\n".join(map(_card, shown)),
    )
    try:
        Path(path).write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}): choose another path.") from error


def _card(one: Finding) -> str:
    pictures, names = _picture(one.path), _name(one.id, one.path)
    if one.other_id is not None:
        pictures += _picture(one.other_path)
        names += f"<br>{_name(one.other_id, one.other_path)}"
    labels = _text(one.label if one.label is not None else "no label")
    if one.suggestion is not None:
        word = "rather" if one.kind == "wrong label" else "the other:"
        labels += f" · {word} <b>{_text(one.suggestion)}</b>"
    return (
        f'<li><div class="pictures">{pictures}</div><div class="words">'
        f'<div class="row"><span class="kind">{one.kind}</span>'
        f'<span class="score" title="how sure, from 0 to 1">{one.score:.2f}</span></div>'
        f'<div class="labels">{labels}</div><div class="path">{names}</div></div></li>'
    )


def _name(id: int, path: str | None) -> str:
    return f"id {id}" if path is None else f'id {id} · <span title="{_text(path)}">{_text(Path(path).name)}</span>'


def _picture(path: str | None) -> str:
    if path is None:
        return '<div class="hole">no picture</div>'
    try:
        image = read_picture(path)
    except PictureError:
        return '<div class="hole">the picture cannot be read</div>'
    image.thumbnail((_SIDE, _SIDE))
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=80)
    data = base64.b64encode(stream.getvalue()).decode()
    return f'<img src="data:image/jpeg;base64,{data}" alt="{_text(Path(path).name)}" loading="lazy">'


def _text(value: str) -> str:
    # A file name may hold bytes that are no text; they must not break the page.
    return escape(value.encode("utf-8", "replace").decode())
