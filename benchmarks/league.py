"""The same tuning budget for every loss: so many held-out trials each, the first with its authors' settings.

    python benchmarks/league.py CIFAR.npz [--trials 8] [--loss cam,supcon] [--jobs 4] recipe.epochs=30

Every loss has the same data, encoder, epochs and number of trials. A trial draws optimiser, rate, weight decay, the
loss's own parameters and, where it takes mixed images, CutMix; draws depend on loss and trial alone, and no two are
alike. Test images are not looked at. A loss's winner has the highest brute-force mAP of held-out images, by whichever
distance suits it; what to run on the test set is printed for each. Trials go to benchmarks/results/league_trials.json,
each as soon as it ends; those that are there already are not run again.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from choose import value
from kedge.config.compose import compose
from kedge.reproduce.experiments import EXPERIMENTS
from kedge.reproduce.machine import describe
from recipes import trained

PATH = Path(__file__).parent / "results" / "league_trials.json"
RECIPE = ("encoder=resnet18", "recipe=kedge", "split.holdout=0.1")
DISTANCES = ("brute_force", "brute_force_cosine")
OPTIMIZERS: dict[str, tuple[float, float]] = {"sgd": (0.1, 5e-4), "adamw": (1e-3, 1e-2)}
"""Rate and weight decay of optimisers that are not the loss's own."""
FACTORS = (0.3, 1.0, 3.0)
"""Of rate and of weight decay."""
OWN: dict[str, dict[str, tuple[float | str, ...]]] = {
    "cam": {"loss.discriminate": (16.0, 64.0), "recipe.mixing.cutmix": (0.0, 0.5)},
    "cross_entropy": {"loss.label_smoothing": (0.0, 0.1), "recipe.mixing.cutmix": (0.0, 0.5)},
    "center": {"loss.weight": (0.001, 0.003, 0.01), "recipe.mixing.cutmix": (0.0, 0.5)},
    "contrastive": {"loss.margin": (0.5, 1.0, 2.0), "loss.mining": ("online", "hard", "semi-hard")},
    "contrastive_normalized": {"loss.arguments.neg_margin": (0.5, 1.0), "recipe.per_class": (4, 8)},
    "triplet": {"loss.arguments.margin": (0.1, 0.2, 0.4), "recipe.per_class": (4, 8)},
    "arcface": {
        "loss.arguments.margin": (11.5, 28.6),
        "loss.arguments.scale": (16, 64),
        "recipe.mixing.cutmix": (0.0, 0.5),
    },
    "cosface": {
        "loss.arguments.margin": (0.1, 0.35),
        "loss.arguments.scale": (16, 64),
        "recipe.mixing.cutmix": (0.0, 0.5),
    },
    "proxy_anchor": {"loss.arguments.alpha": (16, 32), "recipe.optimizer.anchor_lr": (10.0, 100.0)},
    "supcon": {"loss.arguments.temperature": (0.05, 0.1, 0.2), "loss.projection": (128, "null")},
    "multi_similarity": {"loss.arguments.beta": (20, 50), "recipe.per_class": (4, 8)},
}
"""One or two parameters of each loss, and whether images are mixed, where it can take that."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="an .npz file with x_train, y_train, x_test, y_test, classes")
    parser.add_argument("settings", nargs="*", help="overrides for every trial, such as recipe.epochs=30")
    parser.add_argument("--trials", type=int, default=8, help="of each loss")
    parser.add_argument("--loss", default=",".join(EXPERIMENTS["league"].losses))
    parser.add_argument("--jobs", type=int, default=1, help="trials side by side")
    parser.add_argument("--out", type=Path, default=PATH)
    given = parser.parse_args()
    record: dict[str, Any] = json.loads(given.out.read_text()) if given.out.exists() else {"trials": {}}
    record["machine"] = describe()
    lock, common = threading.Lock(), ["dataset=arrays", f"dataset.path={given.data.resolve()}"]
    losses = given.loss.split(",")
    plan = {
        " ".join([loss, *given.settings, *overrides]): (loss, number, overrides)
        for loss in losses
        for number, overrides in enumerate(trials(loss, given.trials))
    }
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(given.jobs) as pool:

        def one(name: str) -> None:
            loss, number, own = plan[name]
            overrides = [*RECIPE, f"loss={loss}", *given.settings, *own]
            found = trained(f"{loss}-{number}", Path(scratch, f"{loss}-{number}"), common, overrides, held_out=True)
            with lock:
                record["trials"][name] = {"loss": loss, "trial": number, "overrides": own, **found}
                given.out.write_text(json.dumps(record, indent=1) + "\n")

        list(pool.map(one, [name for name in plan if name not in record["trials"]]))
    for loss, best in winners({name: record["trials"][name] for name in plan}).items():
        if best is None:
            print(f"{loss}: every trial failed")
            continue
        columns = (*DISTANCES, "label_lists", "anchor_lists", "knn1")
        shown = {column: round(value(best, column) or 0.0, 4) for column in columns}
        print(f"{loss}: trial {best['trial']}", json.dumps(shown))
        words = ["kedge reproduce league --recipe kedge --seeds 0-2 --encoder resnet18 --loss", loss]
        print(" ", " ".join([*words, *given.settings, *best["overrides"]]))


@cache
def trials(loss: str, count: int) -> list[list[str]]:
    """The overrides of so many trials, all different; the first has none."""
    rng, drawn = random.Random(loss), [[]]
    own = compose([*RECIPE, f"loss={loss}"]).recipe.optimizer
    while len(drawn) < count:
        overrides = draw(loss, rng, own)
        drawn += [] if overrides in drawn else [overrides]
    return drawn


def draw(loss: str, rng: random.Random, own: Any) -> list[str]:
    name = rng.choice(["own", *OPTIMIZERS])
    rate, decay = (own.lr, own.weight_decay) if name == "own" else OPTIMIZERS[name]
    overrides = [] if name == "own" else [f"recipe.optimizer.name={name}"]
    overrides += [f"recipe.optimizer.lr={rate * rng.choice(FACTORS):g}"]
    overrides += [f"recipe.optimizer.weight_decay={decay * rng.choice(FACTORS):g}"]
    return overrides + [f"{setting}={rng.choice(values)}" for setting, values in OWN.get(loss, {}).items()]


def winners(ended: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any] | None]:
    """Of each loss the trial with the highest brute-force mAP under the better distance; None where all failed."""
    best: dict[str, dict[str, Any] | None] = {}
    for found in ended.values():
        best.setdefault(found["loss"], None)
        if "held_out" in found and score(found) > score(best[found["loss"]]):
            best[found["loss"]] = found
    return best


def score(found: dict[str, Any] | None) -> float:
    return -1.0 if found is None else max(value(found, distance) or 0.0 for distance in DISTANCES)


if __name__ == "__main__":
    main()
