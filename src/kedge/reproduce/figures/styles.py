"""The colour and marker of each loss, the same in every figure."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

__all__ = ["FIXED", "RIVALS", "Style", "canonical", "shown_name", "styles_of"]


@dataclass(frozen=True)
class Style:
    """How one loss looks in every figure."""

    colour: str
    marker: str


# Apart for every common kind of colour blindness; markers say the same without colour.
FIXED = {
    "cam": Style("#d55e00", "o"),
    "cross_entropy": Style("#0072b2", "s"),
    "contrastive": Style("#009e73", "^"),
}
# The rivals that Kedge ships have the first of these for good; any other loss one that its name picks.
RIVALS = ("triplet", "arcface", "proxy_anchor", "cosface", "multi_similarity", "supcon", "center")
OTHER_COLOURS = ("#cc79a7", "#56b4e9", "#e69f00", "#332288", "#882255", "#999933", "#1a1a1a", "#8c510a", "#8a8a8a")
OTHER_MARKERS = ("D", "v", "P", "X", "<", ">", "p", "h", "*")


def styles_of(losses: Iterable[str]) -> dict[str, Style]:
    """The looks of losses that share a figure: where two would look alike, the later name takes the next free look."""
    names = {loss: canonical(loss) for loss in losses}
    looks = dict(FIXED)
    count = len(OTHER_COLOURS)
    taken: set[int] = set()
    others = set(names.values()) - set(FIXED)
    for name in [*(rival for rival in RIVALS if rival in others), *sorted(others - set(RIVALS))]:
        wanted = RIVALS.index(name) if name in RIVALS else zlib.crc32(name.encode()) % count
        tries = [turn * count + (wanted + step) % count for turn in range(count) for step in range(count)]
        place = next((place for place in tries if place not in taken), wanted)
        taken.add(place)
        looks[name] = Style(OTHER_COLOURS[place % count], OTHER_MARKERS[(place + place // count) % count])
    return {loss: looks[name] for loss, name in names.items()}


def canonical(loss: str) -> str:
    """The name by which a loss has its looks: ``Cross-entropy`` → ``cross_entropy``."""
    return loss.strip().lower().replace("-", "_").replace(" ", "_")


def shown_name(loss: str, labels: Mapping[str, str] | None) -> str:
    """What a loss is called in a figure: its label or, without one, its own name."""
    return (labels or {}).get(loss, loss)
