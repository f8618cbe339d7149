"""Images per second of `kedge train`, everything included, beside a bare step and the usual loop, in one run.

    python benchmarks/train_throughput.py DATA.npz [--only resnet18-512 …]     needs a GPU
    python benchmarks/train_throughput.py DATA.npz --quick                     tiny, on any machine; writes nothing

DATA.npz holds 32 × 32 pictures (x_train, y_train, x_test, y_test, classes). For each network:

- kedge: `kedge train recipe=kedge` with augmentation, validation, history and, where no checkpoint was due, the share
  of the time that they may take; from the first look at the held-out images to the last one;
- bare: the same network, loss and optimiser on one batch that never changes, in its fastest way to be compiled, with
  cuDNN's kernels chosen as `kedge train` does (so that a seed means a result);
- bare, searched: the same with whatever kernels cuDNN finds fastest;
- usual: the same augmentation as torchvision transforms on 16 worker processes, eager in bfloat16;
- usual, ProxyAnchor: the same with pytorch-metric-learning's loss, where that is installed.

One network is trained with TrivialAugmentWide in addition, which is more work for whoever augments.
What must be compiled gets ready side by side; then all are timed one by one.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from kedge.config.compose import compose
from kedge.encoders import build_encoder
from kedge.losses import CAMLoss
from kedge.reproduce.machine import describe
from kedge.training.checkpoint import ModelCheckpoint
from kedge.training.config import Settings
from runs import history, kedge, seconds

RESULTS = Path(__file__).parent / "results" / "train_throughput.json"
SEARCHED = "bare, searched"
LOOPS = {"usual": "cam", "usual, ProxyAnchor": "proxy"}
WORKERS = 16
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Case(NamedTuple):
    """What is trained."""

    encoder: str
    batch: int
    size: int
    epochs: int
    shots: int | None = None
    """Pictures per class; all of them if None."""
    holdout: float = 0.1
    """Of all pictures, so many are held out: a ninth of those that are trained on."""
    trivial: bool = False
    """Whether TrivialAugmentWide comes on top of the recipe's augmentation."""
    modes: tuple[str, ...] = ("graph",)
    """Ways to compile the bare step: forward and backward recorded as one CUDA graph, and torch's own modes."""


CASES = {
    "resnet18-512": Case("resnet18", 512, 32, 25, modes=("graph", "reduce-overhead", "default")),
    "resnet18-2048": Case("resnet18", 2048, 32, 25),
    "resnet18-2048-trivial": Case("resnet18", 2048, 32, 15, trivial=True),
    "resnet50-512": Case("resnet50", 512, 32, 10),
    "swin_t-224": Case("swin_t", 128, 224, 10, shots=80, holdout=0.0178),
}
QUICK = {"resnet10-64": Case("resnet10", 64, 32, 3, shots=10, modes=("default",))}
SECONDS = 3.0
"""For which a rival is timed: a GPU that has just begun is faster than one at work."""
PATIENCE = 240.0
"""Seconds for compiling and, later, for timing a case's rivals: one that hangs must not cost the others' figures."""
STARTED = time.monotonic()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--only", nargs="+", choices=CASES)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--rival", nargs=3, metavar=("CASE", "KIND", "READY"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rival:
        name, kind, ready = given.rival
        compete({**CASES, **QUICK}[name], kind, given.data, Path(ready))
        return
    cases = QUICK if given.quick else {name: CASES[name] for name in given.only or CASES}
    with tempfile.TemporaryDirectory() as folder:
        rivals = {name: [Rival(name, kind, given.data, Path(folder)) for kind in ("bare", "loops")] for name in cases}
        with ThreadPoolExecutor() as pool:  # a first epoch each, so that what is compiled lies in the cache
            list(pool.map(lambda case: kedge_train(case._replace(epochs=1), given.data), cases.values()))
        say("Kedge's steps are compiled")
        for one in rivals.values():
            for rival in one:
                rival.wait()
        say("so are the others")
        rows = {}
        for name, case in cases.items():
            times = {way: speed for rival in rivals[name] for way, speed in rival.timed().items()}
            own, epochs = kedge_train(case, given.data)
            rows[name] = compared(case, own, times) | {"seconds_per_epoch": epochs}
            print(name, json.dumps(rows[name]), flush=True)
            if not given.quick:  # after each, so that an interruption loses one
                record = {"images_per_second": rows, "machine": describe()}
                given.out.parent.mkdir(parents=True, exist_ok=True)
                given.out.write_text(json.dumps(record, indent=1) + "\n")


def say(text: str) -> None:
    print(f"  {time.monotonic() - STARTED:.0f} s: {text}", flush=True)


def compared(case: Case, own: float, times: dict[str, float]) -> dict[str, Any]:
    """A row of the table."""
    modes = {mode: times[mode] for mode in case.modes if mode in times}
    found: dict[str, Any] = {"kedge": own, "bare": max(modes.values(), default=None), "bare_modes": modes}
    found |= {name: times.get(name) for name in (SEARCHED, *LOOPS)}
    for rival in ("bare", SEARCHED, *LOOPS):
        if found[rival]:
            found[f"kedge / {rival}"] = round(own / found[rival], 3)
    return {**case._asdict(), **found}


def kedge_train(case: Case, data: Path) -> tuple[float, list[float]]:
    """Images per second of the command itself, from its own history; and the seconds of every epoch."""
    recipe = ["recipe=kedge", f"encoder={case.encoder}", f"recipe.augmentation.trivial={str(case.trivial).lower()}"]
    every = Settings.from_config(compose(recipe)).validate_every  # as in the recipe's own number of epochs
    every = every if case.epochs % every == 0 else 1
    overrides = [
        *("dataset=arrays", f"dataset.path={data.resolve()}", *recipe),
        *(f"recipe.batch_size={case.batch}", f"recipe.epochs={case.epochs}", f"recipe.size={case.size}"),
        *("encoder.weights=null", f"split.shots={case.shots or 'null'}", f"split.holdout={case.holdout}"),
        f"split.validate_every={every}",
    ]
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch, "run")
        kedge("train", *overrides, f"hydra.run.dir={run}")
        rows, times = history(run), seconds(run)
    if case.epochs < 2:
        return 0.0, times
    # The first look and the first checkpoint, which the second epoch waits for, come with the start; how seldom the
    # next ones are is known.
    start = every * -(-2 // every)
    steps = int(rows[-1]["step"]) - int(rows[start - 1]["step"])
    speed = steps * case.batch / (sum(times[start:]) * (1 + ModelCheckpoint.MAX_TIME_SHARE))
    return round(speed, 1), [round(one, 3) for one in times]


class Rival:
    """The bare step, or the usual loops, in a process that gets ready and is timed when its turn comes."""

    def __init__(self, name: str, kind: str, data: Path, folder: Path) -> None:
        self.name, self.ready = f"{name}, {kind}", folder / f"{name}-{kind}"
        command = [sys.executable, __file__, str(data), "--rival", name, kind, str(self.ready)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def wait(self) -> None:
        """Returns when it is ready; one that takes too long is ended, since it would disturb the others' timing."""
        end = time.monotonic() + PATIENCE
        while not self.ready.exists() and self.process.poll() is None:
            if time.monotonic() > end:
                say(f"{self.name}: not ready after {PATIENCE:.0f} s")
                self.process.kill()
            time.sleep(0.1)

    def timed(self) -> dict[str, float]:
        """Images per second of those ways that did not fail."""
        try:
            said, _ = self.process.communicate("go\n", timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            said, _ = self.process.communicate()
        lines = [line for line in said.splitlines() if line.startswith("{")]
        say(f"{self.name}: {' '.join(lines) or said}")
        return {way: speed for line in lines for way, speed in json.loads(line).items()}


def compete(case: Case, kind: str, data: Path, ready: Path) -> None:
    """Get ready, wait for a line, and print images per second."""
    ways: dict[str, Callable[[], None]] = {}
    if kind == "bare":
        for mode in (*case.modes, SEARCHED):
            choose_kernels(mode)
            attempt(ways, mode, bare, case, case.modes[0] if mode == SEARCHED else mode)
    ready.touch()
    sys.stdin.readline()
    if kind == "loops":
        choose_kernels(SEARCHED)
        batches = loader_of(case, data)
        next(batches)  # the workers are there before the GPU is in use
        for label, loss in LOOPS.items():
            attempt(ways, label, usual, case, batches, loss)
    for label, one in ways.items():
        times: dict[str, float] = {}
        choose_kernels(SEARCHED if kind == "loops" else label)
        attempt(times, label, timed, one, case, SECONDS if DEVICE.type == "cuda" else 1.0)
        print(json.dumps(times), flush=True)


def choose_kernels(way: str) -> None:
    """As `kedge train` does, or whatever is fastest."""
    torch.backends.cudnn.deterministic = way != SEARCHED
    torch.backends.cudnn.benchmark = way == SEARCHED


def attempt(results: dict[str, Any], label: str, act: Callable[..., Any], *arguments: Any) -> None:
    """One rival's failure is no reason to lose the others' figures."""
    try:
        results[label] = act(*arguments)
    except Exception as error:
        print(label, "failed:", (str(error).splitlines() or [type(error).__name__])[0], flush=True)


class Parts(NamedTuple):
    """Network with loss, and the optimiser."""

    loss_of: Callable[[Tensor, Tensor], Tensor]
    optimizer: torch.optim.Optimizer


def parts_of(case: Case, loss_name: str) -> Parts:
    network = build_encoder(case.encoder, image_size=case.size, head="bounded").to(DEVICE).train()
    network = network.to(memory_format=torch.channels_last)
    loss: nn.Module = CAMLoss(100, network.dim)
    if loss_name == "proxy":
        from pytorch_metric_learning.losses import ProxyAnchorLoss

        loss = ProxyAnchorLoss(100, network.dim)
    loss.to(DEVICE)
    parameters = [*network.parameters(), *loss.parameters()]
    fused = DEVICE.type == "cuda"
    optimizer = torch.optim.SGD(parameters, 0.01, 0.9, nesterov=True, weight_decay=5e-4, fused=fused)
    return Parts(lambda images, labels: loss(network(images), labels), optimizer)


def backward(loss_of: Callable[[Tensor, Tensor], Tensor], images: Tensor, labels: Tensor) -> None:
    with torch.autocast(DEVICE.type, torch.bfloat16, cache_enabled=False):
        value = loss_of(images, labels)
    value.backward()  # type: ignore[no-untyped-call]


def step_of(parts: Parts) -> Callable[[Tensor, Tensor], None]:
    """Forward, loss, backward, update."""

    def step(images: Tensor, labels: Tensor) -> None:
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        parts.optimizer.zero_grad(set_to_none=True)
        backward(parts.loss_of, images, labels)
        parts.optimizer.step()

    return step


def bare(case: Case, mode: str, parts: Parts | None = None) -> Callable[[], None]:
    """On one batch that never changes."""
    parts = parts or parts_of(case, "cam")
    images = torch.rand(case.batch, 3, case.size, case.size, device=DEVICE).to(memory_format=torch.channels_last)
    labels = torch.randint(100, (case.batch,), device=DEVICE)
    chosen = None if mode in ("graph", "default") else mode
    parts = parts._replace(loss_of=torch.compile(parts.loss_of, mode=chosen))
    step = step_of(parts)
    stream = torch.cuda.Stream() if DEVICE.type == "cuda" else None  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for _ in range(5):
            step(images, labels)
    if mode != "graph":
        return lambda: step(images, labels)
    torch.cuda.synchronize()
    parts.optimizer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backward(parts.loss_of, images, labels)

    def launch() -> None:
        graph.replay()
        parts.optimizer.step()

    return launch


def loader_of(case: Case, data: Path) -> Iterator[Any]:
    """Batches without end, from torchvision transforms in worker processes."""
    recipe = compose([f"encoder={case.encoder}", "recipe=kedge"]).recipe
    loader = torch.utils.data.DataLoader(
        Pictures(data, case.size, recipe.augmentation.crop_padding, trivial=case.trivial),
        case.batch,
        shuffle=True,
        drop_last=True,
        num_workers=WORKERS,
        pin_memory=DEVICE.type == "cuda",
        persistent_workers=True,
        collate_fn=mixed(recipe.mixing.cutmix),
    )
    while True:
        yield from loader


def usual(case: Case, batches: Iterator[Any], loss_name: str) -> Callable[[], None]:
    """Batches from a loader, and an eager step."""
    step = step_of(parts_of(case, loss_name))

    def one() -> None:
        images, labels = next(batches)
        images = images.to(DEVICE, non_blocking=True).to(memory_format=torch.channels_last)
        step(images, labels.to(DEVICE, non_blocking=True))

    images = torch.rand(case.batch, 3, case.size, case.size, device=DEVICE).to(memory_format=torch.channels_last)
    for _ in range(5):
        step(images, torch.arange(case.batch, device=DEVICE) % 100)
    return one


def mixed(share: float) -> Callable[[list[Any]], tuple[Tensor, Tensor]]:
    """What puts a batch together and mixes its pictures, as the recipe does."""
    from torchvision.transforms import v2

    mix = v2.RandomApply([v2.CutMix(num_classes=100)], p=share)

    def collate(examples: list[Any]) -> tuple[Tensor, Tensor]:
        images, labels = torch.utils.data.default_collate(examples)
        return mix(images, labels)[0], labels

    return collate


class Pictures(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """The training pictures with the recipe's augmentation, one at a time."""

    def __init__(self, data: Path, size: int, padding: int, *, trivial: bool) -> None:
        from torchvision.transforms import v2

        with np.load(data) as arrays:
            self.images, self.labels = arrays["x_train"], arrays["y_train"].astype(np.int64)
        if self.images.shape[1] == 3:
            self.images = np.ascontiguousarray(self.images.transpose(0, 2, 3, 1))
        self.change = v2.Compose(
            [
                v2.ToImage(),
                v2.RandomCrop(32, padding=padding),
                v2.RandomHorizontalFlip(),
                *([v2.TrivialAugmentWide()] if trivial else []),
                *([v2.Resize(size)] if size != self.images.shape[1] else []),
                v2.ToDtype(torch.float32, scale=True),
            ]
        )

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        return self.change(self.images[row]), int(self.labels[row])


def timed(one: Callable[[], None], case: Case, seconds: float) -> float:
    """Images per second, after a few steps that are not counted and that say how many it takes."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else (lambda: None)

    def clock(steps: int) -> float:
        wait()
        started = time.perf_counter()
        for _ in range(steps):
            one()
        wait()
        return time.perf_counter() - started

    clock(3)
    steps = max(1, round(seconds * 5 / clock(5)))
    return round(steps * case.batch / clock(steps), 1)


if __name__ == "__main__":
    main()
