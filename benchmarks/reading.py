"""Which reading of two-stage search fits the paper: python benchmarks/reading.py RUN…

The printed two-stage mAP less accuracy, divided by (1 - accuracy), is .17 to .81 of chance (1 / classes). Printed here
for runs of one's own: the same with the rest last, and with anchor lists where AP is divided by the relevant items that
were returned; the latter should be looked at beside the accuracy of the gallery, whose strays it counts.
"""

from __future__ import annotations

import json
import sys

import torch

from kedge.config.compose import dataset_of
from kedge.evaluation import route
from kedge.metrics import rank_relevant
from kedge.model import Model
from kedge.model.features import split_embeddings


def main() -> None:
    for run in sys.argv[1:]:
        model, dataset = Model.load(run), dataset_of(run)
        queries, gallery = (split_embeddings(model, part, batch_size=256) for part in (dataset.test, dataset.train))
        asked, labels = (torch.from_numpy(part.labels).to(gallery.device) for part in (dataset.test, dataset.train))
        routes, lists = route(model, queries), route(model, gallery)
        accuracy = float((routes == asked).double().mean())
        found = rank_relevant(queries, asked, gallery, labels, ks=(), query_lists=routes, gallery_lists=lists)
        returned = torch.stack([((lists == to) & (labels == own)).sum() for to, own in zip(routes, asked, strict=True)])
        candidate = found.average_precision * found.relevant / returned.clamp(min=1)
        last = rank_relevant(
            queries, asked, gallery, labels, ks=(), query_lists=routes, gallery_lists=labels, rest="last"
        )
        excess = {"anchor lists, returned": candidate, "rest last": last.average_precision}
        scale = len(dataset.classes) / (1 - accuracy)
        shown = {name: round((float(value.mean()) - accuracy) * scale, 2) for name, value in excess.items()}
        of_gallery = float((lists == labels).double().mean())
        print(run, json.dumps({"accuracy": round(accuracy, 4), "of the gallery": round(of_gallery, 4), **shown}))


if __name__ == "__main__":
    main()
