"""Evaluates a run in this process, alone or as one of several, in a few ways."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from kedge import Model, evaluate
from kedge.config.compose import dataset_of
from kedge.distributed import exit_together, global_rank, init_process_group
from kedge.evaluation import Report, evaluate_embeddings


def on_embeddings(count: int) -> Report:
    """On embeddings that are the same everywhere, with ties."""
    chance = torch.Generator().manual_seed(count)
    points = torch.randint(0, 4, (count + 50, 3), generator=chance).float()
    labels = torch.randint(0, 5, (count + 50,), generator=chance)
    routes = torch.randint(0, 5, (count + 50,), generator=chance)
    return evaluate_embeddings(
        points[:count],
        labels[:count],
        points[count:],
        labels[count:],
        query_routes=routes[:count],
        gallery_routes=routes[count:],
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    init_process_group("cpu")
    run, out = map(Path, sys.argv[1:])
    model, dataset = Model.load(run, device="cpu"), dataset_of(run)
    reports = {
        "whole batches": evaluate(model, dataset, batch_size=16),
        "few batches": evaluate(model, dataset),
        "one query": evaluate(model, dataset, limit=1),
        "uneven": evaluate(model, dataset, limit=33),
        **{f"{count} embeddings": on_embeddings(count) for count in (1, 2, 37)},
    }
    out.mkdir(exist_ok=True)
    (out / f"{global_rank()}.json").write_text(json.dumps({name: one.to_json() for name, one in reports.items()}))
    exit_together()
