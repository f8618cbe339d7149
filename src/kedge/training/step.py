"""What happens to a batch up to its loss: change, mix, embed, compare. One module, so that it compiles as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kedge.distributed import all_gather_rows, all_gather_with_grad
from kedge.images import Mixing
from kedge.losses import RetrievalLoss
from kedge.losses.base import in_full_precision
from kedge.training.chance import OwnChance

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

    def of(self, start: int, stop: int) -> Draws:
        """Those of some of the pictures."""
        return Draws(self.change[:, start:stop], self.mixing[:, start:stop])


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
    """The forward half of a training step.

    One of several processes has a part of the batch. It mixes pictures of its own part with each other; a loss that
    compares pictures sees those of all processes.
    """

    def __init__(
        self,
        network: nn.Module,
        loss: RetrievalLoss,
        prepare: Prepare,
        mixing: Mixing,
        *,
        mirror: bool = False,
        together: bool = False,
    ) -> None:
        super().__init__()
        self.network, self.loss = network, loss
        self.prepare, self.mixing = prepare, mixing
        self.mirror = mirror
        """Whether the model will look at mirrored pictures too."""
        self.gathers = together and loss.uses_other_samples
        """Whether the loss sees the pictures of all processes."""
        # A loss that compiles draws nothing: then all chance is our own.
        self.chance = OwnChance() if together and not loss.compiles else None

    def draw(self, inputs: Tensor, chance: torch.Generator, parts: int = 1) -> Draws:
        """The numbers of one step, for a batch of so many parts like `inputs`."""
        count, device = len(inputs) * parts, inputs.device
        return Draws(self.prepare.draw(count, chance, device), self.mixing.draw(count, chance, device))

    def forward(self, inputs: Tensor, labels: Tensor, draws: Draws) -> Outcome:
        """Loss and counts of a batch."""
        return self.compare(self.by_own_chance(self.embed, inputs, draws), labels)

    def by_own_chance(self, embed: Callable[[Tensor, Draws], Embedded], inputs: Tensor, draws: Draws) -> Embedded:
        """What `embed` makes of a batch, with whatever the network draws."""
        if self.chance is None:
            return embed(inputs, draws)
        with self.chance.drawn(inputs.device):
            return embed(inputs, draws)

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
        found: Tensor = self.network(images, flip_tta=True) if self.mirror else self.network(images)
        return found

    def compare(self, embedded: Embedded, labels: Tensor) -> Outcome:
        """What the loss says of embeddings."""
        embeddings = embedded.embeddings
        parts = self._parts(embedded, labels)
        values = torch.stack(list(parts.values()))
        total = values.sum()
        with torch.no_grad():
            points = self.loss.embed(in_full_precision(embeddings.detach()))
            spread = (points - points.mean(0)).square().sum(1).mean()
            counted = torch.cat([total.reshape(1), values, spread.reshape(1)]).double()
        return Outcome(total, counted, ("loss", *parts, "_spread"))

    def _parts(self, embedded: Embedded, labels: Tensor) -> dict[str, Tensor]:
        embeddings, mixed = embedded
        others, weights = (labels[mixed[0]], mixed[1]) if mixed else (None, None)
        if self.gathers:
            # Summed on the way back, where the trainer averages over processes: the gradient of the whole batch.
            embeddings = all_gather_with_grad(in_full_precision(embeddings))
            labels = all_gather_rows(labels)
            others, weights = (None if one is None else all_gather_rows(one) for one in (others, weights))
        if others is None or weights is None:
            return self.loss.components(embeddings, labels)
        return self.loss.mixed_components(embeddings, labels, others, weights)
