from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from kedge.encoders import NAMES, build_encoder
from kedge.errors import ConfigError, ModelError
from kedge.images import Preprocessing
from kedge.interop import export_onnx, export_program
from kedge.model import Model

DIM = 12
CLASSES = ("ant", "bee", "Zebra, gestreift ≥ 2")
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
SIZES = {
    "resnet10": 32,
    "resnet18": 40,
    "resnet50": 32,
    "swin_t": 224,
    "timm:resnet10t": 64,
    "resnet101": 32,
    "timm:vit_tiny_patch16_224": 224,
}
LONG = ("resnet10", "resnet18", "resnet50", "resnet101", "swin_t", "timm:vit_tiny_patch16_224")


class Tiny(nn.Module):
    """Enough of a backbone where another one would only take longer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 512, 5, stride=3), nn.BatchNorm2d(512), nn.ReLU())

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images).mean(dim=(2, 3))  # type: ignore[no-any-return]


def make(
    name: str = "tiny",
    *,
    head: str = "bounded",
    dim: int = DIM,
    size: int | None = 32,
    flip_tta: bool = False,
    classifier: bool = False,
    posterior: bool = False,
) -> Model:
    torch.manual_seed(0)
    stem = (
        "small" if name == "resnet10" else "auto" if ":" in name else "imagenet"
    )  # each of the two, the dear one once
    encoder = build_encoder("resnet10" if name == "tiny" else name, dim=dim, head=head, stem=stem, image_size=size)
    if name == "tiny":
        encoder.backbone = Tiny()
    for layer in encoder.head.modules():
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight)
    if any(isinstance(layer, nn.BatchNorm2d) for layer in encoder.modules()):
        with torch.no_grad():
            encoder.train()(torch.rand(4, 3, size or 48, size or 48))  # statistics that matter
    model = Model(
        encoder.eval(),
        anchors=torch.randn(3, dim),
        classes=CLASSES,
        preprocessing=Preprocessing(size=size, mean=MEAN, std=STD, flip_tta=flip_tta),
        classifier=nn.Linear(dim, 3) if classifier else None,
        loss="cross_entropy" if classifier and not posterior else "cam",
        posterior=posterior,
        normalize=posterior,
    )
    model.engine = "eager"  # what exports are compared with
    return model


def draw(count: int, size: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(7).integers(0, 256, (count, 3, size, size), dtype=np.uint8))


def run(file: Path, pixels: Tensor, name: str = "pixels") -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    found: list[np.ndarray] = session.run(None, {name: pixels.numpy()})
    return found


def apart(found: np.ndarray, wanted: Tensor) -> float:
    assert found.dtype == np.float32
    assert found.shape == wanted.shape
    return float(np.abs(found - wanted.numpy()).max() / np.abs(wanted.numpy()).max())


@pytest.mark.parametrize("name", [pytest.param(one, marks=[pytest.mark.soak] * (one in LONG)) for one in SIZES])
def test_every_encoder_gives_what_torch_gives(name: str, tmp_path: Path) -> None:
    model, pixels = make(name, size=SIZES[name]), draw(2, SIZES[name])
    file = export_onnx(model, tmp_path / "model.onnx")
    wanted = model.embed_pixels(pixels)
    (found,) = run(file, pixels)
    print(f"{name}: {apart(found, wanted):.1e}")
    assert apart(found, wanted) < 1e-4
    # Embeddings that hardly depend on the picture would agree whatever the export does.
    assert float((wanted[0] - wanted[1]).abs().max() / wanted.abs().max()) > 1e-2
    assert [one.name for one in tmp_path.iterdir()] == ["model.onnx"]


def test_every_bundled_encoder_is_tested() -> None:
    assert {name for name in NAMES if ":" not in name} <= set(SIZES)


@pytest.mark.parametrize(
    ("head", "dim", "options"),
    [
        ("none", 512, {"flip_tta": True}),
        ("linear", DIM, {"classifier": True}),
        ("batchnorm", DIM, {"classifier": True, "posterior": True}),
        ("unit", DIM, {}),
    ],
)
def test_every_head_and_the_scores_of_all_classes(
    head: str, dim: int, options: dict[str, bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kedge.interop.onnx._ANCHORS_AT_ONCE", 2)  # three anchors in two parts
    model = make(head=head, dim=dim, **options)
    file = export_onnx(model, tmp_path / "model.onnx", anchors=True)
    for count in (1, 5):
        embeddings, scores = run(file, draw(count, 32))
        vectors, anchors = model.embed_pixels(draw(count, 32)).double(), model.anchors
        assert anchors is not None
        if model.loss == "cross_entropy":
            weight, bias = model.classifier  # type: ignore[misc]
            expected = vectors @ weight.double().T + bias.double()
        else:
            distances = [[float((v - a).square().sum().sqrt()) for a in anchors.double()] for v in vectors]
            expected = -torch.tensor(distances)
        assert apart(embeddings, vectors) < 1e-4
        assert apart(scores, expected) < 1e-4
    assert [output.name for output in onnx.load(file).graph.output] == ["embeddings", "scores"]
    if model.preprocessing.flip_tta:  # it is inside
        model.preprocessing = Preprocessing(size=32, mean=MEAN, std=STD)
        assert apart(embeddings, model.embed_pixels(draw(5, 32))) > 1e-2


def test_a_point_at_its_anchor_is_at_no_distance_and_the_model_stays(tmp_path: Path) -> None:
    """Through squares and products a distance near zero would be lost."""
    model = make()
    pixels = draw(3, 32)
    model.anchors = model.embed_pixels(pixels).clone() * (1 + 1e-6)
    before = model.fingerprint
    model.encoder.train()
    file = export_onnx(model, tmp_path / "model.onnx", anchors=True)
    assert model.encoder.training
    assert all(parameter.requires_grad for parameter in model.encoder.parameters())
    assert model.fingerprint == before
    _, scores = run(file, pixels)
    expected = model.scores(model.embed_pixels(pixels)).numpy()
    assert np.abs(scores - expected).max() < 1e-4
    assert np.abs(np.diag(scores)).max() < 1e-4


def test_normalized_images_in_a_fixed_batch(tmp_path: Path) -> None:
    model = make()
    pixels = draw(2, 32)
    file = export_onnx(model, tmp_path / "model.onnx", pixels=False, batch=2)
    (embeddings,) = run(file, model.preprocessing.to_input(pixels), "images")
    assert apart(embeddings, model.embed_pixels(pixels)) < 1e-4
    with pytest.raises(Exception, match="dimension"):
        run(file, model.preprocessing.to_input(draw(3, 32)), "images")


def test_images_of_any_size(tmp_path: Path) -> None:
    model = make(size=None)
    file = export_onnx(model, tmp_path / "model.onnx")
    pixels = draw(3, 56)[..., :40]
    assert apart(run(file, pixels)[0], model.embed_pixels(pixels)) < 1e-4


ALONE = """
import json, sys
import numpy as np, onnxruntime
from PIL import Image

session = onnxruntime.InferenceSession("model.onnx")
about = session.get_modelmeta().custom_metadata_map
size = json.loads(about["preprocessing"])["size"]
image = Image.open("picture.png").convert("RGB")
side = min(image.size)
left, top = (image.width - side) / 2, (image.height - side) / 2
box = (left, top, left + side, top + side)
image = image.resize((size, size), Image.Resampling.BILINEAR, box=box)
pixels = np.asarray(image).transpose(2, 0, 1)[None]
embeddings, scores = session.run(None, {"pixels": pixels})
name = json.loads(about["classes"])[scores.argmax()]
assert "torch" not in sys.modules and "kedge" not in sys.modules
print(json.dumps([name, embeddings[0].tolist(), about]))
"""


def test_onnxruntime_alone_does_everything(tmp_path: Path) -> None:
    model = make()
    export_onnx(model, tmp_path / "model.onnx", anchors=True)
    picture = np.random.default_rng(1).integers(0, 256, (50, 71, 3), dtype=np.uint8)
    Image.fromarray(picture).save(tmp_path / "picture.png")
    done = subprocess.run([sys.executable, "-c", ALONE], cwd=tmp_path, capture_output=True, text=True, check=True)
    name, embedding, about = json.loads(done.stdout)
    assert name == model.classify(tmp_path / "picture.png")
    assert apart(np.float32(embedding), model.embed(tmp_path / "picture.png")[0]) < 1e-4
    assert json.loads(about["classes"]) == list(CLASSES)
    assert Preprocessing.from_json(json.loads(about["preprocessing"])) == model.preprocessing
    assert about["fingerprint"] == model.fingerprint
    assert about["pixels"].startswith("B x 3 x 32 x 32, uint8")
    assert "centre square" in about["pixels"]
    assert "minus the distance" in about["scores"]


class OtherwiseWhenTraced(nn.Module):
    def forward(self, images: Tensor) -> Tensor:
        found = images.mean(dim=(2, 3)).repeat(1, 171)[:, :512]
        return found * 1.001 if torch.compiler.is_compiling() else found


class LooksAtValues(OtherwiseWhenTraced):
    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images) if float(images.sum()) > 0 else images.mean(dim=(2, 3)).repeat(1, 171)[:, :512]


@pytest.mark.parametrize(
    ("backbone", "said"), [(OtherwiseWhenTraced, "would differ from the model"), (LooksAtValues, "cannot be traced")]
)
def test_an_export_that_fails_leaves_nothing(
    backbone: type[nn.Module], said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = make()
    model.encoder.backbone = backbone()
    (tmp_path / "model.onnx").write_bytes(b"earlier")
    with pytest.raises(ModelError, match=said) as caught:
        export_onnx(model, tmp_path / "model.onnx")
    assert "\n" not in str(caught.value)
    assert [file.name for file in tmp_path.iterdir()] == ["model.onnx"]
    assert (tmp_path / "model.onnx").read_bytes() == b"earlier"
    assert capfd.readouterr() == ("", "")


def test_what_cannot_be_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    with pytest.raises(ConfigError, match=r"end in \.onnx"):
        export_onnx(model, tmp_path / "model.bin")
    with pytest.raises(ConfigError, match="nowhere does not exist"):
        export_onnx(model, tmp_path / "nowhere" / "model.onnx")
    with pytest.raises(ConfigError, match="batch"):
        export_onnx(model, tmp_path / "model.onnx", batch=0)
    model.anchors = None
    with pytest.raises(ConfigError, match="neither"):
        export_onnx(model, tmp_path / "model.onnx", anchors=True)
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ConfigError, match=r"pip install 'kedge\[onnx\]'"):
        export_onnx(model, tmp_path / "model.onnx")


PROGRAM_ALONE = """
import json, sys
import numpy as np, torch

extra = {"kedge.json": ""}
program = torch.export.load("model.pt2", extra_files=extra).module()
pixels = torch.from_numpy(np.load("pixels.npy"))
embeddings, scores = program(pixels)
assert "kedge" not in sys.modules and "torchvision" not in sys.modules
assert program(pixels[:1])[0].shape == embeddings[:1].shape
np.savez("outputs.npz", embeddings=embeddings, scores=scores)
print(extra["kedge.json"])
"""


def test_a_program_runs_without_kedge(tmp_path: Path) -> None:
    model, pixels = make(flip_tta=True), draw(5, 32)
    assert export_program(model, tmp_path / "model.pt2", anchors=True) == tmp_path / "model.pt2"
    assert [file.name for file in tmp_path.iterdir()] == ["model.pt2"]
    np.save(tmp_path / "pixels.npy", pixels.numpy())
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM_ALONE], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    outputs, embeddings = np.load(tmp_path / "outputs.npz"), model.embed_pixels(pixels)
    assert apart(outputs["embeddings"], embeddings) < 1e-5
    assert apart(outputs["scores"], model.scores(embeddings)) < 1e-5
    about = json.loads(done.stdout)
    assert json.loads(about["classes"]) == list(CLASSES)
    assert json.loads(about["preprocessing"])["size"] == 32


def test_a_program_that_differs_leaves_nothing(tmp_path: Path) -> None:
    model = make()
    model.encoder.backbone = OtherwiseWhenTraced()
    for anchors in (False, True):  # also where anchors are all that torch has to keep
        with pytest.raises(ModelError, match="would differ from the model: its embeddings of 1 random images"):
            export_program(model, tmp_path / "model.pt2", anchors=anchors)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match=r"end in \.pt2"):
        export_program(model, tmp_path / "model.onnx")
