"""The findings of an audit: values, a table, JSON and CSV."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, get_args

from rich.table import Table
from rich.text import Text

from kedge.errors import ConfigError

__all__ = ["CSV_COLUMNS", "KINDS", "Audit", "Finding", "Kind"]

Kind = Literal["leak", "duplicate", "near duplicate", "wrong label", "outlier"]
KINDS: tuple[Kind, ...] = get_args(Kind)
CSV_COLUMNS = ("accept", "kind", "score", "id", "label", "suggestion", "path", "other_id", "other_path")


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
        for name in ("kind", "score", "label", "suggestion", "id", "path", "other"):
            table.add_column(name, justify="right" if name in ("score", "id") else "left", overflow="fold")
        for row in self.findings[:rows]:
            other = "" if row.other_id is None else f"{row.other_id} {row.other_path or ''}"
            cells = (row.kind, f"{row.score:.2f}", row.label, row.suggestion, str(row.id), row.path, other)
            table.add_row(*(Text(_printable(cell or "")) for cell in cells))
        return table

    def __rich__(self) -> Table:
        return self.table()


def _count(counts: Mapping[Kind, int]) -> str:
    return ", ".join(f"{count:,} {kind}{'' if count == 1 else 's'}" for kind, count in counts.items() if count)


def _printable(text: str) -> str:
    """Without anything that would steer the terminal."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
