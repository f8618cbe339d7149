"""An audit as one HTML page that needs nothing else: the pictures are in it, as small copies."""

from __future__ import annotations

from pathlib import Path

from kedge.audit.findings import Audit, Finding
from kedge.gallery.html import frame, text, thumbnail, write_page

__all__ = ["audit_page"]

_SIDE = 160
_STYLE = """
main { max-width: 1400px; margin: 0 auto; padding: 32px; }
h1 { font-size: 20px; margin: 0 0 4px; overflow-wrap: anywhere; }
p { margin: 0 0 24px; color: var(--soft); }
ol { grid-template-columns: repeat(auto-fill, minmax(280px, 1fr)); }
li { background: var(--card); border: 1px solid var(--line); border-radius: 10px; overflow: hidden; }
.pictures { display: flex; gap: 1px; background: var(--line); }
.pictures > * { flex: 1 1 0; min-width: 0; height: 160px; object-fit: contain; background: var(--hole); }
.words { padding: 10px 12px; }
.kind { font-weight: 600; }
.score { font-variant-numeric: tabular-nums; color: var(--soft); }
.labels { overflow-wrap: anywhere; }
.labels b { color: var(--warn); }
.path { font-size: 12px; color: var(--soft); overflow-wrap: anywhere; }
@media (max-width: 700px) { main { padding: 16px; } }
"""


def audit_page(audit: Audit, path: str | Path, *, rows: int = 200) -> None:
    """Write the first `rows` findings with their pictures as a page."""
    shown = audit.findings[:rows]
    more = f" The first {len(shown):,} of {len(audit):,} findings, the surest first." if len(shown) < len(audit) else ""
    title = f"Audit of {Path(audit.gallery).name}"
    cards = "\n".join(map(_card, shown))
    body = f"<h1>{text(title)}</h1>\n<p>{text(audit.summary() + more)}</p>\n<ol>\n{cards}\n</ol>"
    write_page(frame(title, _STYLE, body), path)


def _card(one: Finding) -> str:
    pictures, names = thumbnail(one.path, _SIDE), _name(one.id, one.path)
    if one.other_id is not None:
        pictures += thumbnail(one.other_path, _SIDE)
        names += f"<br>{_name(one.other_id, one.other_path)}"
    labels = text(one.label if one.label is not None else "no label")
    if one.suggestion is not None:
        word = "rather" if one.kind == "wrong label" else "the other:"
        labels += f" · {word} <b>{text(one.suggestion)}</b>"
    return (
        f'<li><div class="pictures">{pictures}</div><div class="words">'
        f'<div class="row"><span class="kind">{one.kind}</span>'
        f'<span class="score" title="how sure, from 0 to 1">{one.score:.2f}</span></div>'
        f'<div class="labels">{labels}</div><div class="path">{names}</div></div></li>'
    )


def _name(id: int, path: str | None) -> str:
    return f"id {id}" if path is None else f'id {id} · <span title="{text(path)}">{text(Path(path).name)}</span>'
