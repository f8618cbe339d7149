"""What a size asks for: disk, memory, time and money, from the constants that the other benchmarks have measured.

    python benchmarks/plan.py [--core-hour 0.04] [--gpu-hour 3.00] [--memory-hour 0.005] [--gib-month 0.023]

Reads benchmarks/results/{indexing,large,train_throughput}.json and writes plan.json beside them. Prices are
yours to give; those above are round figures of the kind that large clouds ask for.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent / "results"
PICTURES = (1_000_000, 10_000_000, 100_000_000)
CLASSES = (1_000, 10_000, 100_000, 1_000_000)
DIM, EPOCHS, CORES, SEARCHING = 512, 10, 64, 2
"""Of embeddings; of training that starts from a model; cores of the cluster that indexes, of the one that searches."""
HOURS = 730
"""In a month."""
GIB = 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--core-hour", type=float, default=0.04)
    parser.add_argument("--gpu-hour", type=float, default=3.0)
    parser.add_argument("--memory-hour", type=float, default=0.005, help="of one GiB")
    parser.add_argument("--gib-month", type=float, default=0.023)
    given = parser.parse_args()
    constants = measured()
    rows = [row(constants, pictures, given) for pictures in PICTURES]
    columns = [
        "pictures",
        "table and lists, GiB",
        f"decode and embed on {CORES} cores",
        "write the lists",
        "a machine that searches from memory",
        "read per query, MiB (1,000 classes)",
        f"{EPOCHS} epochs of ResNet-50 at 32 pixels, one H200",
        "once, $",
        "per month, $",
    ]
    record = {"constants": constants, "prices": vars(given), "table": {"columns": columns, "rows": rows}}
    (HERE / "plan.json").write_text(json.dumps(record, indent=1) + "\n")
    classes = [of_classes(count) for count in CLASSES]
    columns = [
        "classes",
        "anchors, GiB",
        "training: anchors, gradient, momentum, average, GiB",
        "index over the anchors, GiB",
    ]
    (HERE / "plan_classes.json").write_text(
        json.dumps({"dim": DIM, "table": {"columns": columns, "rows": classes}}, indent=1) + "\n"
    )
    print(json.dumps(record, indent=1))


def measured() -> dict[str, float]:
    """Per core, per picture, per second."""
    indexing, large, trained = (
        json.loads((HERE / f"{name}.json").read_text()) for name in ("indexing", "large", "train_throughput")
    )
    ours = large["systems"]["kedge"]
    vectors = 2 * 4 * large["dim"]  # one in the table, one in the lists
    return {
        "pictures_per_core_second": round(indexing["indexing"] / indexing["machine"]["cores"], 1),
        "bytes_per_picture_besides_vectors": round(ours["disk_gib"] * GIB / large["items"] - vectors, 1),
        "list_bytes_written_per_second": round(4 * large["dim"] * large["items"] / ours["build_s"]),
        "training_images_per_second": trained["images_per_second"]["resnet50-512"]["kedge"],
    }


def row(constants: dict[str, float], pictures: int, prices: Any) -> list[Any]:
    disk = pictures * (2 * 4 * DIM + constants["bytes_per_picture_besides_vectors"]) / GIB
    embedding = pictures / constants["pictures_per_core_second"] / CORES
    writing = pictures * 4 * DIM / constants["list_bytes_written_per_second"]
    training = EPOCHS * pictures / constants["training_images_per_second"]
    # All lists and a GiB for the process, in the sizes that machines come in.
    memory = 2 ** math.ceil(math.log2(1 + pictures * 4 * DIM / GIB))
    once = (embedding * CORES + writing * 2) / 3600 * prices.core_hour + training / 3600 * prices.gpu_hour
    return [
        f"{pictures:,}",
        rounded(disk),
        lasting(embedding),
        lasting(writing),
        f"{SEARCHING} cores, {memory:,} GiB",
        rounded(pictures / 1_000 * 4 * DIM / 2**20),
        lasting(training),
        rounded(once),
        rounded(disk * prices.gib_month + HOURS * (SEARCHING * prices.core_hour + memory * prices.memory_hour)),
    ]


def of_classes(count: int) -> list[Any]:
    anchors = count * DIM * 4 / GIB
    # Its vectors, a centre for every half of a root, and a few numbers for each.
    index = anchors + 2 * math.isqrt(count) * DIM * 4 / GIB + count * 8 / GIB if count >= 20_000 else 0.0
    return [f"{count:,}", rounded(anchors), rounded(4 * anchors), rounded(index) if index else "not needed"]


def rounded(value: float) -> str:
    return f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"


def lasting(seconds: float) -> str:
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds:.3g} s"


if __name__ == "__main__":
    main()
