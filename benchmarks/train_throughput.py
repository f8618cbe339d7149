"""Images per second of `kedge train`, everything included, beside a bare step and the usual loop, in one run.

    python benchmarks/train_throughput.py DATA.npz [--only resnet18-512 …]     needs a GPU
    python benchmarks/train_throughput.py DATA.npz --quick                     tiny, on any machine; writes nothing

DATA.npz holds 32 × 32 pictures (x_train, y_train, x_test, y_test, classes). For each network:

- kedge: `kedge train recipe=kedge` from the second epoch on, with augmentation, statistics, history, checkpoints;
- bare: the same network, loss and optimiser on one batch that never changes, in its fastest way to be compiled;
- usual: crop and flip as torchvision transforms on 16 worker processes, eager in bfloat16;
- usual, ProxyAnchor: the same with pytorch-metric-learning's loss, where that is installed.
"""

from __future__ import annotations

import argparse
import csv
import json
import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from kedge.encoders import build_encoder
from kedge.losses import CAMLoss
from machine import describe

RESULTS = Path(__file__).parent / "results" / "train_throughput.json"
MODES = ("default", "reduce-overhead", "max-autotune-no-cudagraphs")
WORKERS = 16


class Case(NamedTuple):
    """What is trained."""

    encoder: str
    batch: int
    size: int
    shots: int
    """Pictures per class, so that an epoch takes a second or more."""
    epochs: int
    steps: int
    """Of the rivals."""


CASES = {
    "resnet18-512": Case("resnet18", 512, 32, 450, 8, 100),
    "resnet18-2048": Case("resnet18", 2048, 32, 450, 8, 40),
    "resnet50-512": Case("resnet50", 512, 32, 450, 4, 40),
    "swin_t-224": Case("swin_t", 128, 224, 40, 3, 30),
}
QUICK = {"resnet10-64": Case("resnet10", 64, 32, 10, 3, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--only", nargs="+", choices=CASES)
    parser.add_argument("--modes", nargs="+", default=list(MODES), help="ways to compile the bare step")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    cases = QUICK if given.quick else {name: CASES[name] for name in given.only or CASES}
    rows = {}
    for name, case in cases.items():
        found: dict[str, Any] = {"kedge": kedge_train(case, given.data)}
        tries = {mode: apart(bare, case, mode) for mode in (["default"] if given.quick else given.modes)}
        found["bare"] = max((speed for speed in tries.values() if speed), default=None)
        found["bare_modes"] = tries
        for label, loss in {"usual": "cam", "usual, ProxyAnchor": "proxy"}.items():
            found[label] = apart(usual, case, given.data, loss)
        for rival in ("bare", "usual", "usual, ProxyAnchor"):
            if found[rival]:
                found[f"kedge / {rival}"] = round(found["kedge"] / found[rival], 3)
        rows[name] = {**case._asdict(), **found}
        print(name, json.dumps(found), flush=True)
    if not given.quick:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps({"images_per_second": rows, "machine": describe()}, indent=1) + "\n")


def kedge_train(case: Case, data: Path) -> float:
    """Images per second of the command itself, from its own history."""
    overrides = [
        *("dataset=arrays", f"dataset.path={data.resolve()}", f"encoder={case.encoder}", "recipe=kedge"),
        *(f"recipe.batch_size={case.batch}", f"recipe.epochs={case.epochs}", f"recipe.size={case.size}"),
        *("encoder.weights=null", f"split.shots={case.shots}", "split.holdout=0.1"),
    ]
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch, "run")
        done = subprocess.run(
            [sys.executable, "-m", "kedge", "train", *overrides, f"hydra.run.dir={run}"], capture_output=True, text=True
        )
        if done.returncode:
            raise SystemExit(done.stderr[-3000:])
        with (run / "history.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
    steps = int(rows[-1]["step"]) - int(rows[0]["step"])
    return round(steps * case.batch / sum(float(row["seconds"]) for row in rows[1:]), 1)


def apart(measure: Callable[..., float], *arguments: Any) -> float | None:
    """In a process of its own, so that nobody inherits memory, caches or settings; None where it failed."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        try:
            return round(pool.apply(measure, arguments), 1)
        except Exception as error:  # one rival's failure is no reason to lose the others' figures
            print(measure.__name__, arguments, "failed:", (str(error).splitlines() or [type(error).__name__])[0])
            return None


def step_of(case: Case, loss_name: str, mode: str | None) -> Callable[[Tensor, Tensor], None]:
    """Forward, loss, backward, update."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cudnn.benchmark = True
    network = build_encoder(case.encoder, image_size=case.size, head="bounded").to(device).train()
    network = network.to(memory_format=torch.channels_last)
    loss: nn.Module = CAMLoss(100, network.dim)
    if loss_name == "proxy":
        from pytorch_metric_learning.losses import ProxyAnchorLoss

        loss = ProxyAnchorLoss(100, network.dim)
    loss.to(device)
    parameters = [*network.parameters(), *loss.parameters()]
    fused = device.type == "cuda"
    optimizer = torch.optim.SGD(parameters, 0.01, 0.9, nesterov=True, weight_decay=5e-4, fused=fused)
    forward: Any = network if mode is None else torch.compile(network, mode=None if mode == "default" else mode)

    def step(images: Tensor, labels: Tensor) -> None:
        with torch.autocast(device.type, torch.bfloat16):
            value = loss(forward(images), labels)
        optimizer.zero_grad(set_to_none=True)
        value.backward()
        optimizer.step()

    return step


def bare(case: Case, mode: str) -> float:
    """On one batch that never changes."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    step = step_of(case, "cam", mode)
    images = torch.rand(case.batch, 3, case.size, case.size, device=device).to(memory_format=torch.channels_last)
    labels = torch.randint(100, (case.batch,), device=device)
    for _ in range(5):
        step(images, labels)
    return timed(lambda: step(images, labels), case)


def usual(case: Case, data: Path, loss_name: str) -> float:
    """Torchvision transforms in worker processes, eager."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    step = step_of(case, loss_name, None)
    loader = torch.utils.data.DataLoader(
        Pictures(data, case.size),
        case.batch,
        shuffle=True,
        drop_last=True,
        num_workers=WORKERS,
        pin_memory=device.type == "cuda",
        persistent_workers=True,
    )
    batches = endless(loader)

    def one() -> None:
        images, labels = next(batches)
        images = images.to(device, non_blocking=True).to(memory_format=torch.channels_last)
        step(images, labels.to(device, non_blocking=True))

    for _ in range(10):
        one()
    return timed(one, case)


class Pictures(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """The training pictures with recipe `kedge`'s augmentation, one at a time."""

    def __init__(self, data: Path, size: int) -> None:
        from torchvision.transforms import v2

        with np.load(data) as arrays:
            self.images, self.labels = arrays["x_train"], arrays["y_train"].astype(np.int64)
        resize = [v2.Resize(size)] if size != self.images.shape[1] else []
        self.change = v2.Compose(
            [
                v2.ToImage(),
                v2.RandomCrop(32, padding=4),
                v2.RandomHorizontalFlip(),
                *resize,
                v2.ToDtype(torch.float32, scale=True),
            ]
        )

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        return self.change(self.images[row]), int(self.labels[row])


def endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def timed(one: Callable[[], None], case: Case) -> float:
    """Images per second over all steps of a case."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else (lambda: None)
    wait()
    started = time.perf_counter()
    for _ in range(case.steps):
        one()
    wait()
    return case.steps * case.batch / (time.perf_counter() - started)


if __name__ == "__main__":
    main()
