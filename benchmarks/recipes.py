"""Trains and evaluates with several sets of overrides at once, each a `kedge train` of its own.

    python benchmarks/recipes.py DATA.npz --name NAME --run kedge recipe=kedge --run paper recipe=paper

`--held-out` leaves the test set alone and reports the target metric on the held-out images: choose with that, then
evaluate what was chosen once. Results go to benchmarks/results/NAME.json.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import describe

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="an .npz file with x_train, y_train, x_test, y_test, classes")
    parser.add_argument("--name", required=True, help="name of the result file")
    parser.add_argument("--run", nargs="+", action="append", required=True, metavar=("NAME", "OVERRIDE"))
    parser.add_argument("--held-out", action="store_true", help="do not look at the test set")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    common = ["dataset=arrays", f"dataset.path={arguments.data.resolve()}"]
    with tempfile.TemporaryDirectory() as scratch:
        runs = {name: Path(scratch, name) for name, *_ in arguments.run}
        overrides = {name: given for name, *given in arguments.run}
        started = time.monotonic()
        processes = {name: start(runs[name], [*common, *overrides[name]]) for name in runs}
        seconds = {}
        while len(seconds) < len(processes):
            for name, process in processes.items():
                if name not in seconds and process.poll() is not None:
                    seconds[name] = round(time.monotonic() - started, 1)
            time.sleep(0.2)
        results = [
            collect(name, runs[name], overrides[name], seconds[name], test=not arguments.held_out) for name in runs
        ]
    record = {"runs": results, "side_by_side": len(results), "machine": describe()}
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / f"{arguments.name}.json").write_text(json.dumps(record, indent=1) + "\n")


def start(folder: Path, overrides: list[str]) -> subprocess.Popen[bytes]:
    log = folder.with_suffix(".log").open("wb")
    command = [sys.executable, "-m", "kedge", "train", *overrides, f"hydra.run.dir={folder}"]
    return subprocess.Popen(command, stdout=log, stderr=log)


def collect(name: str, folder: Path, overrides: list[str], seconds: float, *, test: bool) -> dict[str, Any]:
    if not (folder / "model").exists():
        print(name, "failed:", folder.with_suffix(".log").read_text()[-2000:])
        return {"name": name, "overrides": overrides, "failed": True}
    with (folder / "history.csv").open(newline="") as file:
        history = list(csv.DictReader(file))
    target = next((column for column in history[-1] if column.startswith("val/")), None)
    found: dict[str, Any] = {
        "name": name,
        "command": " ".join(["kedge train dataset=arrays dataset.path=DATA.npz", *overrides]),
        "overrides": overrides,
        "train_seconds": seconds,
        "seconds_per_epoch": round(sum(float(row["seconds"]) for row in history) / len(history), 2),
    }
    if target is not None:
        found["target"] = target
        found["best_held_out"] = max(float(row[target]) for row in history)
        found["held_out"] = [round(float(row[target]), 4) for row in history]
    if test:
        evaluate = [sys.executable, "-m", "kedge", "evaluate", str(folder)]
        subprocess.run(evaluate, check=True, stdout=subprocess.DEVNULL)
        found["metrics"] = json.loads((folder / "metrics.json").read_text())
    print(json.dumps({key: value for key, value in found.items() if key != "held_out"}))
    return found


if __name__ == "__main__":
    main()
