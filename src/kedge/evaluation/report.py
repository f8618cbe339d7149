"""What an evaluation found: a value that is saved as ``metrics.json``."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from rich.console import RenderableType

from kedge.errors import DataError
from kedge.io import atomic_write

METHODS = ("brute_force", "brute_force_cosine", "label_lists", "label_lists_rest_last", "anchor_lists")
METRICS = ("mAP", "P@20", "P@100")


@dataclass(frozen=True)
class Report:
    """The scores of one model on one dataset; each method maps mAP, P@20 and P@100 to a number."""

    brute_force: dict[str, float]
    label_lists: dict[str, float]
    label_lists_rest_last: dict[str, float]
    anchor_lists: dict[str, float]
    accuracy: float
    knn1: float
    queries: int
    left_out: int
    meta: dict[str, Any] = field(default_factory=dict)
    brute_force_cosine: dict[str, float] = field(default_factory=dict)
    """By cosine instead of Euclidean distance; empty in a report of 0.1, which did not measure it."""

    def scores(self, method: str) -> dict[str, float]:
        """The scores of one of ``METHODS``."""
        values: dict[str, float] = getattr(self, method)
        return values

    def to_json(self) -> dict[str, Any]:
        """The content of ``metrics.json``."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Any) -> Self:
        """The report with this content; DataError where it is none."""
        names = {one.name for one in fields(cls)}
        if isinstance(content, dict) and "brute_force_cosine" not in content:
            content = {**content, "brute_force_cosine": {}}
        if not isinstance(content, dict) or content.keys() != names:
            raise DataError(f"A report has the keys {', '.join(sorted(names))}; this content has others.")
        for method in METHODS:
            scores = content[method]
            unmeasured = method == "brute_force_cosine" and scores == {}
            if not unmeasured and (not isinstance(scores, dict) or scores.keys() != set(METRICS)):
                raise DataError(f"{method} of a report needs the scores {', '.join(METRICS)}.")
        return cls(**content)

    def save(self, path: str | Path) -> None:
        """Write ``metrics.json``, all or nothing."""
        path = Path(path)
        text = json.dumps(self.to_json(), indent=2, ensure_ascii=False) + "\n"
        try:
            with atomic_write(path) as stream:
                stream.write(text.encode())
        except OSError as error:
            raise DataError(f"The report cannot be saved as {path}: {error.strerror}.") from error

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what :meth:`save` wrote."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(f"{path} cannot be read as metrics.json: {error}.") from error
        return cls.from_json(content)

    def __rich__(self) -> RenderableType:
        from kedge.evaluation.tables import show

        return show(self)
