"""The HTML page of an audit: a card for each finding, with its images in it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from kedge.audit.report import Audit, Finding
from kedge.gallery.html import frame, text, thumbnail, write_page

__all__ = ["audit_page"]

_SIDE, _SMALL_SIDE = 320, 128


def audit_page(audit: Audit, path: str | Path, *, rows: int = 200) -> None:
    """Write the first `rows` findings as an HTML page, with their images in it as small copies.

    Beside a wrong label stand typical images of its label and of the one that is suggested.
    """
    shown = audit.findings[:rows]
    more = f" The first {len(shown):,} of {len(audit):,} findings, the surest first." if len(shown) < len(audit) else ""
    title = f"Audit of {Path(audit.gallery).name}"
    small = cache(lambda file: thumbnail(file, _SMALL_SIDE))

    def classes(finding: Finding) -> str:
        rows = [("labelled", finding.label), ("rather", finding.suggestion)]
        return "".join(
            f'<div class="class"><div class="label">{word} <b>{text(label)}</b></div>'
            f'<div class="typical">{"".join(map(small, audit.typical.get(label, ())))}</div></div>'
            for word, label in rows
            if label is not None
        )

    def section(name: str, findings: Sequence[Finding]) -> str:
        cards = "\n".join(_card(one, classes(one) if one.kind == "wrong label" else "") for one in findings)
        return f"<h2>{name}</h2>\n<ol>\n{cards}\n</ol>\n" if findings else ""

    likely = section("Likely", [finding for finding in shown if finding.likely])
    others = section("Worth a look", [finding for finding in shown if not finding.likely])
    body = f"<h1>{text(title)}</h1>\n<p>{text(audit.summary() + more)}</p>\n{likely}{others}"
    write_page(frame(title, Path(__file__).with_name("report.css"), body), path)


def _card(finding: Finding, classes: str) -> str:
    images, names = thumbnail(finding.path, _SIDE), _name(finding.id, finding.path)
    if finding.other_id is not None:
        images += thumbnail(finding.other_path, _SIDE)
        names += f"<br>{_name(finding.other_id, finding.other_path)}"
    if not classes:
        classes = f'<div class="label">{text(finding.label if finding.label is not None else "no label")}'
        classes += f" · the other: <b>{text(finding.suggestion)}</b></div>" if finding.suggestion else "</div>"
    return (
        f'<li><div class="pictures">{images}</div><div class="words">'
        f'<div class="row"><span class="kind">{finding.kind}</span>'
        f'<span class="score" title="how sure, from 0 to 1">{finding.score:.2f}</span></div>'
        f'{classes}<div class="path">{names}</div></div></li>'
    )


def _name(id: int, path: str | None) -> str:
    return f"id {id}" if path is None else f'id {id} · <span title="{text(path)}">{text(Path(path).name)}</span>'
