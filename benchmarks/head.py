"""A head on a frozen encoder beside training the whole network, on the bundled sample: seconds and mAP.

    python benchmarks/head.py [--weights MODEL]      writes benchmarks/results/head.json
    python benchmarks/head.py --pretrain CIFAR.npz   first trains that encoder on the pictures of an .npz, then goes on

The frozen encoder is a ResNet-10 that was trained on other pictures (--weights, a model or run of Kedge's, or
--pretrain); beside it the same one with random weights, and the whole network trained as `kedge demo` does. Seconds are
those of the whole `kedge train`, its start included.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from kedge.reproduce.machine import describe
from runs import kedge

RESULTS = Path(__file__).parent / "results" / "head.json"
ENCODER = ("encoder=resnet10", "encoder.stem=imagenet", "encoder.dim=128")
PRETRAINING = (
    *ENCODER,
    "recipe=kedge",
    "recipe.epochs=4",
    "recipe.mixing.cutmix=0",
    "recipe.size=32",
    "split.holdout=0",
)
SIZE = "recipe.size=32"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--pretrain", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        weights = given.weights
        if given.pretrain:
            weights = place / "pretrained"
            kedge("train", "dataset=arrays", f"dataset.path={given.pretrain}", *PRETRAINING, f"hydra.run.dir={weights}")
        ways = {
            "head, frozen random weights": ("dataset=sample", *ENCODER, "recipe=head", SIZE),
            "whole network, as in the demo": ("experiment=demo",),
        }
        if weights:
            ways["head, frozen weights of other pictures"] = (
                *ways["head, frozen random weights"],
                f"encoder.weights={weights}",
            )
        found = {name: measured(settings, place / str(number)) for number, (name, settings) in enumerate(ways.items())}
    rows = [[name, *values.values()] for name, values in found.items()]
    columns = ["way", "seconds", "brute-force mAP", "label-list mAP", "accuracy"]
    record = {
        "pretraining": " ".join(PRETRAINING) if given.pretrain else None,
        "table": {"columns": columns, "rows": rows},
        "machine": describe(),
    }
    RESULTS.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record["table"], indent=1))


def measured(settings: tuple[str, ...], folder: Path) -> dict[str, Any]:
    """What one way takes and gives."""
    started = time.perf_counter()
    kedge("train", *settings, f"hydra.run.dir={folder}")
    seconds = time.perf_counter() - started
    kedge("evaluate", str(folder))
    metrics = json.loads((folder / "metrics.json").read_text())
    return {
        "seconds": round(seconds, 1),
        "brute_force": round(metrics["brute_force"]["mAP"], 3),
        "label_lists": round(metrics["label_lists"]["mAP"], 3),
        "accuracy": round(metrics["accuracy"], 3),
    }


if __name__ == "__main__":
    main()
