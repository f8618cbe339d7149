"""How many images a CPU embeds in a second: Kedge beside eager torch, onnxruntime and timm.

    python benchmarks/embedding.py             writes benchmarks/results/embedding.json
    python benchmarks/embedding.py --quick     EfficientNet-Lite0 and few rounds; writes nothing

All get the same uint8 pixels, 224 x 224, and normalize them with the same call. Kedge, eager torch and onnxruntime
(the encoder exported by torch, opened with its defaults) have the same weights; timm's model of the same name, run
eagerly on contiguous batches, has its own. They are measured in turns, and the medians count. At batch 32, Kedge must
reach twice timm's rate with EfficientNet-Lite0, and timm's rate with all others.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import timm
import torch
from torch import Tensor, nn

from kedge.encoders import DEFAULT_ENCODER, build_encoder
from kedge.images import IMAGENET_MEAN, IMAGENET_STD, Preprocessing
from kedge.model import Model
from kedge.reproduce.machine import describe

RESULTS = Path(__file__).parent / "results" / "embedding.json"
SIDE = 224
ENCODERS = {DEFAULT_ENCODER: 2.0, "resnet18": 1.0, "resnet50": 1.0, "timm:vit_small_patch16_224": 1.0}
"""What Kedge must reach at batch 32, times timm's rate."""
BATCHES = (1, 32)
RIVALS = ("eager torch", "onnxruntime", "timm")
SECONDS, LEAST = 12.0, 5
"""Of measuring each case, and rounds at least."""

Embed = Callable[[Tensor], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    cases = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in [DEFAULT_ENCODER] if quick else ENCODERS:
            for batch in BATCHES:
                cases.append(measure(name, batch, Path(scratch), 3.0 if quick else SECONDS))
                print(json.dumps(cases[-1]), flush=True)
    table = shown(cases)
    for cells in (table["columns"], *table["rows"]):
        print(" | ".join(f"{cell!s:>22}" for cell in cells))
    for case in cases:
        if case["batch"] == 32:
            ratio = case["images_per_second"]["kedge"] / case["images_per_second"]["timm"]
            met = "met" if ratio >= ENCODERS[case["encoder"]] else "NOT MET"
            print(f"{case['encoder']}: {ratio:.2f} x timm, at least {ENCODERS[case['encoder']]:g}: {met}")
    if not quick:
        about = {**describe(), "threads": torch.get_num_threads()}
        about |= {"onnxruntime": onnxruntime.__version__, "timm": timm.__version__}
        RESULTS.write_text(json.dumps({"cases": cases, "table": table, "machine": about}, indent=1) + "\n")


def measure(name: str, batch: int, scratch: Path, seconds: float) -> dict[str, Any]:
    torch.manual_seed(0)
    encoder = settled(build_encoder(name, head="none", stem="imagenet"))
    preprocessing = Preprocessing(size=SIDE, mean=IMAGENET_MEAN, std=IMAGENET_STD, scale=1 / 255)
    model = Model(encoder, anchors=None, classes=[], preprocessing=preprocessing)
    pixels = torch.randint(256, (batch, 3, SIDE, SIDE), dtype=torch.uint8)
    ways: dict[str, Embed] = {
        "kedge": model.embed_pixels,
        "eager torch": after(preprocessing, encoder),
        "onnxruntime": after(preprocessing, exported(encoder, scratch / f"{name.removeprefix('timm:')}.onnx")),
        "timm": after(preprocessing, settled(timm.create_model(name.removeprefix("timm:"), num_classes=0))),
    }
    with torch.inference_mode():
        wanted = ways["eager torch"](pixels)
        apart = {
            way: float((ways[way](pixels) - wanted).norm(dim=1).max() / wanted.norm(dim=1).mean())
            for way in ("kedge", "onnxruntime")
        }
        found = in_turns(ways, pixels, seconds)
    return {
        "encoder": name,
        "batch": batch,
        "rounds": len(found["kedge"]),
        "engine": model.engine,
        "images_per_second": {way: round(batch / statistics.median(times), 2) for way, times in found.items()},
        "milliseconds": {way: [round(1000 * one, 2) for one in quartiles(times)] for way, times in found.items()},
        "distance_from_eager": {way: float(f"{value:.1e}") for way, value in apart.items()},
    }


def in_turns(ways: dict[str, Embed], pixels: Tensor, seconds: float) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {way: [] for way in ways}
    began = time.monotonic()
    while time.monotonic() - began < seconds or len(found["kedge"]) < LEAST:
        for way, embed in ways.items():
            if len(pixels) == 1:
                embed(pixels)  # the caches and threads of the one before are not its fault
            started = time.perf_counter()
            embed(pixels)
            found[way].append(time.perf_counter() - started)
    return found


def settled(network: Any) -> Any:
    """With running statistics of some batch, so that activations are neither lost nor huge."""
    with torch.no_grad():
        network.train()(torch.randn(4, 3, SIDE, SIDE))
    return network.eval()


def after(preprocessing: Preprocessing, network: Embed) -> Embed:
    def embed(pixels: Tensor) -> Tensor:
        with torch.inference_mode():
            return network(preprocessing.to_input(pixels))

    return embed


def exported(encoder: nn.Module, file: Path) -> Embed:
    shapes = ({0: torch.export.Dim("batch")},)
    example = (torch.randn(2, 3, SIDE, SIDE),)
    torch.onnx.export(
        encoder, example, str(file), dynamo=True, input_names=["images"], dynamic_shapes=shapes, verbose=False
    )
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])

    def embed(images: Tensor) -> Tensor:
        return torch.from_numpy(session.run(None, {"images": images.numpy()})[0])

    return embed


def quartiles(times: list[float]) -> list[float]:
    return statistics.quantiles(times, n=4)


def shown(cases: list[dict[str, Any]]) -> dict[str, Any]:
    """Images per second; the engine that was used, and how much faster than eager torch, timm and the best rival."""
    rows = []
    for case in cases:
        speed = case["images_per_second"]
        way = case["engine"].partition(": ")[2]
        best = max(speed[rival] for rival in RIVALS)
        rows.append(
            [
                f"{case['encoder'].removeprefix('timm:')}, batch {case['batch']}",
                f"{speed['kedge']:.1f} ({way})",
                *(f"{speed[other]:.1f}" for other in RIVALS),
                f"{speed['kedge'] / speed['eager torch']:.2f}",
                f"{speed['kedge'] / speed['timm']:.2f}",
                f"{speed['kedge'] / best:.2f}",
            ]
        )
    columns = ["images/s", "Kedge (engine)", *RIVALS, "× eager", "× timm", "× best rival"]
    return {"columns": columns, "rows": rows}


if __name__ == "__main__":
    main()
