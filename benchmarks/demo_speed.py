"""The demo's training on this machine, now and at another commit, in turns.

    python benchmarks/demo_speed.py COMMIT [--rounds 3]      results go to benchmarks/results/demo_speed.json

Seconds per epoch are those of the run's own history; the ratio is of their medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from pathlib import Path

from kedge.reproduce.machine import describe
from runs import kedge
from runs import seconds as seconds_of

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "demo_speed.json"
EPOCHS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        other = Path(scratch, "other")
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", other, given.commit], cwd=ROOT, check=True)
        try:
            seconds: dict[str, list[float]] = {"now": [], given.commit: []}
            for turn in range(given.rounds):
                for name, source in {"now": ROOT, given.commit: other}.items():
                    seconds[name] += epochs(source / "src", Path(scratch, f"{name}-{turn}"))
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", other], cwd=ROOT, check=True)
    medians = {name: round(statistics.median(values), 2) for name, values in seconds.items()}
    found = {
        "seconds_per_epoch": seconds,
        "medians": medians,
        "now / then": round(medians["now"] / medians[given.commit], 3),
    }
    print(json.dumps(found))
    RESULTS.write_text(json.dumps({**found, "machine": describe()}, indent=1) + "\n")


def epochs(source: Path, folder: Path) -> list[float]:
    settings = ("experiment=demo", f"recipe.epochs={EPOCHS}", f"hydra.run.dir={folder}")
    kedge("train", *settings, environment={**os.environ, "PYTHONPATH": str(source)})
    return seconds_of(folder)


if __name__ == "__main__":
    main()
