"""One step of a loss and of its own parameters: time and working memory, by the number of classes.

python benchmarks/loss_step.py            on a GPU: 100, 10,000 and 100,000 classes, 512 dimensions, batches of 512
python benchmarks/loss_step.py --quick    on the CPU: 100 and 2,000 classes; writes nothing

A step is the loss of random embeddings, its gradients and an SGD update with momentum. Working memory is the peak
above parameters, their gradients and the optimizer's state. ArcFace and ProxyAnchor come from pytorch-metric-learning
and are left out where that is missing.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kedge.losses import CAMLoss, CrossEntropyLoss, init_anchors
from kedge.reproduce.machine import describe

RESULTS = Path(__file__).parent / "results" / "loss_step.json"
SEED, BATCH, DIM = 0, 512, 512
CLOSE = 1e-4
"""The share of pairs within two margins, in the crowded case: at 100,000 classes, every anchor has ten to repel."""
WARM_UP, SECONDS, AT_LEAST = 5, 1.0, 5
Build = Callable[[int], nn.Module]


@functools.cache
def start(classes: int) -> Tensor:
    return init_anchors(classes, DIM)


def cam(classes: int, sample: int | None = None, discriminate: float = 0.0) -> CAMLoss:
    loss = CAMLoss(classes, DIM, init="random", repel_sample=sample, discriminate=discriminate)
    loss.anchors.data.copy_(start(classes))
    return loss


def crowded(classes: int) -> nn.Module:
    """CAM some way into training: anchors as close as it says above."""
    loss = cam(classes)
    anchors = loss.anchors.data
    first, second = torch.randint(classes, (2, 2_000_000 if classes > 2000 else 200_000))
    distances = torch.cat(
        [(anchors[i] - anchors[j]).norm(dim=1) for i, j in zip(first.split(50_000), second.split(50_000), strict=True)]
    )
    nearest = distances[first != second].sort().values
    anchors *= 2 * loss.margin / nearest[int(CLOSE * len(nearest))]
    return loss


def ways(classes: int, sample: int) -> Iterator[tuple[str, Build]]:
    yield "cross-entropy", lambda t: CrossEntropyLoss(t, DIM)
    yield "CAM", cam
    yield "CAM, discriminate", functools.partial(cam, discriminate=4.0)
    if classes > 2 * DIM:
        yield "CAM, crowded", crowded
    if classes > sample:
        yield f"CAM, {sample} sampled", functools.partial(cam, sample=sample)
        yield f"CAM, discriminate, {sample} sampled", functools.partial(cam, sample=sample, discriminate=4.0)
    try:
        from pytorch_metric_learning.losses import ArcFaceLoss, ProxyAnchorLoss
    except ImportError:
        return
    yield "ArcFace", lambda t: ArcFaceLoss(t, DIM)
    yield "ProxyAnchor", lambda t: ProxyAnchorLoss(t, DIM)


def size(tensors: Iterator[Any]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if isinstance(tensor, Tensor))


def measure(build: Build, classes: int, device: torch.device) -> dict[str, float | None]:
    torch.manual_seed(SEED)
    on_gpu = device.type == "cuda"
    gc.collect()
    before = torch.cuda.memory_allocated() if on_gpu else 0
    loss = build(classes).to(device)
    embeddings = torch.randn(BATCH, DIM, device=device, requires_grad=True)
    labels = torch.randint(classes, (BATCH,), device=device)
    parameters = list(loss.parameters())
    optimizer = torch.optim.SGD(parameters, lr=1e-4, momentum=0.9, fused=on_gpu)

    def step() -> None:
        optimizer.zero_grad()
        embeddings.grad = None
        loss(embeddings, labels).backward()
        optimizer.step()

    for _ in range(WARM_UP if on_gpu else 1):
        step()
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    seconds: list[float] = []
    while len(seconds) < AT_LEAST or sum(seconds) < SECONDS:
        start = time.perf_counter()
        step()
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    working = None
    if on_gpu:
        state = [value for values in optimizer.state.values() for value in values.values()]
        held = size(iter([*loss.state_dict().values(), *state, *(p.grad for p in parameters)]))
        held += 2 * size(iter([embeddings])) + size(iter([labels]))
        working = round((torch.cuda.max_memory_allocated() - before - held) / 2**20, 1)
    return {"ms": round(statistics.median(seconds) * 1e3, 3), "working_mib": working, "steps": len(seconds)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes on the CPU; writes no results")
    quick = parser.parse_args().quick
    if not quick and not torch.cuda.is_available():
        raise SystemExit("There is no GPU here: --quick runs small sizes on the CPU.")
    device = torch.device("cpu" if quick else "cuda")
    sample = 256 if quick else 1024

    rows: list[dict[str, Any]] = []
    print(f"{'classes':>8} {'loss':32} {'ms':>9} {'times CE':>9} {'MiB':>8} {'times CE':>9}")
    for classes in (100, 2_000) if quick else (100, 10_000, 100_000):
        base: dict[str, Any] = {}
        for name, build in ways(classes, sample):
            found = measure(build, classes, device)
            base = base or found
            ratios: dict[str, float | None] = {"ms_ratio": round(found["ms"] / base["ms"], 2), "mib_ratio": None}
            if not quick:
                ratios["mib_ratio"] = round(found["working_mib"] / base["working_mib"], 2)
            rows.append({"classes": classes, "loss": name, **found, **ratios})
            memory = "" if quick else f"{found['working_mib']:8.1f} {ratios['mib_ratio']:9.2f}"
            print(f"{classes:8,} {name:32} {found['ms']:9.3f} {ratios['ms_ratio']:9.2f} {memory}", flush=True)
    rivals = any(row["loss"] == "ArcFace" for row in rows)
    if not rivals:
        print("ArcFace and ProxyAnchor were left out: pytorch-metric-learning is not installed.")
    if not quick:
        case = {"batch": BATCH, "dim": DIM, "seed": SEED, "share_of_close_pairs_when_crowded": CLOSE}
        result = {"case": case, "results": rows, "rivals_measured": rivals, "machine": describe()}
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
