"""How long `import kedge` and `kedge --help` take, beside a bare Python and an import of torch.

python benchmarks/startup.py
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from kedge.reproduce.machine import describe

RESULTS = Path(__file__).parent / "results" / "startup.json"
REPEATS = 9
COMMANDS = {
    "python": ["-c", "pass"],
    "import kedge": ["-c", "import kedge"],
    "kedge --help": ["-m", "kedge", "--help"],
    "import torch": ["-c", "import torch"],
}


def seconds(arguments: list[str]) -> float:
    """The median over a few fresh interpreters."""
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def main() -> None:
    found = {name: seconds(arguments) for name, arguments in COMMANDS.items()}
    bare, torch = found["python"], found["import torch"]
    for name, value in found.items():
        print(f"{name:14} {value * 1000:7.0f} ms   {value / bare:5.1f} x python   {value / torch:5.2f} x import torch")
    result = {"repeats": REPEATS, "median_seconds": {name: round(value, 4) for name, value in found.items()}}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(result | {"machine": describe()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
