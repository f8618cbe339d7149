"""Compares candidates for a recipe on the held-out images of several datasets, each beside cross-entropy.

    python benchmarks/choose.py --data cifar100=CIFAR.npz recipe.epochs=30 --data svhn=SVHN.npz recipe.epochs=10 \\
        dataset.flip=false --run kedge recipe=kedge --run slower recipe=kedge recipe.optimizer.lr=0.1 [--jobs 4]

Test images are not looked at. A candidate's margin on a dataset is the smallest over the columns of its difference to
cross-entropy (the candidate's own overrides with loss=cross_entropy, without those of the loss and the head); the
candidate with the largest margin on its worst dataset is named last. Results go to benchmarks/results/choice.json, a
run as soon as it ends; runs that are there already are not run again.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kedge.reproduce.machine import describe
from recipes import trained

PATH = Path(__file__).parent / "results" / "choice.json"
COLUMNS = ("label_lists", "brute_force", "brute_force_cosine", "anchor_lists", "knn1")
RIVAL = "cross-entropy"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", action="append", required=True, metavar="NAME=FILE.npz")
    parser.add_argument("--run", nargs="+", action="append", required=True, metavar="NAME")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    given = parser.parse_args()
    runs = {name: overrides for name, *overrides in given.run}
    first = next(iter(runs.values()))
    runs[RIVAL] = [word for word in first if not word.startswith(("loss", "encoder.head"))] + ["loss=cross_entropy"]
    record: dict[str, Any] = json.loads(PATH.read_text()) if PATH.exists() else {"runs": {}}
    record["machine"] = describe()
    lock = threading.Lock()
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(given.jobs) as pool:

        def one(data: list[str], name: str) -> None:
            (dataset, _, file), own = data[0].partition("="), data[1:]
            key = " ".join([dataset, *own, *runs[name]])
            if key in record["runs"]:
                return
            common = ["dataset=arrays", f"dataset.path={Path(file).resolve()}"]
            folder = Path(scratch, f"{dataset}-{name}")
            found = trained(f"{dataset}-{name}", folder, common, [*own, *runs[name]], held_out=True)
            with lock:
                record["runs"][key] = {"dataset": dataset, "candidate": name, **found}
                record["table"] = table(record["runs"].values())
                PATH.write_text(json.dumps(record, indent=1) + "\n")

        list(pool.map(lambda pair: one(*pair), [(data, name) for data in given.data for name in runs]))
    for row in [record["table"]["columns"], *record["table"]["rows"]]:
        print("  ".join(f"{value!s:>18}" for value in row))
    worst = margins(record["runs"].values())
    print("best on its worst dataset:", max(worst, key=lambda name: worst[name]), worst)


def value(run: dict[str, Any], column: str) -> float | None:
    """mAP under a way to search, or 1-NN accuracy; None of a run that failed."""
    found = run.get("held_out", {}).get(column)
    return found["mAP"] if isinstance(found, dict) else found


def table(runs: Any) -> dict[str, Any]:
    rows = [
        [run["dataset"], run["candidate"], *(_shown(value(run, column)) for column in COLUMNS)]
        for run in sorted(runs, key=lambda run: (run["dataset"], run["candidate"]))
    ]
    names = ("label lists", "brute force", "brute force, cosine", "anchor lists", "1-NN")
    return {"columns": ["held-out images of", "candidate", *names], "rows": rows}


def margins(runs: Any) -> dict[str, float]:
    """Of each candidate on its worst dataset; one that failed anywhere is last."""
    rivals = {run["dataset"]: run for run in runs if run["candidate"] == RIVAL}
    worst: dict[str, float] = {}
    for run in runs:
        if run["candidate"] == RIVAL or run["dataset"] not in rivals:
            continue
        pairs = [(value(run, column), value(rivals[run["dataset"]], column)) for column in COLUMNS]
        apart = [-1.0 if own is None or other is None else round(own - other, 4) for own, other in pairs]
        worst[run["candidate"]] = min(worst.get(run["candidate"], 1.0), *apart)
    return worst


def _shown(value: float | None) -> str:
    return "failed" if value is None else f"{value:.3f}".removeprefix("0")


if __name__ == "__main__":
    main()
