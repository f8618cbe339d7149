"""`audit`: go through a gallery once, and say what looks wrong."""

from __future__ import annotations

from kedge.audit.duplicates import find_copies, find_leaks, find_near, near_limit, neighbours
from kedge.audit.items import Items
from kedge.audit.labels import find_outliers, find_wrong_labels, measure
from kedge.audit.report import KINDS, Audit
from kedge.errors import ConfigError
from kedge.gallery import Gallery

__all__ = ["audit"]


def audit(gallery: Gallery, *, against: Gallery | None = None) -> Audit:
    """Likely wrong labels, exact and near duplicates, outliers and, with `against`, leaks.

    A label is likely wrong where the anchor of another one is nearer. A leak is an item of `against`, such as the
    test images, that is in `gallery` too. Everything is in one list, the surest first. Memory holds a few numbers
    per item, the vectors of one anchor's items at a time, and the distances of one block of items to the anchors.
    """
    if against is not None:
        _check_comparable(gallery, against)
    items = Items(gallery)
    if len(items) == 0:
        raise ConfigError(f"{gallery.location} is empty: add images before an audit.")
    measured = measure(items)
    findings, unique = find_copies(items)
    near = neighbours(items, measured.cells, unique)
    limit = near_limit(near)
    if limit is not None:
        findings += find_near(items, near, limit)
    if against is not None:
        findings += find_leaks(items, measured.cells, unique, near, limit, Items(against))
    findings += find_wrong_labels(items, measured)
    findings += find_outliers(items, measured)
    findings.sort(key=lambda finding: (-finding.score, KINDS.index(finding.kind), finding.id, finding.other_id or 0))
    return Audit(str(gallery.location), len(items), findings, limit)


def _check_comparable(gallery: Gallery, against: Gallery) -> None:
    if gallery.dim != against.dim:
        raise ConfigError(f"against has vectors of {against.dim} numbers, {gallery.location} of {gallery.dim}.")
    own, other = (each.model.fingerprint if each.model is not None else None for each in (gallery, against))
    if own != other:
        raise ConfigError(
            f"against was made with the model {other}, {gallery.location} with {own}: index it with the same."
        )
