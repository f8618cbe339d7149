"""Trains and evaluates with several sets of overrides, each a `kedge train` and a `kedge evaluate` of its own.

    python benchmarks/recipes.py DATA.npz --name NAME --run kedge recipe=kedge --run paper recipe=paper [--jobs 2]

`--held-out` leaves the test set alone and asks with the held-out images instead: choose with that, then evaluate what
was chosen once. Results go to benchmarks/results/NAME.json, a run as soon as it ends. A `{0..2}` in a run's name and
overrides stands for one run each.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from kedge.model import Model
from kedge.reproduce.machine import describe
from runs import history, kedge, seconds

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="an .npz file with x_train, y_train, x_test, y_test, classes")
    parser.add_argument("--name", required=True, help="name of the result file")
    parser.add_argument("--run", nargs="+", action="append", required=True, metavar=("NAME", "OVERRIDE"))
    parser.add_argument("--held-out", action="store_true", help="do not look at the test set")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    common = ["dataset=arrays", f"dataset.path={arguments.data.resolve()}"]
    runs = [each for run in arguments.run for each in spread(run)]
    arguments.out.mkdir(parents=True, exist_ok=True)
    path, found, lock = arguments.out / f"{arguments.name}.json", {}, threading.Lock()

    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(arguments.jobs) as pool:

        def one(run: list[str]) -> None:
            name, *overrides = run
            result = trained(name, Path(scratch, name), common, overrides, held_out=arguments.held_out)
            with lock:
                found[name] = result
                ordered = [found[name] for name, *_ in runs if name in found]
                record = {"runs": ordered, "side_by_side": arguments.jobs, "machine": describe()}
                path.write_text(json.dumps(record, indent=1) + "\n")

        list(pool.map(one, runs))


def spread(run: list[str]) -> list[list[str]]:
    """`name-{0..2} seed={0..2}` as three runs."""
    ranges = {match for word in run for match in re.findall(r"{(\d+)\.\.(\d+)}", word)}
    if not ranges:
        return [run]
    if len(ranges) > 1:
        raise SystemExit(f"One range for a run, not several: {' '.join(run)}")
    first, last = map(int, ranges.pop())
    return [[re.sub(r"{\d+\.\.\d+}", str(number), word) for word in run] for number in range(first, last + 1)]


def trained(name: str, folder: Path, common: list[str], overrides: list[str], *, held_out: bool) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": name,
        "command": " ".join(["kedge train dataset=arrays dataset.path=DATA.npz", *overrides]),
    }
    started = time.monotonic()
    try:
        said = kedge("train", *common, *overrides, f"hydra.run.dir={folder}").splitlines()
    except SystemExit as failed:  # the others' figures are still wanted
        print(name, "failed:", failed, flush=True)
        return found | {"failed": str(failed).strip().splitlines()[-1]}
    found["seconds_of_command"] = round(time.monotonic() - started, 1)
    rows = history(folder)
    target = next((column for column in rows[-1] if column.startswith("val/")), None)
    found["epochs"] = len(rows)
    found["seconds_of_epochs"] = round(sum(seconds(folder)), 1)
    # A warning begins with where it was raised: a path of this machine.
    said = [line.rpartition("Warning: ")[2] for line in said]
    found["said"] = [line for line in said if re.search("ompil|mean of the anchors", line)]
    if target is not None:
        found["target"] = {target: {row["epoch"]: round(float(row[target]), 4) for row in rows if row[target]}}
    asked = "held_out" if held_out else "test"
    metrics = found[asked] = evaluated(folder, held_out=held_out)
    model = Model.load(folder, device="cpu")
    if model.preprocessing.flip_tta:
        model.preprocessing = replace(model.preprocessing, flip_tta=False)
        model.save(folder / "model")
        found[f"{asked}_without_mirror"] = evaluated(folder, held_out=held_out)
    shown = {column: round(metrics[column]["mAP"], 4) for column in ("label_lists", "brute_force", "anchor_lists")}
    print(
        name,
        json.dumps(shown | {name: value for name, value in found.items() if name.startswith("seconds")}),
        found["said"],
        flush=True,
    )
    return found


def evaluated(folder: Path, *, held_out: bool) -> dict[str, Any]:
    kedge("evaluate", folder, *(["--held-out"] if held_out else []))
    return json.loads((folder / ("held_out.json" if held_out else "metrics.json")).read_text())  # type: ignore[no-any-return]


if __name__ == "__main__":
    main()
