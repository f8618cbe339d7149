from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from kedge.encoders import build_encoder
from kedge.errors import ConfigError, ModelError
from kedge.images import Preprocessing
from kedge.interop import export_program
from kedge.model import Model

ALONE = """
import json, sys
import numpy as np, torch

extra = {"kedge.json": ""}
program = torch.export.load("model.pt2", extra_files=extra).module()
pixels = torch.from_numpy(np.load("pixels.npy"))
embeddings, scores = program(pixels)
assert "kedge" not in sys.modules and "torchvision" not in sys.modules
assert program(pixels[:1])[0].shape == (1, 8)
about = json.loads(extra["kedge.json"])
assert json.loads(about["classes"]) == ["ant", "bee"]
assert json.loads(about["preprocessing"])["size"] == 32
np.savez("found.npz", embeddings=embeddings, scores=scores)
"""


def make() -> Model:
    torch.manual_seed(0)
    encoder = build_encoder("resnet10", dim=8, stem="imagenet", image_size=32)
    preprocessing = Preprocessing(size=32, mean=(0.4, 0.5, 0.6), std=(0.2, 0.2, 0.2), flip_tta=True)
    model = Model(encoder.eval(), anchors=torch.randn(2, 8), classes=["ant", "bee"], preprocessing=preprocessing)
    model.engine = "eager"
    return model


def test_a_fresh_process_without_kedge_gives_the_same(tmp_path: Path) -> None:
    model = make()
    assert export_program(model, tmp_path / "model.pt2", anchors=True) == tmp_path / "model.pt2"
    assert [one.name for one in tmp_path.iterdir()] == ["model.pt2"]
    pixels = np.random.default_rng(0).integers(0, 256, (5, 3, 32, 32), dtype=np.uint8)
    np.save(tmp_path / "pixels.npy", pixels)
    subprocess.run([sys.executable, "-c", ALONE], cwd=tmp_path, check=True)
    found = np.load(tmp_path / "found.npz")
    embeddings = model.embed_pixels(torch.from_numpy(pixels))
    np.testing.assert_allclose(found["embeddings"], embeddings, atol=1e-5)
    np.testing.assert_allclose(found["scores"], model.scores(embeddings), atol=1e-5)


class OtherwiseWhenTraced(nn.Module):
    def forward(self, images: Tensor) -> Tensor:
        found = images.mean(dim=(2, 3)).repeat(1, 171)[:, :512]
        return found * 2 if torch.compiler.is_compiling() else found


def test_an_export_that_fails_leaves_nothing(tmp_path: Path) -> None:
    model = make()
    model.encoder.backbone = OtherwiseWhenTraced()
    with pytest.raises(ModelError, match="would differ from the model: its embeddings of 1 random images"):
        export_program(model, tmp_path / "model.pt2")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ModelError, match="would differ"):  # nor where anchors are all that torch has to keep
        export_program(model, tmp_path / "model.pt2", anchors=True)
    with pytest.raises(ConfigError, match=r"end in \.pt2"):
        export_program(model, tmp_path / "model.onnx")
