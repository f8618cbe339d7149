from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def test_tables_are_those_of_the_benchmarks() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/tables.py"), "--check"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_table_of_results_is_marked() -> None:
    for page in {*DOCS.glob("*.md")} - {DOCS / "results.md"}:
        lines = page.read_text(encoding="utf-8").splitlines()
        for above, line in itertools.pairwise(lines):
            if "mAP" in line and line.startswith("|") and not above.startswith("|"):
                assert above.startswith("<!-- results: "), line


def test_the_page_of_results_is_that_of_the_lines(tmp_path: Path) -> None:
    lines, page = DOCS / "results.jsonl", DOCS / "results.md"
    assert lines.exists() == page.exists()
    if lines.exists():
        shutil.copy(lines, tmp_path)
        command = [sys.executable, "-m", "kedge", "reproduce", "report", "--out", str(tmp_path)]
        subprocess.run(command, check=True, timeout=300)
        assert (tmp_path / "results.md").read_text(encoding="utf-8") == page.read_text(encoding="utf-8")
