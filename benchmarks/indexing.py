"""How fast a folder of JPEGs becomes a gallery, beside what the encoder alone could do, and a second time.

    python benchmarks/indexing.py              5,000 pictures; writes benchmarks/results/indexing.json
    python benchmarks/indexing.py --quick      300 pictures; writes nothing

The pictures are 256 pixels wide and as hard to decode as photographs of that size; the encoder is an untrained
ResNet-18 at 64 pixels. Alone, it gets the same pictures as decoded tensors.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from kedge.encoders import build_encoder
from kedge.gallery import Gallery
from kedge.gallery.ingest import index_folder
from kedge.images import Preprocessing, list_images, read_image
from kedge.model import Model
from kedge.reproduce.machine import describe

RESULTS = Path(__file__).parent / "results" / "indexing.json"
SIDE, SEEN, CLASSES, BATCH = 256, 64, 10, 64
ROUNDS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    count = 300 if parser.parse_args().quick else 5_000
    torch.manual_seed(0)
    model = Model(
        build_encoder("resnet18", dim=128, stem="imagenet"),
        anchors=None,
        classes=[],
        preprocessing=Preprocessing(size=SEEN),
    )
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["KEDGE_DATA"] = scratch  # no features of an earlier run
        photos = Path(scratch, "photos")
        draw(photos, count)
        figures = measure(model, photos, Path(scratch))
    print(
        f"{count:,} pictures: {figures['indexing']:.0f} pictures/s, {figures['times_encoder_alone']:.2f} x the encoder "
        f"alone ({figures['encoder']:.0f}/s); decoding alone, on all cores: {figures['decoding']:.0f}/s; one after the "
        f"other: {figures['one_after_the_other']:.0f}/s.\n"
        f"A second run over the same folder: {figures['again_times_faster']:.0f} x faster."
    )
    if count == 5_000:
        RESULTS.write_text(json.dumps({"pictures": count, **figures, "machine": describe()}, indent=1) + "\n")


def draw(photos: Path, count: int) -> None:
    """Smooth shapes under some grain, as JPEG."""
    chance = np.random.default_rng(0)
    for label in range(CLASSES):
        (photos / f"class {label}").mkdir(parents=True)
    for row in range(count):
        coarse = Image.fromarray(chance.integers(0, 256, (12, 12, 3), dtype=np.uint8))
        smooth = np.asarray(coarse.resize((SIDE, SIDE), Image.Resampling.BICUBIC), np.float32)
        grain = chance.normal(scale=8, size=smooth.shape)
        picture = Image.fromarray(np.clip(smooth + grain, 0, 255).astype(np.uint8))
        picture.save(photos / f"class {row % CLASSES}" / f"{row}.jpg", quality=85)


def measure(model: Model, photos: Path, scratch: Path) -> dict[str, Any]:
    files = list_images(photos)

    def pixels(file: Path) -> torch.Tensor:
        return torch.from_numpy(model.preprocessing.to_pixels(read_image(file)))

    with ThreadPoolExecutor() as pool:
        started = time.perf_counter()
        decoded = list(pool.map(pixels, files))
        decoding = time.perf_counter() - started
    gallery = Gallery.create(scratch / "gallery", model)
    model.embed(decoded[:BATCH])
    alone = time.perf_counter()
    for first in range(0, len(decoded), BATCH):
        model.embed(decoded[first : first + BATCH])
    alone = time.perf_counter() - alone
    started = time.perf_counter()
    assert len(index_folder(gallery, photos)) == len(files)
    indexing = time.perf_counter() - started
    again = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        assert index_folder(gallery, photos).present == len(files)
        again.append(time.perf_counter() - started)
    count = len(files)
    return {
        "indexing": round(count / indexing, 1),
        "encoder": round(count / alone, 1),
        "decoding": round(count / decoding, 1),
        "one_after_the_other": round(count / (alone + decoding), 1),
        "times_encoder_alone": round(alone / indexing, 3),
        "again_times_faster": round(indexing / float(np.median(again)), 1),
    }


if __name__ == "__main__":
    main()
