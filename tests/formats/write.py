"""Writes a model and a gallery as this release of Kedge does, for later ones to open: tests/formats/VERSION.zip.

    python tests/formats/write.py

Run it once for a release that changed a format, and commit the archive; those of before stay as they are.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import torch

import kedge
from kedge.encoders import build_encoder
from kedge.images import Preprocessing

HERE = Path(__file__).parent
CLASSES = ("anchor", "buoy", "chain")


def written_model() -> kedge.Model:
    """A model whose weights repeat themselves, so that they take little room in an archive."""
    encoder = build_encoder("resnet10", dim=8, stem="small").eval()
    with torch.no_grad():
        for name, weight in encoder.named_parameters():
            repeated = torch.arange(weight.numel()) % 251 / 125 - 1
            scale = math.sqrt(6 / weight[0].numel()) if weight.ndim > 1 else 0.1
            weight.copy_(repeated.view_as(weight) * scale + (1.0 if "bn" in name and "weight" in name else 0.0))
    anchors = 2 * torch.eye(3, 8)
    size = Preprocessing(size=32, mean=(0.5,) * 3, std=(0.25,) * 3)
    return kedge.Model(encoder, anchors=anchors, classes=CLASSES, preprocessing=size)


def picture() -> np.ndarray:
    """Something to embed."""
    return (np.arange(32 * 32 * 3) * 7 % 256).astype(np.uint8).reshape(32, 32, 3)


def write_gallery(folder: Path, model: kedge.Model) -> kedge.Gallery:
    """Rows in the lists and in the tail, removed ones, a label with an anchor of its own, metadata."""
    gallery = kedge.Gallery.create(folder, model)
    chance = np.random.default_rng(0)

    def add(count: int, *names: str) -> list[int]:
        labels = [names[row % len(names)] for row in range(count)]
        paths = [f"{label}/{row}.png" for row, label in enumerate(labels)]
        vectors = chance.normal(size=(count, 8)).astype(np.float32)
        return gallery.add_embeddings(vectors, labels=labels, paths=paths, metadata={"price": list(range(count))})

    ids = add(60, *CLASSES, "dock")
    gallery.optimize()
    add(9, *CLASSES)
    gallery.remove([ids[3], ids[8]])
    return gallery


def found(model: kedge.Model, gallery: kedge.Gallery) -> dict[str, object]:
    """What must not change."""
    query = np.linspace(-1, 1, 8, dtype=np.float32)[None]
    (near,) = gallery.search_embeddings(query, k=7)
    (all_of_them,) = gallery.search_embeddings(query, k=7, method="brute_force", where="price < 20")
    return {
        "embedding": model.embed(picture())[0].tolist(),
        "class": model.classify([picture()]),
        "length": len(gallery),
        "two_stage": [[hit.id, hit.path, hit.label, hit.distance] for hit in near],
        "filtered": [[hit.id, hit.path, hit.label, hit.distance] for hit in all_of_them],
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        model = written_model()
        model.save(folder / "model")
        expected = found(model, write_gallery(folder / "gallery", model))
        (folder / "expected.json").write_text(json.dumps(expected, indent=1))
        archive = HERE / f"{kedge.__version__}.zip"
        if archive.exists():
            sys.exit(f"{archive.name} is there already: a release writes its formats once.")
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as out:
            for file in sorted(folder.rglob("*")):
                out.write(file, file.relative_to(folder))
        print(f"{archive.name}: {archive.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
