"""The findings of an audit: values, a table, JSON, CSV and an HTML page."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal, get_args

from rich.table import Table
from rich.text import Text

from kedge.console import printable, short_path
from kedge.errors import ConfigError
from kedge.gallery.html import frame, text, thumbnail, write_page

__all__ = ["CSV_COLUMNS", "KINDS", "Audit", "Finding", "Kind", "audit_page"]

Kind = Literal["leak", "duplicate", "near duplicate", "wrong label", "outlier"]
KINDS: tuple[Kind, ...] = get_args(Kind)
CSV_COLUMNS = ("accept", "kind", "score", "id", "label", "suggestion", "path", "other_id", "other_path")
_SIDE, _SMALL_SIDE = 320, 128
"""Of the thumbnails in the page."""


@dataclass(frozen=True)
class Finding:
    """One item that someone should look at."""

    kind: Kind
    id: int
    path: str | None
    label: str | None
    score: float
    """From 0 to 1, the surest first; comparable between kinds. Of a wrong label, the probability that it is wrong."""
    distance: float
    """To the other item (duplicates and leaks), or to its nearest neighbour."""
    suggestion: str | None = None
    """The label it should rather have; of a duplicate, that of the other item where the two differ."""
    other_id: int | None = None
    """The item it repeats; of a leak, the item in the other gallery."""
    other_path: str | None = None

    @property
    def likely(self) -> bool:
        """Whether it is more likely right than not; the others are worth a look."""
        return self.score >= 0.5


@dataclass(frozen=True)
class Audit:
    """Everything an audit found, the surest first, whatever its kind."""

    gallery: str
    items: int
    findings: Sequence[Finding]
    typical: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The paths of typical images of each label that a wrong label names: those nearest to the mean of the label."""

    def __len__(self) -> int:
        return len(self.findings)

    def by_kind(self, *kinds: Kind) -> list[Finding]:
        """The findings of these kinds, in their order."""
        if unknown := [kind for kind in kinds if kind not in KINDS]:
            raise ConfigError(f"kind must be one of {', '.join(KINDS)}, found {unknown[0]!r}.")
        return [finding for finding in self.findings if finding.kind in kinds]

    def counts(self, *, likely: bool = True) -> dict[Kind, int]:
        """How many of each kind are likely right or, with `likely` false, only worth a look."""
        counts = Counter(finding.kind for finding in self.findings if finding.likely == likely)
        return {kind: counts[kind] for kind in KINDS}

    def summary(self) -> str:
        """One line: what is likely, and what is worth a look."""
        likely, others = (_count(self.counts(likely=likely)) for likely in (True, False))
        return f"{self.items:,} items: {likely or 'nothing likely'}." + (f" Worth a look: {others}." if others else "")

    def to_json(self, rows: int | None = None) -> str:
        """The findings, or the first `rows` of them, as JSON text."""
        counts = {"counts": self.counts(), "worth_a_look": self.counts(likely=False)}
        findings = [asdict(finding) for finding in self.findings[:rows]]
        return json.dumps({"gallery": self.gallery, "items": self.items, **counts, "findings": findings}, indent=2)

    def to_csv(self, path: str | Path, rows: int | None = None) -> None:
        """Write the findings, or the first `rows`, as CSV; `apply_fixes` fixes those that say yes under `accept`."""
        try:
            with Path(path).open("w", encoding="utf-8", newline="") as file:
                writer = csv.DictWriter(file, CSV_COLUMNS, extrasaction="ignore")
                writer.writeheader()
                for finding in self.findings[:rows]:
                    writer.writerow({"accept": "no", **asdict(finding), "score": f"{finding.score:.3f}"})
        except OSError as error:
            raise ConfigError(f"{path} cannot be written ({error.strerror}): choose another path.") from error

    def table(self, rows: int | None = 20) -> Table:
        """The first findings as a rich table."""
        table = Table(box=None, pad_edge=False, header_style="bold", caption=self.summary(), caption_justify="left")
        for name in ("kind", "score", "label", "suggestion", "id", "path"):
            table.add_column(name, justify="right" if name in ("score", "id") else "left", overflow="fold")
        for row in self.findings[:rows]:
            path = short_path(row.path or "")
            if row.other_id is not None:
                path += f" like {row.other_id} {short_path(row.other_path or '')}"
            cells = (row.kind, f"{row.score:.2f}", row.label, row.suggestion, str(row.id), path.strip())
            table.add_row(*(Text(printable(cell or "")) for cell in cells))
        return table

    def __rich__(self) -> Table:
        return self.table()


def _count(counts: Mapping[Kind, int]) -> str:
    return ", ".join(f"{count:,} {kind}{'' if count == 1 else 's'}" for kind, count in counts.items() if count)


# ---------------------------------------------------------------------- the page


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
