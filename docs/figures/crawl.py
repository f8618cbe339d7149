"""The figure of many classes in explanation/loss.md.

python docs/figures/crawl.py        trains small encoders on noisy class mixtures: less than a minute on one idle core

For each number of classes t and each loss, a small MLP is trained from scratch. Measured on 1,024 fresh points:

gradient    RMS over points of ‖∂ℓ_i/∂f_i‖, the gradient that point i's own loss sends to the encoder's output f_i,
            divided by the RMS of ‖e_i − c_y‖, the distance left to the anchor: a solved task has no gradient either.
spread      mean squared distance of embeddings to their mean, over the same of the anchors: the guard of
            training/module.py warns where this is small.

Anchors stay where they start, exactly 2m apart, where repeller and minimum norm are zero.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator
from style import COLOURS, Theme, draw
from torch import Tensor, nn

from kedge import CAMLoss
from kedge.encoders.heads import build_head

CLASSES = (10, 30, 100, 300, 1000)
INPUTS, HIDDEN, WIDTH = 64, 128, 500
"""Of the encoder; twice 500 axes hold 1,000 anchors."""
NOISE = 2.0
"""Per input, where class means have a standard deviation of 1."""
BATCH, STEPS, RATE, MOMENTUM, DECAY = 512, 100, 0.1, 0.9, 5e-4
MARKS = (10, 33, STEPS)
"""Steps after which is measured; the figure shows the last."""
LONGER = (33, 100, 200, 400)
"""The same of longer runs, with 300 classes."""
POINTS = 1024
IDLE = 0.15
"""A run is idle that has such a spread after half of its epochs (`_IDLE_AT_MOST` in training/module.py)."""

PAPER, ALONE, CURED = "paper's loss", "expected anchor, attractor alone", "discriminate=4"
LOSSES = {PAPER: COLOURS[0], ALONE: COLOURS[4], CURED: COLOURS[1]}
HEADS = {PAPER: "bounded", ALONE: "none", CURED: "none"}
"""As the recipes have them: the classifier of `discriminate` reads the features themselves."""


class Measured(NamedTuple):
    """What is left of a run after so many steps."""

    gradient: float
    spread: float
    accuracy: float


class Mixture:
    """Points around random class means, drawn without end."""

    def __init__(self, classes: int, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.means = torch.randn(classes, INPUTS, generator=self.generator)

    def draw(self, count: int) -> tuple[Tensor, Tensor]:
        """Points and their classes."""
        labels = torch.randint(len(self.means), (count,), generator=self.generator)
        noise = torch.randn(count, INPUTS, generator=self.generator)
        return self.means[labels] + NOISE * noise, labels


class Run:
    """An encoder, its head and its loss, with the optimiser of recipe kedge at a constant rate."""

    def __init__(self, name: str, classes: int, head: str | None = None, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.name = name
        self.mixture = Mixture(classes, seed + 1)
        layers = [
            layer
            for inputs, outputs in ((INPUTS, HIDDEN), (HIDDEN, WIDTH))
            for layer in (nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs), nn.ReLU())
        ]
        self.encoder = nn.Sequential(*layers)
        self.head = build_head(head or HEADS[name], WIDTH, WIDTH)
        discriminate = 0.0 if name == PAPER else 4.0
        self.loss = CAMLoss(classes, WIDTH, discriminate=discriminate, repel=False, keep_norm=False)
        self.loss.anchors.requires_grad_(False)
        own = [weight for weight in self.loss.parameters() if weight.requires_grad]
        groups = [
            {"params": [*self.encoder.parameters(), *self.head.parameters()], "weight_decay": DECAY},
            # The curvature of a log loss grows as classes get fewer.
            {"params": own, "lr": RATE * min(1.0, classes / 40)},
        ]
        groups = [group for group in groups if group["params"]]
        self.optimizer = torch.optim.SGD(groups, lr=RATE, momentum=MOMENTUM, nesterov=True)

    def gradients(self, points: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Leave the gradients of the loss in all weights; the encoder's outputs (with theirs) and the head's."""
        features = self.encoder(points)
        features.retain_grad()
        outputs = self.head(features)
        parts = self.loss.components(outputs, labels)
        if self.name == ALONE:
            del parts["discriminate"]
        self.optimizer.zero_grad()
        sum(parts.values(), start=torch.zeros(())).backward()
        return features, outputs.detach()

    @torch.no_grad()
    def measure(self, points: Tensor, labels: Tensor) -> Measured:
        """Gradient and spread, as said above, and the share of points whose own anchor is the nearest."""
        with torch.enable_grad():
            features, outputs = self.gradients(points, labels)
        assert features.grad is not None
        anchors, embeddings = self.loss.anchors, self.loss.embed(outputs)
        left = (embeddings - anchors[labels]).square().sum(1).mean()
        # The loss is a mean over points: times their number, the gradient of each is that of its own loss.
        reaching = (features.grad * len(points)).square().sum(1).mean()
        accuracy = (self.loss.predict(embeddings) == labels).float().mean()
        return Measured(float((reaching / left).sqrt()), float(spread(embeddings) / spread(anchors)), float(accuracy))

    def train(self, marks: tuple[int, ...] = MARKS) -> list[Measured]:
        """What is measured after so many steps."""
        held_out = self.mixture.draw(POINTS)
        found = []
        for step in range(1, marks[-1] + 1):
            self.gradients(*self.mixture.draw(BATCH))
            self.optimizer.step()
            if step in marks:
                found.append(self.measure(*held_out))
        return found


def spread(points: Tensor) -> Tensor:
    """Mean squared distance to the mean."""
    return (points - points.mean(0)).square().sum(1).mean()


def measured() -> dict[str, list[Measured]]:
    """All runs, printed after each of `MARKS`; returned after the last."""
    print(f"{'':55}" + "".join(f"{f't={classes}':>10}" for classes in CLASSES))
    last: dict[str, list[Measured]] = {}
    for name in LOSSES:
        runs = [Run(name, classes).train() for classes in CLASSES]
        for mark, at in zip(MARKS, zip(*runs, strict=True), strict=True):
            tell(f"{name:34}{mark:4} steps", list(at))
        last[name] = [run[-1] for run in runs]
    return last


def longer() -> None:
    """Whether the loss or the head makes the difference: the classifier on bounded features, too."""
    print(f"{'':55}" + "".join(f"{f'{mark} steps':>10}" for mark in LONGER))
    for name, head in ((PAPER, "bounded"), (CURED, "batchnorm"), (CURED, "none")):
        tell(f"{name + ', t=300, head ' + head:44}", Run(name, 300, head).train(LONGER))


def tell(what: str, found: list[Measured]) -> None:
    """Print a line for each measure."""
    for title, values in zip(Measured._fields, zip(*found, strict=True), strict=True):
        print(f"{what}  {title:9}" + "".join(f"{value:10.2g}" for value in values))


def plotted(found: dict[str, list[Measured]], theme: Theme) -> Figure:
    """Gradient and spread over the number of classes."""
    figure = Figure((9.6, 4.0), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, colour in LOSSES.items():
        for axes, values in ((left, [at.gradient for at in found[name]]), (right, [at.spread for at in found[name]])):
            axes.plot(CLASSES, values, color=colour, linewidth=2, marker="o", markersize=4, label=name)
    first = found[PAPER][0].gradient
    left.plot(CLASSES, [first * CLASSES[0] / t for t in CLASSES], color=theme.ink, linestyle=":", linewidth=1)
    left.text(CLASSES[-1], first * CLASSES[0] / CLASSES[-1] * 0.6, "1/t", ha="right", va="top", style="italic")
    right.axhline(IDLE, color=theme.ink, linestyle=":", linewidth=1)
    right.text(CLASSES[0], IDLE * 0.8, "below: idle after half a run", ha="left", va="top")
    over_classes(left, "Gradient that reaches the encoder", "per distance left to the anchor", 1e-5, 20)
    over_classes(right, "Spread of the embeddings", "share of the anchors' spread", 1e-5, 2)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def over_classes(axes: Axes, title: str, label: str, lowest: float, highest: float) -> None:
    """Logarithmic axes, with a tick for each number of classes."""
    axes.set(xscale="log", yscale="log", xlabel="classes t", ylabel=label, title=title, ylim=(lowest, highest))
    axes.xaxis.set_major_locator(FixedLocator(CLASSES))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels([f"{t:,}" for t in CLASSES])


if __name__ == "__main__":
    torch.set_num_threads(1)
    began = time.perf_counter()
    runs = measured()
    longer()
    print(f"{time.perf_counter() - began:.0f} seconds")
    draw("loss-crawl", lambda theme: plotted(runs, theme))
