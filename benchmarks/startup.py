"""How long commands take to start: `import kedge`, `kedge --help`, a cold `kedge search`, 100 queries in one command.

python benchmarks/startup.py

Beside them a bare Python and an import of torch, which no search with an image can do without. The gallery holds
bundled images, embedded by the default encoder (kedge[pretrained]).
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from kedge.reproduce.machine import describe

RESULTS = Path(__file__).parent / "results" / "startup.json"
REPEATS, QUERIES = 9, 100
SEARCH = ["-m", "kedge", "search", "gallery", "-k", "5"]
COMMANDS = {
    "python": ["-c", "pass"],
    "import kedge": ["-c", "import kedge"],
    "kedge --help": ["-m", "kedge", "--help"],
    "import torch": ["-c", "import torch"],
    "kedge versions": ["-m", "kedge", "versions", "gallery"],
    "kedge search, 1 query": [*SEARCH, "some/0.png"],
    f"kedge search, {QUERIES} queries": [*SEARCH, "some"],
}


def make_gallery(folder: Path) -> None:
    """A gallery, and as many images to search it with."""
    subprocess.run([sys.executable, "-m", "kedge", "sample", "--pictures", "20"], cwd=folder, check=True)
    index = [sys.executable, "-m", "kedge", "index", "photos", "--gallery", "gallery"]
    subprocess.run(index, cwd=folder, check=True)
    (folder / "some").mkdir()
    for number, file in enumerate(sorted((folder / "queries").rglob("*.png"))[:QUERIES]):
        file.rename(folder / "some" / f"{number}.png")


def seconds(arguments: list[str], folder: Path) -> float:
    """The median over a few fresh interpreters."""
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        subprocess.run([sys.executable, *arguments], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        make_gallery(Path(folder))
        found = {name: seconds(arguments, Path(folder)) for name, arguments in COMMANDS.items()}
    bare, torch = found["python"], found["import torch"]
    for name, value in found.items():
        print(f"{name:25} {value:7.3f} s   {value / bare:6.1f} x python   {value / torch:5.2f} x import torch")
    one, many = found["kedge search, 1 query"], found[f"kedge search, {QUERIES} queries"]
    ratios = {"share_of_import_torch": torch / one, "one_command_for_100": many / (QUERIES * one)}
    print(f"import torch is {torch / one:.0%} of a cold search")
    print(f"{QUERIES} queries in one command take {many:.1f} s, in {QUERIES} commands {QUERIES * one:.0f} s")
    result = {"repeats": REPEATS, "median_seconds": {name: round(value, 4) for name, value in found.items()}}
    result |= {name: round(value, 4) for name, value in ratios.items()}
    rows = [[f"`{name}`", f"{value:.2f}", f"{value / torch:.2f}"] for name, value in found.items() if name != "python"]
    result["table"] = {"columns": ["command", "seconds", "x `import torch`"], "rows": rows}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(result | {"machine": describe()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
