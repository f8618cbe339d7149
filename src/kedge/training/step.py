"""What happens to a batch up to its loss: change, mix, embed, compare. One module, so that it compiles as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kedge.images import Mixing
from kedge.losses import RetrievalLoss

__all__ = ["Draws", "Outcome", "Prepare", "Step"]


class Prepare(NamedTuple):
    """How a fetched batch becomes what the network takes."""

    draw: Callable[[int, torch.Generator, torch.device], Tensor]
    """The numbers by which `change` augments so many inputs."""
    change: Callable[[Tensor, Tensor], Tensor]
    plain: Callable[[Tensor], Tensor]
    """Without augmentation."""


class Draws(NamedTuple):
    """All chance of one step, drawn before it."""

    change: Tensor
    mixing: Tensor


class Embedded(NamedTuple):
    """Embeddings and, where images were mixed, each one's partner and the share that is its own."""

    embeddings: Tensor
    mixed: tuple[Tensor, Tensor] | None


class Outcome(NamedTuple):
    """The loss, and what is counted: its value, its parts in the order of `names`, and the embeddings' spread."""

    loss: Tensor
    counted: Tensor
    names: tuple[str, ...]


class Step(nn.Module):
    """The forward half of a training step."""

    def __init__(
        self, network: nn.Module, loss: RetrievalLoss, prepare: Prepare, mixing: Mixing, *, mirror: bool = False
    ) -> None:
        super().__init__()
        self.network, self.loss = network, loss
        self.prepare, self.mixing = prepare, mixing
        self.mirror = mirror
        """Whether the model will look at mirrored pictures too."""

    def draw(self, inputs: Tensor, chance: torch.Generator) -> Draws:
        """The numbers of one step."""
        count, device = len(inputs), inputs.device
        return Draws(self.prepare.draw(count, chance, device), self.mixing.draw(count, chance, device))

    def forward(self, inputs: Tensor, labels: Tensor, draws: Draws) -> Outcome:
        """Loss and counts of a batch."""
        return self.compare(self.embed(inputs, draws), labels)

    def embed(self, inputs: Tensor, draws: Draws) -> Embedded:
        """The images changed, mixed and sent through the network."""
        images = self.prepare.change(inputs, draws.change)
        if not (self.mixing.cutmix or self.mixing.mixup):
            return Embedded(self.network(images), None)
        mixed = self.mixing.apply(images, draws.mixing)
        return Embedded(self.network(mixed.images), (mixed.partners, mixed.weights))

    def look(self, inputs: Tensor) -> Tensor:
        """The embeddings that the model will give."""
        images = self.prepare.plain(inputs)
        found: Tensor = self.network(images, mirror=True) if self.mirror else self.network(images)
        return found

    def compare(self, embedded: Embedded, labels: Tensor) -> Outcome:
        """What the loss says of embeddings."""
        embeddings = embedded.embeddings
        if embedded.mixed is None:
            parts = self.loss.components(embeddings, labels)
        else:
            partners, weights = embedded.mixed
            parts = self.loss.mixed_components(embeddings, labels, labels[partners], weights)
        values = torch.stack(list(parts.values()))
        total = values.sum()
        with torch.no_grad():
            points = embeddings.detach().float()
            spread = (points - points.mean(0)).square().sum(1).mean()
            counted = torch.cat([total.reshape(1), values, spread.reshape(1)]).double()
        return Outcome(total, counted, ("loss", *parts, "_spread"))
