"""Labels as a gallery stores them: one spelling for what looks the same, nothing that nobody can see."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable

from kedge.errors import ConfigError

__all__ = ["normalized", "stored_label", "stored_labels"]

_BIDIRECTIONAL = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Controls that make a text look like another one."""


def normalized(label: str) -> str:
    """The composed form (NFC) of a label: systems differ in how they spell the names of folders."""
    return label if label.isascii() else unicodedata.normalize("NFC", label)


def stored_label(label: str) -> str:
    """A label in its composed form; raises where it is blank or holds bidirectional controls."""
    if not isinstance(label, str):
        raise ConfigError(f"labels must be texts or None, found {label!r}.")
    if not any(letter.isprintable() and not letter.isspace() for letter in label):
        raise ConfigError(f"labels must not be blank, found {label!r}: give None for an item without a label.")
    if not label.isascii() and not _BIDIRECTIONAL.isdisjoint(label):
        raise ConfigError(f"labels must not hold bidirectional control characters, found {label!a}: rename it.")
    return normalized(label)


def stored_labels(labels: Iterable[str | None]) -> list[str | None]:
    """The same of many, some of which may be None."""
    return [None if label is None else stored_label(label) for label in labels]
