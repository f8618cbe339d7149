"""The figures of explanation/search.md.

python docs/figures/search.py FOLDER        shows the models of loss.py, which it trains if FOLDER has them not
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from style import COLOURS, Theme, draw
from trained import model, pictures

QUERY_CLASS = "Ankle boot"


def lists(folder: Path) -> None:
    """One query in the plane: what brute force, an anchor list and a label list compare it with."""
    dataset, trained = pictures(), model("plane", folder)
    assert trained.anchors is not None
    anchors = trained.anchors.numpy()
    items = trained.embed(torch.from_numpy(dataset.train.images[dataset.train.rows])).numpy()
    labels = dataset.train.labels
    routes = distances(items, anchors).argmin(axis=1)
    mine = dataset.classes.index(QUERY_CLASS)
    asked = trained.embed(torch.from_numpy(dataset.test.images[dataset.test.labels == mine])).numpy()
    # One on its way to a neighbour: near its own anchor, but not at it.
    gaps = np.sort(distances(asked, anchors), axis=1)
    right = np.flatnonzero(distances(asked, anchors).argmin(axis=1) == mine)
    query = asked[right[np.argsort(gaps[right, 1] - gaps[right, 0])[len(right) // 12]]]
    shown = {
        "Brute force: every item": np.ones(len(items), bool),
        "Anchor list: what lies in the cell": routes == mine,
        "Label list: what is labelled so": labels == mine,
    }
    low, high = np.percentile(items, 0.5, axis=0) - 1.2, np.percentile(items, 99.5, axis=0) + 1.2
    x, y = np.meshgrid(np.linspace(low[0], high[0], 400), np.linspace(low[1], high[1], 400))
    cells = distances(np.stack([x.ravel(), y.ravel()], 1), anchors).argmin(axis=1).reshape(x.shape)

    def plot(theme: Theme) -> Figure:
        figure = Figure((9.6, 3.05), layout="constrained")
        for axes, (title, chosen) in zip(figure.subplots(1, 3), shown.items(), strict=True):
            axes.contour(x, y, cells, levels=np.arange(len(anchors)) + 0.5, colors=theme.faint, linewidths=0.7)
            axes.scatter(*items[~chosen].T, s=4, color=theme.faint, linewidths=0)
            colours = np.array(COLOURS)[labels[chosen]]
            axes.scatter(*items[chosen].T, s=6, c=colours, linewidths=0)
            axes.scatter(*anchors.T, marker="P", s=60, c=COLOURS[: len(anchors)], edgecolor=theme.paper, zorder=3)
            axes.scatter(*query, marker="*", s=230, color=theme.ink, edgecolor=theme.paper, zorder=4)
            axes.set(xlim=(low[0], high[0]), ylim=(low[1], high[1]), xticks=[], yticks=[], aspect="equal")
            axes.spines[["top", "right"]].set_visible(True)
            axes.set_title(f"{title}\n{int(chosen.sum()):,} of {len(items):,} compared", fontsize=9.5)
        return figure

    draw("search-lists", plot)


def probes(folder: Path) -> None:
    """What more lists cost and gain, for test pictures of the sample in 128 dimensions."""
    dataset, trained = pictures(), model("bounded", folder)
    assert trained.anchors is not None
    anchors = trained.anchors.numpy()
    items = trained.embed(torch.from_numpy(dataset.train.images[dataset.train.rows])).numpy()
    queries = trained.embed(torch.from_numpy(dataset.test.images)).numpy()
    order = distances(queries, anchors).argsort(axis=1)
    far = distances(queries, items)
    relevant = dataset.test.labels[:, None] == dataset.train.labels[None]
    homes = {"label lists": dataset.train.labels, "anchor lists": distances(items, anchors).argmin(axis=1)}
    counts = np.arange(1, len(anchors) + 1)
    found = {}
    for name, home in homes.items():
        scores, shares = [], []
        for count in counts:
            looked = (home[None, None] == order[:, :count, None]).any(axis=1)
            scores.append(mean_average_precision(far, relevant, looked))
            shares.append(looked.mean())
        found[name] = np.array(scores), np.array(shares)

    def plot(theme: Theme) -> Figure:
        figure = Figure((9.6, 3.3), layout="constrained")
        left, right = figure.subplots(1, 2)
        for colour, (name, (scores, shares)) in zip(COLOURS, found.items(), strict=False):
            left.plot(counts, scores, color=colour, marker="o", markersize=4, linewidth=2, label=name)
            right.plot(counts, 100 * shares, color=colour, marker="o", markersize=4, linewidth=2, label=name)
        exact = found["label lists"][0][-1]
        left.axhline(exact, color=theme.ink, linestyle=":", linewidth=1)
        left.text(1, exact, "brute force", ha="left", va="bottom")
        left.set(xlabel="probes", ylabel="mAP, all relevant items counted", xticks=counts)
        right.set(xlabel="probes", ylabel="items compared, %", xticks=counts, ylim=(0, 103))
        left.legend(loc="lower right", bbox_to_anchor=(1, 0.02))
        left.set_title("What a search finds")
        right.set_title("What it looks at")
        return figure

    draw("search-probes", plot)


def mean_average_precision(far: np.ndarray, relevant: np.ndarray, looked: np.ndarray) -> float:
    """AP over the items that were looked at, divided by all relevant ones: what is not looked at counts as missed."""
    ranked = np.take_along_axis(relevant & looked, np.where(looked, far, np.inf).argsort(axis=1, kind="stable"), axis=1)
    precision = ranked.cumsum(axis=1) / np.arange(1, far.shape[1] + 1)
    return float(((precision * ranked).sum(axis=1) / relevant.sum(axis=1)).mean())


def distances(points: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Squared distances, points × others."""
    return (points**2).sum(1)[:, None] - 2 * points @ others.T + (others**2).sum(1)[None]


if __name__ == "__main__":
    where = Path(sys.argv[1])
    lists(where)
    probes(where)
