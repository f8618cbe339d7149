"""From a folder of photos to a gallery: `kedge train`, `evaluate` and `index`, one after the other.

    python benchmarks/photo_road.py FOLDER [--commit COMMIT]      results go to benchmarks/results/photo_road.json

The folder holds a folder of photos for each class. Beside the three commands, from an empty cache, stands one pass over
the same photos: decoded by Pillow to 224 pixels in two threads, and, after that, encoded (EfficientNet-Lite0 of timm,
channels last, as it is or as `Model.features` runs it, in batches of the best size). With a commit, such as that of the
last release, its three commands on the same photos and weights are timed too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

import kedge
from frozen import squared
from kedge.reproduce.machine import describe
from runs import kedge as command

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "photo_road.json"
BATCHES = (4, 8, 16, 32)
SAMPLE = 512
"""Photos with which the encoder's best way and batch size are found."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--commit", help="to compare with")
    given = parser.parse_args()
    folder = given.folder.resolve()
    model = kedge.Model.pretrained()
    found: dict[str, Any] = {"one pass": one_pass(folder, model)}
    with tempfile.TemporaryDirectory() as scratch:
        found["now"] = road(ROOT / "src", folder, Path(scratch, "now"), ())
        if given.commit:
            weights = Path(scratch, "weights.safetensors")
            state = {name: value.contiguous() for name, value in model.encoder.backbone.state_dict().items()}
            safetensors.torch.save_file(state, weights)
            name = model.encoder.name
            then = ("recipe=head", "encoder=timm", f"encoder.name={name}", f"encoder.weights={weights}")
            other = Path(scratch, "other")
            subprocess.run(["git", "worktree", "add", "--quiet", "--detach", other, given.commit], cwd=ROOT, check=True)
            try:
                found["then"] = {"commit": given.commit, **road(other / "src", folder, Path(scratch, "then"), then)}
            finally:
                subprocess.run(["git", "worktree", "remove", "--force", other], cwd=ROOT, check=True)
    found["now / one pass"] = round(found["now"]["all"] / found["one pass"]["all"], 3)
    if given.commit:
        found["then / now"] = round(found["then"]["all"] / found["now"]["all"], 2)
    print(json.dumps(found, indent=1))
    RESULTS.write_text(json.dumps({**found, "machine": describe()}, indent=1) + "\n")


def one_pass(folder: Path, model: kedge.Model) -> dict[str, Any]:
    """Seconds of decoding all photos, and of encoding as many, at the best rate."""
    files = sorted(file for file in folder.glob("*/*") if file.suffix.lower() in (".jpg", ".jpeg", ".png"))
    started = time.perf_counter()
    with ThreadPoolExecutor(2) as pool:
        decoded = np.stack(list(pool.map(squared, files)))
    decoding = time.perf_counter() - started
    pixels = torch.from_numpy(decoded).permute(0, 3, 1, 2)
    network = model.encoder.backbone.eval().to(memory_format=torch.channels_last)
    prepare = model.preprocessing.to_input
    ways = {"as it is": lambda batch: network(prepare(batch)), "Model.features": model.features}
    rates = {(way, size): SAMPLE / encode(ways[way], pixels[:SAMPLE], size) for way in ways for size in BATCHES}
    way, size = max(rates, key=lambda setting: rates[setting])
    encoding = encode(ways[way], pixels, size)
    return {
        "photos": len(files),
        "decoding": round(decoding, 1),
        "encoding": round(encoding, 1),
        "all": round(decoding + encoding, 1),
        "encoder": f"{way}, batches of {size}",
        "photos/s": {f"{way}, {size}": round(rate, 1) for (way, size), rate in rates.items()},
    }


@torch.inference_mode()
def encode(encoder: Callable[[torch.Tensor], Any], pixels: torch.Tensor, size: int) -> float:
    """Seconds of an encoder over all pixels, in batches."""
    encoder(pixels[:size])
    started = time.perf_counter()
    for batch in pixels.split(size):
        encoder(batch)
    return time.perf_counter() - started


def road(source: Path, photos: Path, scratch: Path, overrides: tuple[str, ...]) -> dict[str, float]:
    """Seconds of the three commands with an empty cache."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(source), *path()]), "KEDGE_DATA": str(scratch)}
    run = scratch / "run"
    commands = {
        "train": ("train", photos, *overrides, "logger=none", f"hydra.run.dir={run}"),
        "evaluate": ("evaluate", run),
        "index": ("index", photos, "--model", run, "--gallery", scratch / "gallery"),
    }
    seconds = {}
    for name, arguments in commands.items():
        started = time.perf_counter()
        command(*arguments, environment=environment)
        seconds[name] = round(time.perf_counter() - started, 1)
    return {**seconds, "all": round(sum(seconds.values()), 1)}


def path() -> list[str]:
    """What the commands inherit of PYTHONPATH, without a checkout of Kedge."""
    parts = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return [part for part in parts if part and not Path(part, "kedge").exists()]


if __name__ == "__main__":
    main()
