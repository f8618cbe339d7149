"""`audit`: go through a gallery once, and say what looks wrong."""

from __future__ import annotations

from kedge.audit.duplicates import COUNT, find_copies, find_leaks, find_near
from kedge.audit.items import Items, find_neighbours
from kedge.audit.labels import find_outliers, find_wrong_labels, typical_images
from kedge.audit.report import KINDS, Audit, Finding
from kedge.errors import ConfigError
from kedge.gallery import Gallery

__all__ = ["audit"]


def audit(gallery: Gallery, *, against: Gallery | None = None) -> Audit:
    """Likely wrong labels, exact and near duplicates, outliers and, with `against`, leaks.

    By looks: the features of all items or, in a gallery that keeps none, their embeddings. A leak is an item of
    `against`, such as the test images, that is in `gallery` too. Everything is in one list, the surest first. Memory
    holds a few numbers per item and the vectors of some thousand of them at a time.
    """
    galleries = [gallery] if against is None else [gallery, against]
    if against is not None:
        _check_comparable(gallery, against)
    looks = all(each.features and len(each.verified_snapshot(looks=True)) == len(each) for each in galleries)
    items = Items(gallery, looks=looks)
    if len(items) == 0:
        raise ConfigError(f"{gallery.location} is empty; add images before an audit.")
    findings: list[Finding]
    findings, unique = find_copies(items)
    near = find_neighbours(items, unique, items, unique, COUNT)
    findings += find_near(items, near)
    if against is not None:
        findings += find_leaks(items, unique, near, Items(against, looks=looks))
    findings += find_wrong_labels(items, unique, near)
    findings += find_outliers(items, unique, near)
    findings.sort(key=lambda finding: (-finding.score, KINDS.index(finding.kind), finding.id, finding.other_id or 0))
    return Audit(str(gallery.location), len(items), findings, typical_images(items, unique, findings))


def _check_comparable(gallery: Gallery, against: Gallery) -> None:
    if gallery.dim != against.dim:
        raise ConfigError(
            f"against has embeddings of {against.dim} dimensions, {gallery.location} of {gallery.dim}; index both "
            "with the same model."
        )
    own, other = (each.model.fingerprint if each.model is not None else None for each in (gallery, against))
    if own != other:
        raise ConfigError(
            f"against was made with the model {other}, {gallery.location} with {own}; index both with the same model."
        )
