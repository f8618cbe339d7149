"""The same run twice: how far metrics and weights are apart, and with `deterministic=true`.

    python benchmarks/repeat.py DATA.npz [OVERRIDE …]      results go to benchmarks/results/repeat.json

Four runs side by side, each a `kedge train` and a `kedge evaluate` of its own with seed 0.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from kedge.reproduce.machine import describe
from runs import kedge, seconds

RESULTS = Path(__file__).parent / "results" / "repeat.json"
COLUMNS = ("label_lists", "brute_force", "anchor_lists")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    common = ["dataset=arrays", f"dataset.path={given.data.resolve()}", *given.overrides]
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(4) as pool:
        jobs = {
            way: [
                pool.submit(train, Path(scratch, f"{way}-{number}"), [*common, f"trainer.deterministic={way}"])
                for number in (1, 2)
            ]
            for way in ("false", "true")
        }
        for way, pair in jobs.items():
            one, other = (job.result() for job in pair)
            metrics = {
                column: max(abs(one[0][column][key] - other[0][column][key]) for key in ("mAP", "P@20"))
                for column in COLUMNS
            }
            weights = max(float(abs(value - other[1][name]).max()) for name, value in one[1].items())
            found[f"deterministic={way}"] = {
                "metrics": [{column: run[0][column]["mAP"] for column in COLUMNS} for run in (one, other)],
                "largest_difference_of_metrics": metrics,
                "largest_difference_of_weights": weights,
                "seconds_of_epochs": [run[2] for run in (one, other)],
            }
            print(way, json.dumps(found[f"deterministic={way}"]), flush=True)
    record = {"overrides": given.overrides, "seed": 0, **found, "machine": describe()}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(record, indent=1) + "\n")


def train(folder: Path, overrides: list[str]) -> tuple[dict[str, Any], dict[str, Any], float]:
    """Metrics, weights, seconds."""
    kedge("train", *overrides, f"hydra.run.dir={folder}")
    kedge("evaluate", folder)
    weights = load_file(next((folder / "model").glob("*.safetensors")))
    return json.loads((folder / "metrics.json").read_text()), weights, round(sum(seconds(folder)), 1)


if __name__ == "__main__":
    main()
