from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_tables_are_those_of_the_benchmarks() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/tables.py"), "--check"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_table_of_results_is_marked() -> None:
    for page in (ROOT / "docs").glob("*.md"):
        lines = page.read_text(encoding="utf-8").splitlines()
        for above, line in itertools.pairwise(lines):
            if "mAP" in line and line.startswith("|") and not above.startswith("|"):
                assert above.startswith("<!-- results: "), line
