"""The figures of explanation/loss.md.

python docs/figures/loss.py FOLDER        trains what is not in FOLDER yet: some minutes on two cores
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle
from style import COLOURS, Theme, draw
from trained import model, pictures

from kedge import CAMLoss
from kedge.losses.cam import attractor, minimum_norm, repeller

CLASSES, EACH = 6, 24
MARGIN, MIN_NORM = 2.0, 1.0


def gathered() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Free points under the loss: anchors and points at every step, and the labels of the points."""
    torch.manual_seed(3)
    loss = CAMLoss(CLASSES, 2, margin=MARGIN, min_norm=MIN_NORM, init="random")
    points = torch.nn.Parameter(torch.randn(CLASSES * EACH, 2) * 2.2)
    labels = torch.arange(CLASSES).repeat_interleave(EACH)
    # The attractor is a mean over points: its rate is per point.
    rates = [{"params": [points], "lr": 0.012 * len(points)}, {"params": loss.parameters(), "lr": 0.03}]
    optimizer = torch.optim.SGD(rates)
    steps = []
    for _ in range(381):
        steps.append((loss.anchors.detach().numpy().copy(), points.detach().numpy().copy()))
        optimizer.zero_grad()
        loss(points, labels).backward()
        optimizer.step()
    anchors, places = (np.stack(part) for part in zip(*steps, strict=True))
    return anchors, places, labels.numpy()


def forces(theme: Theme) -> Figure:
    """Points and anchors at three moments."""
    anchors, points, labels = gathered()
    figure = Figure((9.6, 3.6), layout="constrained")
    titles = ("Start: anchors crowd at the origin", "Anchors repel each other", "End: 2m apart, each with its class")
    for axes, step, title in zip(figure.subplots(1, 3), (0, 40, 380), titles, strict=True):
        for label in range(CLASSES):
            colour = COLOURS[label]
            mine = points[step, labels == label]
            axes.scatter(*mine.T, s=9, color=colour, alpha=0.65, linewidths=0)
            axes.plot(*anchors[: step + 1, label].T, color=colour, linewidth=1.4)
            if step == 380:
                axes.add_patch(Circle(anchors[step, label], MARGIN, fill=False, color=colour, alpha=0.5, linewidth=0.9))
            axes.scatter(*anchors[step, label], marker="P", s=70, color=colour, edgecolor=theme.paper, zorder=3)
        axes.add_patch(Circle((0, 0), MIN_NORM, fill=False, color=theme.ink, linestyle=":", linewidth=0.9))
        bare(axes, title, 6.6)
    return figure


def bare(axes: Axes, title: str, reach: float) -> None:
    """A plane without ticks."""
    axes.set(xlim=(-reach, reach), ylim=(-reach, reach), xticks=[], yticks=[], aspect="equal")
    axes.spines[["top", "right"]].set_visible(True)
    axes.set_title(title, fontsize=9.5)


def terms(theme: Theme) -> Figure:
    """Each term and the force of it over a distance, from the functions themselves."""
    distances = torch.linspace(0.02, 6, 240)

    def along(term: int) -> tuple[np.ndarray, np.ndarray]:
        values, pulls = [], []
        for distance in distances:
            place = torch.tensor([[float(distance), 0.0]], requires_grad=True)
            origin = torch.zeros(1, 2)
            if term == 0:
                value = attractor(place, torch.tensor([0]), origin)
            elif term == 1:
                value = repeller(torch.cat([place, origin]), MARGIN, None)
            else:
                value = minimum_norm(place, MIN_NORM)
            value.backward()
            assert place.grad is not None
            values.append(value.item())
            pulls.append(-float(place.grad[0, 0]))
        return np.array(values), np.array(pulls)

    figure = Figure((9.6, 3.0), layout="constrained")
    named = (
        ("Attractor", "distance of an embedding to its anchor", None),
        ("Repeller", "distance between two anchors", 2 * MARGIN),
        ("Minimum norm", "distance of an anchor to the origin", MIN_NORM),
    )
    for term, (axes, (title, label, edge)) in enumerate(zip(figure.subplots(1, 3, sharey=True), named, strict=True)):
        values, pulls = along(term)
        axes.axhline(0, color=theme.faint, linewidth=0.8)
        axes.plot(distances, values, color=COLOURS[0], linewidth=2)
        axes.plot(distances, pulls, color=COLOURS[1], linewidth=2)
        axes.set(ylim=(-4.5, 8.5), xlim=(0, 6), xlabel=label, title=title)
        if edge is not None:
            axes.axvline(edge, color=theme.ink, linestyle=":", linewidth=1)
            axes.text(edge + 0.12, 7.6, "2m" if term == 1 else "p", fontsize=10, style="italic")
        if term == 0:
            axes.text(2.35, 6.6, "value", color=COLOURS[0], ha="right")
            axes.text(2.6, -4.0, "force", color=COLOURS[1], ha="right")
    return figure


def sample_planes(folder: Path) -> None:
    """Test pictures of the sample, embedded in two dimensions with two losses."""
    dataset = pictures()
    found = []
    for name in ("plane", "plane-cross-entropy"):
        trained = model(name, folder)
        anchors = trained.anchors
        assert anchors is not None
        found.append((trained.embed(torch.from_numpy(dataset.test.images)).numpy(), anchors.cpu().numpy()))

    def plot(theme: Theme) -> Figure:
        figure = Figure((9.6, 4.9), layout="constrained")
        titles = ("Class anchor margin", "Cross-entropy (crosses: class means)")
        for axes, (points, anchors), title in zip(figure.subplots(1, 2), found, titles, strict=True):
            for label in range(len(dataset.classes)):
                colour = COLOURS[label]
                axes.scatter(*points[dataset.test.labels == label].T, s=5, color=colour, alpha=0.6, linewidths=0)
            for label in range(len(dataset.classes)):
                axes.scatter(*anchors[label], marker="P", s=80, color=COLOURS[label], edgecolor=theme.paper, zorder=3)
            axes.set(xticks=[], yticks=[], title=title, box_aspect=0.85)
            axes.set_aspect("equal", adjustable="datalim")
            axes.spines[["top", "right"]].set_visible(True)
        handles = [
            axes.scatter([], [], s=26, color=COLOURS[label], label=name) for label, name in enumerate(dataset.classes)
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=5, fontsize=8.5, handletextpad=0.2)
        return figure

    draw("loss-sample", plot)


def lingering(folder: Path) -> None:
    """The attractor of every epoch, with and without the bounded head."""
    curves = {}
    for name in ("bounded", "linear"):
        model(name, folder)
        with (folder / name / "history.csv").open() as file:
            rows = [row for row in csv.DictReader(file) if row.get("train/attractor")]
        curves[name] = [float(row["train/attractor"]) for row in rows]
    classes = len(pictures().classes)
    # Anchors on ten axes at a radius of √2·m: what is left where every embedding is their mean.
    idle = MARGIN**2 * (1 - 1 / classes)

    def plot(theme: Theme) -> Figure:
        figure = Figure((7.2, 3.3), layout="constrained")
        axes = figure.subplots()
        axes.axhline(idle, color=theme.ink, linestyle=":", linewidth=1)
        axes.text(
            len(curves["bounded"]), idle * 1.02, "every picture at the mean of the anchors", ha="right", va="bottom"
        )
        for colour, (name, values) in zip(COLOURS, curves.items(), strict=False):
            epochs = range(1, len(values) + 1)
            axes.plot(epochs, values, color=colour, linewidth=2, label=f"{name} head", marker="o", markersize=3)
        axes.set(xlabel="epoch", ylabel="attractor, mean of the epoch", ylim=(0, None))
        axes.legend()
        return figure

    draw("loss-lingering", plot)


if __name__ == "__main__":
    where = Path(sys.argv[1])
    draw("loss-forces", forces)
    draw("loss-terms", terms)
    sample_planes(where)
    lingering(where)
