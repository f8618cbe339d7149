"""The experiments that are looked at: embeddings in two dimensions, and hits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from kedge.evaluation import retrieval_grid
from kedge.reproduce import figures
from kedge.reproduce.experiments.base import Choice, Experiment, Results
from kedge.reproduce.jobs import Job, load_pictures
from kedge.reproduce.names import display

__all__ = ["Embeddings2d", "Qualitative"]


class Embeddings2d(Experiment):
    """Embeddings of two dimensions, drawn."""

    name = "embeddings2d"
    title = "Embeddings in two dimensions"
    datasets = ("svhn",)
    encoders = ("resnet18",)
    measures = ("scores", "points")

    def variants(self, job: Job, choice: Choice) -> Sequence[tuple[str, ...]]:
        """Two dimensions; CAM with the margin the paper takes for them."""
        del choice
        return [("encoder.dim=2", *(["loss.margin=4", "loss.min_norm=1"] if job.loss == "cam" else []))]

    def figures(self, results: Results, choice: Choice) -> dict[str, Figure]:
        """Clouds and distributions, of the first seed that ran."""
        found = {}
        for recipe, dataset, encoder, by_loss in self.by_place(results, choice, "points"):
            drawn: dict[str, Any] = {}
            anchors: dict[str, Any] = {}
            for loss, (first, *_) in by_loss.items():
                drawn[loss] = {
                    part: (
                        np.asarray(first[part]["points"], dtype=np.float64).reshape(-1, 2),
                        np.asarray(first[part]["labels"]),
                    )
                    for part in ("train", "test")
                }
                # What other losses have are means of their classes, which nothing pulled anything to.
                anchors[loss] = np.asarray(first["anchors"]) if loss == "cam" and first["anchors"] else None
            classes = next(iter(by_loss.values()))[0]["classes"]
            found[f"{self.name}-{dataset}-{encoder}-{recipe}"] = figures.embeddings_2d(
                drawn,
                anchors,
                classes,
                title=self.caption(dataset, encoder, recipe),
                labels={loss: display(loss) for loss in drawn},
            )
        return found


class Qualitative(Experiment):
    """The first hits of some queries."""

    name = "qualitative"
    title = "The first hits, looked at"
    encoders = ("resnet50",)
    measures = ("scores", "hits")
    shows_pictures = True

    def figures(self, results: Results, choice: Choice) -> dict[str, Figure]:
        """One for each dataset and encoder, of the first seed that ran; needs the pictures."""
        found = {}
        for recipe, dataset, encoder, by_loss in self.by_place(results, choice, "hits"):
            pictures = load_pictures(dataset, choice.sources, download=False)
            # Another copy of the dataset may have its pictures in another order.
            if pictures is None or pictures.fingerprint() not in results.datasets("hits"):
                continue
            queries = next(iter(by_loss.values()))[0]["queries"]
            rows = {display(loss): np.asarray(first["hits"]) for loss, (first, *_) in by_loss.items()}
            title = self.caption(dataset, encoder, recipe)
            found[f"{self.name}-{dataset}-{encoder}-{recipe}"] = retrieval_grid(pictures, queries, rows, title=title)
        return found
