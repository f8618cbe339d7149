"""A few bytes of a stranger's `model.json` take no memory and open no connection."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kedge.encoders import build_encoder
from kedge.encoders.transformers import TransformersBackbone
from kedge.errors import ConfigError, ModelError
from kedge.images import Preprocessing
from kedge.model import Model
from kedge.model.io import check_shapes

VIT = {"model_type": "vit", "image_size": 32, "patch_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
VIT |= {"hidden_size": 16, "intermediate_size": 32}
SWIN = {"model_type": "swin", "image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [1], "num_heads": [1]}

LARGER, SUM = "of a far larger network than its weights", "sizes that add up to more than"
ATTACKS: dict[str, tuple[dict[str, Any], str]] = {
    "a wide head": ({"dim": 5_000_000}, LARGER),
    "a head beyond counting": ({"dim": 10**18}, "cannot be opened"),
    "a large network": ({"name": "timm:vit_giant_patch14_224", "dim": 4}, LARGER),
    "wide layers": ({"name": "hf:x", "width": 16, "config": VIT | {"hidden_size": 60_000}}, LARGER),
    "many layers": ({"name": "hf:x", "width": 16, "config": VIT | {"num_hidden_layers": 20_000}}, LARGER),
    "many patches": ({"name": "hf:x", "width": 16, "config": VIT | {"image_size": 90_000, "patch_size": 1}}, LARGER),
    "patches in numpy": (
        {
            "name": "hf:x",
            "width": 16,
            "config": VIT | {"model_type": "vit_mae", "image_size": 90_000, "patch_size": 1},
        },
        LARGER,
    ),
    "depths": ({"name": "hf:x", "width": 16, "config": SWIN | {"depths": [10**9]}}, SUM),
    "several depths": ({"name": "hf:x", "width": 16, "config": SWIN | {"depths": [10**6] * 1000}}, SUM),
    "no width": ({"name": "hf:x", "config": VIT | {"image_size": 90_000}}, "'width'"),
}

LOADING = """
import resource, sys
from pathlib import Path
from kedge.errors import ConfigError, ModelError
from kedge.model import Model
import timm, transformers

Model.load(sys.argv[1], device="cpu")
taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + 3 * 2**30, resource.RLIM_INFINITY))
for folder in sys.argv[2:]:
    try:
        Model.load(folder, device="cpu")
        print("opened", flush=True)
    except ModelError as error:
        print(error, flush=True)
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = Model(
        build_encoder("resnet10", dim=4), anchors=torch.eye(4), classes=list("abcd"), preprocessing=Preprocessing(32)
    )
    path = tmp_path_factory.mktemp("saved") / "model"
    model.save(path)
    return path


Changed = Callable[..., Path]


@pytest.fixture
def changed(saved: Path, tmp_path: Path) -> Changed:
    """A copy of the model with another description."""

    def change(name: str = "model", *, encoder: dict[str, Any] | None = None, **values: Any) -> Path:
        folder = Path(shutil.copytree(saved, tmp_path / name))
        file = folder / "model.json"
        said = json.loads(file.read_text()) | values
        said["encoder"] |= encoder or {}
        file.write_text(json.dumps(said))
        return folder

    return change


def test_a_description_takes_no_more_memory_than_its_weights(saved: Path, changed: Changed) -> None:
    folders = [changed(name, encoder=spec) for name, (spec, _) in ATTACKS.items()]
    command = [sys.executable, "-c", LOADING, saved, *folders]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200).stdout.splitlines()
    assert len(said) == len(ATTACKS)
    for (name, (_, sentence)), found in zip(ATTACKS.items(), said, strict=True):
        assert sentence in found, (name, found)
        assert "alloc" not in found, (name, found)


def test_pictures_have_a_largest_size(changed: Changed) -> None:
    for size in (2049, 10**9):
        with pytest.raises(ModelError, match="size must be a number of pixels from 1 to 2048"):
            Model.load(changed(str(size), preprocessing={"size": size}), device="cpu")


def test_nothing_is_built_of_weights_that_do_not_fit(changed: Changed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even by a little: what is built has been compared."""
    folder = changed(encoder={"dim": 5})
    real, devices = torch.nn.Linear.__init__, []

    def remember(self: torch.nn.Linear, *arguments: Any, **options: Any) -> None:
        real(self, *arguments, **options)
        devices.append(self.weight.device.type)

    monkeypatch.setattr(torch.nn.Linear, "__init__", remember)
    with pytest.raises(ModelError, match=r"its weights file has other shapes for head\.(linear\.)?(weight|bias)"):
        Model.load(folder, device="cpu")
    assert set(devices) == {"meta"}


def test_weights_may_be_missing_or_too_many() -> None:
    encoder = build_encoder("resnet10", dim=4)
    shapes = {name: tuple(tensor.shape) for name, tensor in encoder.state_dict().items()}
    check_shapes(encoder.spec, shapes)
    with pytest.raises(ValueError, match=r"its weights file lacks backbone\.bn1\.weight"):
        check_shapes(encoder.spec, {name: shape for name, shape in shapes.items() if name != "backbone.bn1.weight"})
    with pytest.raises(ValueError, match=r"its weights file also holds extra"):
        check_shapes(encoder.spec, shapes | {"extra": (3, 2)})


@pytest.mark.parametrize(
    "spec",
    [
        {"name": "hf:somebody/something"},
        {"name": "hf:somebody/something", "config": None, "width": 16},
        {"name": "timm:hf-hub:somebody/something"},
        {"name": "timm:hf_hub:somebody/something"},
        {"config": {"model_type": "timm_wrapper", "architecture": "hf-hub:somebody/something"}},
        {"config": {"model_type": "timm_backbone", "backbone": "hf-hub:somebody/something"}},
        {"config": {"model_type": "dpt", "backbone_config": {"model_type": "timm_backbone", "backbone": "hf-hub:x/y"}}},
        {"config": {"model_type": "detr", "backbone": "hf-hub:x/y", "use_timm_backbone": True}},
        {"config": VIT | {"nested": {"model_type": "timm_wrapper", "architecture": "hf-hub:x/y"}}},
        {"config": VIT | {"attn_implementation": "kernels-community/flash-attn"}},
        {"config": VIT | {"auto_map": {"AutoModel": "somebody/something--code.Model"}}},
    ],
)
def test_loading_opens_no_connection(spec: dict[str, Any], changed: Changed, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def refuse(*arguments: object, **options: object) -> None:
        tried.append(arguments)
        raise OSError("there is no network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    spec = {"name": "hf:x", "width": 16} | spec if "name" not in spec else spec
    with pytest.raises(ModelError):
        Model.load(changed(encoder=spec), device="cpu")
    assert tried == []


def test_a_model_around_another_is_not_built() -> None:
    for trap in ({"model_type": "timm_wrapper"}, {"use_timm_backbone": True}, {"inner": {"backbone": "x"}}):
        with pytest.raises(ConfigError, match="do not turn one image into features"):
            TransformersBackbone(VIT | trap)
