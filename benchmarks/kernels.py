"""How fast a bare training step is with each way to choose cuDNN's kernels, and whether the way repeats its results.

    python benchmarks/kernels.py [--encoder resnet18] [--batch 512] [--out FILE]      needs a GPU

Each way takes the same steps from the same weights twice and, where kernels are searched for, in two processes; equal
weights after them say that it repeats. `kedge train` should use the fastest that does. (Kernels that are searched for
and add in any order cannot repeat: they are a row of train_throughput.py.)
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from kedge.reproduce.machine import describe
from train_throughput import DEVICE, Case, bare, parts_of, timed

RESULTS = Path(__file__).parent / "results" / "kernels.json"
WAYS = {
    "guessed, in one order": (False, True),
    "guessed": (False, False),
    "searched, in one order": (True, True),
}
"""Whether cuDNN searches (`benchmark`), and whether only kernels that add in one order are used (`deterministic`)."""
STEPS = 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoder", default="resnet18")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=2.0, help="for which each is timed")
    parser.add_argument("--profile", action="store_true", help="show on stderr where the time of a step goes")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--lock", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--one", metavar="WAY", help=argparse.SUPPRESS)
    given = parser.parse_args()
    case = Case(given.encoder, given.batch, 32, 1)
    if given.one:
        with FileLock(given.lock):  # one at a time has the GPU to itself
            one(case, given.one, given.seconds, profile=given.profile)
        return
    same = ["--profile"] if given.profile else []
    same += [*("--encoder", given.encoder), *("--batch", str(given.batch)), *("--seconds", str(given.seconds))]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, *same, "--lock", str(Path(folder, "lock")), "--one"]
        ways = [*WAYS, *(way for way, (searches, _) in WAYS.items() if searches)]
        started = [(way, subprocess.Popen([*command, way], stdout=subprocess.PIPE, text=True)) for way in ways]
        found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
        for way, process in started:
            found[way].append(json.loads(process.communicate()[0].splitlines()[-1]))
    rows = {
        way: {
            "images_per_second": max(each["images_per_second"] for each in several),
            "repeats": len({weights for each in several for weights in each["weights"]}) == 1,
        }
        for way, several in found.items()
    }
    for way, row in rows.items():
        print(f"{way:24} {row['images_per_second']:10,.0f} images/s   {'repeats' if row['repeats'] else 'differs'}")
    record = {"encoder": given.encoder, "batch": given.batch, "steps": STEPS, "ways": rows, "machine": describe()}
    given.out.write_text(json.dumps(record, indent=1) + "\n")


def one(case: Case, way: str, seconds: float, *, profile: bool) -> None:
    """What one process finds."""
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = WAYS[way]
    torch.manual_seed(0)
    parts = parts_of(case, "cam")
    step = bare(case, "graph" if DEVICE.type == "cuda" else "default", parts)
    state = [weight for group in parts.optimizer.param_groups for weight in group["params"]]
    state += [
        value for of_weight in parts.optimizer.state.values() for value in of_weight.values() if value is not None
    ]
    before = [value.detach().clone() for value in state]
    digests = []
    for _ in range(2):
        with torch.no_grad():
            torch._foreach_copy_(state, before)
        for _ in range(STEPS):
            step()
        digest = hashlib.sha256()
        for value in state:
            digest.update(value.detach().cpu().numpy().tobytes())
        digests.append(digest.hexdigest())
    if profile:
        with torch.profiler.profile() as seen:
            step()
            if DEVICE.type == "cuda":
                torch.cuda.synchronize()
        by = f"self_{DEVICE.type}_time_total"
        print(way, seen.key_averages().table(sort_by=by, row_limit=16, max_name_column_width=70), file=sys.stderr)
    print(json.dumps({"images_per_second": timed(step, case, seconds), "weights": digests}), flush=True)


if __name__ == "__main__":
    main()
