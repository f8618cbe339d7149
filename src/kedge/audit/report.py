"""The findings of an audit: values, a table, JSON, and an HTML page that needs nothing else."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from rich.table import Table
from rich.text import Text

from kedge.errors import ConfigError
from kedge.gallery.html import frame, text, thumbnail, write_page

__all__ = ["KINDS", "Audit", "Finding", "Kind", "audit_page"]

Kind = Literal["leak", "duplicate", "near duplicate", "wrong label", "outlier"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_SIDE = 160


@dataclass(frozen=True)
class Finding:
    """One item that someone should look at."""

    kind: Kind
    id: int
    path: str | None
    label: str | None
    score: float
    """From 0 to 1, the surest first; comparable between kinds."""
    distance: float
    """To the other item (duplicates and leaks), or to the anchor of its own label."""
    suggestion: str | None = None
    """The label it should rather have; of a duplicate, that of the other item where the two differ."""
    other_id: int | None = None
    """The item it repeats; of a leak, the item in the other gallery."""
    other_path: str | None = None


@dataclass(frozen=True)
class Audit:
    """Everything an audit found, the surest first, whatever its kind."""

    gallery: str
    items: int
    findings: Sequence[Finding]
    limit: float | None
    """A near duplicate is nearer than this share of the distance to the fifth neighbour; None if none could be told."""

    def __len__(self) -> int:
        return len(self.findings)

    def by_kind(self, *kinds: Kind) -> list[Finding]:
        """The findings of these kinds, in their order."""
        if unknown := [kind for kind in kinds if kind not in KINDS]:
            raise ConfigError(f"kind must be one of {', '.join(KINDS)}, found {unknown[0]!r}.")
        return [finding for finding in self.findings if finding.kind in kinds]

    def counts(self) -> dict[Kind, int]:
        """How many of each kind."""
        counts = Counter(finding.kind for finding in self.findings)
        return {kind: counts[kind] for kind in KINDS}

    def summary(self) -> str:
        """One line."""
        parts = [f"{count:,} {kind}{'' if count == 1 else 's'}" for kind, count in self.counts().items() if count]
        return f"{self.items:,} items: {', '.join(parts) or 'nothing found'}."

    def to_json(self, rows: int | None = None) -> str:
        """The findings, or the first `rows` of them, as JSON text."""
        content = {"gallery": self.gallery, "items": self.items, "limit": self.limit, "counts": self.counts()}
        findings = [asdict(finding) for finding in self.findings[:rows]]
        return json.dumps({**content, "findings": findings}, indent=2)

    def table(self, rows: int | None = 20) -> Table:
        """The first findings as a rich table."""
        table = Table(box=None, pad_edge=False, header_style="bold", caption=self.summary(), caption_justify="left")
        for name in ("kind", "score", "label", "suggestion", "id", "path", "other"):
            table.add_column(name, justify="right" if name in ("score", "id") else "left", overflow="fold")
        for row in self.findings[:rows]:
            other = "" if row.other_id is None else f"{row.other_id} {row.other_path or ''}"
            cells = (row.kind, f"{row.score:.2f}", row.label, row.suggestion, str(row.id), row.path, other)
            table.add_row(*(Text(_printable(cell or "")) for cell in cells))
        return table

    def __rich__(self) -> Table:
        return self.table()


def _printable(text: str) -> str:
    """Without anything that would steer the terminal."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def audit_page(audit: Audit, path: str | Path, *, rows: int = 200) -> None:
    """Write the first `rows` findings as an HTML page, with their images in it as small copies."""
    shown = audit.findings[:rows]
    more = f" The first {len(shown):,} of {len(audit):,} findings, the surest first." if len(shown) < len(audit) else ""
    title = f"Audit of {Path(audit.gallery).name}"
    cards = "\n".join(map(_card, shown))
    body = f"<h1>{text(title)}</h1>\n<p>{text(audit.summary() + more)}</p>\n<ol>\n{cards}\n</ol>"
    write_page(frame(title, Path(__file__).with_name("report.css"), body), path)


def _card(finding: Finding) -> str:
    images, names = thumbnail(finding.path, _SIDE), _name(finding.id, finding.path)
    if finding.other_id is not None:
        images += thumbnail(finding.other_path, _SIDE)
        names += f"<br>{_name(finding.other_id, finding.other_path)}"
    labels = text(finding.label if finding.label is not None else "no label")
    if finding.suggestion is not None:
        word = "rather" if finding.kind == "wrong label" else "the other:"
        labels += f" · {word} <b>{text(finding.suggestion)}</b>"
    return (
        f'<li><div class="pictures">{images}</div><div class="words">'
        f'<div class="row"><span class="kind">{finding.kind}</span>'
        f'<span class="score" title="how sure, from 0 to 1">{finding.score:.2f}</span></div>'
        f'<div class="labels">{labels}</div><div class="path">{names}</div></div></li>'
    )


def _name(id: int, path: str | None) -> str:
    return f"id {id}" if path is None else f'id {id} · <span title="{text(path)}">{text(Path(path).name)}</span>'
