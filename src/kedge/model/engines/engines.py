"""`Engines`: what a model holds to embed with."""

from __future__ import annotations

import os
import threading
from typing import Any

import torch
from torch import Tensor

from kedge.encoders import Encoder
from kedge.model.engines.choosing import Choice
from kedge.model.engines.watching import is_plain
from kedge.model.engines.ways import check_name

__all__ = ["Engines"]


class Engines:
    """Runs an encoder in the best way, or in the one that is asked for; `None` asks `$KEDGE_ENGINE`, then for auto.

    A copy (`copy.deepcopy`, pickle) has the same wish and begins anew.
    """

    def __init__(self, wish: str | None = None) -> None:
        self._wish = check_name(wish or os.environ.get("KEDGE_ENGINE") or "auto")
        self._lock = threading.Lock()
        self._choice: Choice | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Engines, (self._wish,)

    def embed(self, encoder: Encoder, images: Tensor, *, mirror: bool) -> Tensor:
        """Embeddings of standardised images by an encoder that evaluates; call it in inference mode."""
        choice = None if self._wish == "eager" or len(images) == 0 else self._chosen(encoder, mirror)
        if choice is None:
            found: Tensor = encoder(images, mirror=mirror)
            return found
        return choice.embed(images)

    def tune(self, encoder: Encoder, images: Tensor, *, mirror: bool) -> None:
        """Measure now, and make the best way for batches like this one."""
        choice = self._chosen(encoder, mirror) if self._wish == "auto" else None
        if choice is not None:
            choice.tune(images)

    def describe(self, encoder: Encoder) -> str:
        """What runs, and why, in words."""
        if self._wish == "eager":
            return "eager: asked for"
        if not is_plain(encoder):
            return f"{self._wish}: eager, since the encoder is {_state(encoder)}"
        choice = self._choice
        found = "nothing embedded yet" if choice is None or not choice.watch.holds(encoder) else choice.describe()
        return f"{self._wish}: {found}"

    def _chosen(self, encoder: Encoder, mirror: bool) -> Choice | None:
        """The choice for the encoder as it is now; None where it must be run as it is."""
        if torch.is_autocast_enabled("cpu"):
            return None
        with self._lock:
            if self._choice is None or self._choice.mirror != mirror or not self._choice.watch.holds(encoder):
                with torch.inference_mode(False):
                    self._choice = Choice(encoder, self._wish, mirror=mirror) if is_plain(encoder) else None
            return self._choice


def _state(encoder: Encoder) -> str:
    first = next(encoder.parameters(), None)
    if first is not None and first.device.type != "cpu":
        return f"on {first.device}"
    return "in training" if encoder.training else "hooked, under autocast, or not in float32"
