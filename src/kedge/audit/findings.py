"""What an audit found, as values: a list to go through from the top, a table, JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal, get_args

from rich.table import Table
from rich.text import Text

from kedge.errors import ConfigError

__all__ = ["KINDS", "Audit", "Finding", "Kind"]

Kind = Literal["leak", "duplicate", "near duplicate", "wrong label", "outlier"]
KINDS: tuple[Kind, ...] = get_args(Kind)


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
        found = Counter(finding.kind for finding in self.findings)
        return {kind: found[kind] for kind in KINDS}

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
        for one in self.findings[:rows]:
            other = "" if one.other_id is None else f"{one.other_id} {one.other_path or ''}"
            texts = (one.kind, f"{one.score:.2f}", one.label, one.suggestion, str(one.id), one.path, other)
            table.add_row(*(Text(_printable(text or "")) for text in texts))
        return table

    def __rich__(self) -> Table:
        return self.table()


def _printable(text: str) -> str:
    """Without anything that would steer the terminal."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)
