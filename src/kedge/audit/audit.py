"""`audit`: go through a gallery once, and say what looks wrong."""

from __future__ import annotations

from kedge.audit.duplicates import find_copies, find_leaks, find_near, near_limit, neighbours
from kedge.audit.findings import KINDS, Audit
from kedge.audit.items import Items
from kedge.audit.places import find_outliers, find_wrong_labels, place
from kedge.errors import ConfigError
from kedge.gallery import Gallery

__all__ = ["audit"]


def audit(gallery: Gallery, *, against: Gallery | None = None) -> Audit:
    """Likely wrong labels, exact and near duplicates, outliers and, with `against`, leaks.

    A label is likely wrong where the anchor of another one is nearer. A leak is an item of `against`, such as the
    test pictures, that stands in `gallery` too. Everything is in one list, the surest first. Memory holds a few
    numbers per item and the vectors of one anchor's items at a time.
    """
    if against is not None:
        _check_comparable(gallery, against)
    items = Items(gallery)
    if len(items) == 0:
        raise ConfigError(f"{gallery.location} is empty: add pictures before an audit.")
    places = place(items)
    findings, unique = find_copies(items)
    near = neighbours(items, places.cells, unique)
    limit = near_limit(near)
    if limit is not None:
        findings += find_near(items, near, limit)
    if against is not None:
        findings += find_leaks(items, places, unique, near, limit, Items(against))
    findings += find_wrong_labels(items, places)
    findings += find_outliers(items, places)
    findings.sort(key=lambda one: (-one.score, KINDS.index(one.kind), one.id, one.other_id or 0))
    return Audit(str(gallery.location), len(items), findings, limit)


def _check_comparable(gallery: Gallery, against: Gallery) -> None:
    if gallery.dim != against.dim:
        raise ConfigError(f"against has vectors of {against.dim} numbers, {gallery.location} of {gallery.dim}.")
    models = [one.model.fingerprint if one.model is not None else None for one in (gallery, against)]
    if models[0] != models[1]:
        raise ConfigError(
            f"against was made with the model {models[1]}, {gallery.location} with {models[0]}: index it with the same."
        )
