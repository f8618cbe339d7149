"""Writes the tables of the documentation from the result files: no figure there is typed by hand.

    python benchmarks/tables.py            fills every table below `<!-- results: NAME -->` in README and docs;
                                           `<!-- results: NAME PART -->` where a file holds several tables;
                                           `<!-- results: photos summary -->` draws on two of them
    python benchmarks/tables.py --check    says which of them differ from what the results say

Runs that differ by their seed alone (`name-0`, `name-1` …) share a row: mean ± standard deviation, and how many.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
COLUMNS = {
    "label-list mAP": ("label_lists", "mAP"),
    "brute-force mAP": ("brute_force", "mAP"),
    "anchor-list mAP": ("anchor_lists", "mAP"),
    "brute-force P@20": ("brute_force", "P@20"),
    "cosine mAP": ("brute_force_cosine", "mAP"),
    "1-NN": ("knn1", None),
}
LATER = ("cosine mAP", "1-NN")
"""Columns that older results do not have, shown where all runs of a table do."""
SUMMARY = {
    "raw features": "raw features",
    "logistic regression, posteriors": "logistic regression, logits",
    "ProxyAnchor": "ProxyAnchor",
    "Kedge": "Kedge, auto",
}
"""Ways of the summary of photos.json, as its tables of known and of unseen classes call them."""
MARK = re.compile(r"(<!-- results: ([\w-]+)(?: (\w+))? -->\n)(?:\|.*\n)*")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = []
    for page in [HERE.parent / "README.md", *sorted((HERE.parent / "docs").rglob("*.md"))]:
        text = page.read_text(encoding="utf-8")
        filled = fill(text)
        if filled != text:
            stale.append(page.name)
            if not check:
                page.write_text(filled, encoding="utf-8")
    if stale:
        print(("out of date: " if check else "written: ") + ", ".join(stale))
    raise SystemExit(1 if check and stale else 0)


def fill(text: str) -> str:
    """The text with every marked table as the results have it."""
    return MARK.sub(
        lambda match: match[1] + table(json.loads((HERE / "results" / f"{match[2]}.json").read_text()), match[3]), text
    )


def table(record: dict[str, Any], part: str | None = None) -> str:
    if part == "summary":
        record = {"table summary": summary(record)}
    if (made := record.get(f"table {part}" if part else "table")) is not None:
        shown = [made["columns"], *made["rows"]]
        lines = [f"| {' | '.join(map(str, cells))} |" for cells in shown]
        return "\n".join([lines[0], f"|{'---|' * len(shown[0])}", *lines[1:]]) + "\n"
    groups: dict[str, list[dict[str, Any]]] = {}
    for run in record["runs"]:
        several = "seed=" in run["command"]
        groups.setdefault(re.sub(r"-\d+$", "", run["name"]) if several else run["name"], []).append(run)
    words = {name: overrides(runs[0]["command"]) for name, runs in groups.items()}
    common = [word for word in next(iter(words.values())) if all(word in others for others in words.values())]
    last = f"besides `{' '.join(common)}`" if common else "overrides"
    later = all("brute_force_cosine" in scores(run) for run in record["runs"])
    columns = {name: column for name, column in COLUMNS.items() if later or name not in LATER}
    lines = [f"| run | {' | '.join(columns)} | {last} |", f"|---|{'---|' * (len(columns) + 1)}"]
    for name, runs in groups.items():
        own = [word for word in words[name] if word not in common]
        lines.append(row(name, [scores(run) for run in runs], own, columns))
        if without := [run["test_without_mirror"] for run in runs if "test_without_mirror" in run]:
            lines.append(row(f"{name}, one look", without, own, columns))
    return "\n".join(lines) + "\n"


def summary(record: dict[str, Any]) -> dict[str, Any]:
    """One row for each way: known classes, unseen classes, and what it costs on the largest dataset."""
    cells = {
        (part, row[0], row[1], column): value
        for part in ("known", "unseen")
        for row in record[f"table {part}"]["rows"]
        for column, value in zip(record[f"table {part}"]["columns"], row, strict=True)
    }
    names = list(dict.fromkeys(row[0] for row in record["table known"]["rows"]))
    costs = ("training", "indexing", "query")
    rows = [
        [
            way if way == other or way == "Kedge" else f"{way}; {other.split(', ')[1]} for new classes",
            *(cells["known", name, way, "mAP"].split(" ±")[0] for name in names),
            *(cells["unseen", name, other, "unseen R@1"].split(" ±")[0] for name in names),
            *(cells["known", names[-1], way, cost] for cost in costs),
        ]
        for way, other in SUMMARY.items()
    ]
    columns = ["way", *(f"mAP, {name}" for name in names), *(f"new classes, {name}" for name in names), *costs]
    return {"columns": columns, "rows": rows}


def row(name: str, reports: list[dict[str, Any]], own: list[str], columns: dict[str, Any]) -> str:
    cells = [
        cell([report[method].get(metric) if metric else report[method] for report in reports])
        for method, metric in columns.values()
    ]
    return f"| {name} | {' | '.join(cells)} | {' '.join(f'`{word}`' for word in own)} |"


def scores(run: dict[str, Any]) -> dict[str, Any]:
    return next(run[name] for name in ("metrics", "test", "held_out") if name in run)  # type: ignore[no-any-return]


def cell(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    mean = f"{statistics.mean(known):.3f}".removeprefix("0")
    if len(known) == 1:
        return mean
    return f"{mean} ± {statistics.stdev(known):.3f} ({len(known)})".replace("± 0.", "± .")


def overrides(command: str) -> list[str]:
    """What a command says beyond data, seed and machine; of two values for one name the later counts."""
    beside = re.compile(r"(kedge|train)$|(dataset|seed|trainer|split)[.=]")
    return list({word.partition("=")[0]: word for word in command.split() if not beside.match(word)}.values())


if __name__ == "__main__":
    main()
