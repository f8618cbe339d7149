from __future__ import annotations

import copy
import pickle
import platform
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torchvision.models.resnet import Bottleneck, ResNet

from kedge.encoders import Encoder, build_encoder
from kedge.encoders.backbones import Backbone
from kedge.errors import ConfigError
from kedge.images import Preprocessing
from kedge.model import Model, inference
from kedge.model.fusion import fold_batchnorm
from kedge.model.inference import TOLERANCE

SIDE, DIM = 32, 16


@pytest.fixture(autouse=True)
def no_engine_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KEDGE_ENGINE", raising=False)


def learned(encoder: Encoder) -> Encoder:
    """With weights and statistics that a wrong fold would not survive."""
    torch.manual_seed(0)
    for module in encoder.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 2)
            nn.init.normal_(module.bias)
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.1)
    with torch.no_grad():
        encoder.train()(torch.rand(8, 3, 64, 64))
    return encoder.eval()


def make_model(name: str = "resnet10", *, flip_tta: bool = False, head: str = "bounded") -> Model:
    if name == "bottlenecks":
        network = ResNet(Bottleneck, [2, 1, 1, 1])
        network.fc = nn.Identity()
        encoder = Encoder(name, Backbone(network, 2048, "imagenet", ()), dim=DIM, head=head)
    else:
        encoder = build_encoder(name, dim=DIM, stem="imagenet", head=head)
    encoder = learned(encoder)
    preprocessing = Preprocessing(size=SIDE, flip_tta=flip_tta, mean=(0.4, 0.5, 0.6), std=(0.2, 0.2, 0.3))
    return Model(encoder, anchors=None, classes=[], preprocessing=preprocessing)


@pytest.fixture
def model() -> Model:
    return make_model()


def draw(count: int, side: int = SIDE) -> Tensor:
    return torch.randint(256, (count, 3, side, side), dtype=torch.uint8, generator=torch.Generator().manual_seed(count))


def eagerly(model: Model, pixels: Tensor) -> Tensor:
    """What the encoder itself says, of inputs that are normalized here."""
    mean, std = (torch.tensor(each).view(1, 3, 1, 1) for each in ((0.4, 0.5, 0.6), (0.2, 0.2, 0.3)))
    images = (pixels.float() / 256 - mean) / std
    with torch.no_grad():
        return copy.deepcopy(model.encoder).eval()(images, flip_tta=model.preprocessing.flip_tta)


def distance(output: Tensor, expected: Tensor) -> float:
    return float((output - expected).norm(dim=1).max() / expected.norm(dim=1).mean())


def same(model: Model, pixels: Tensor) -> bool:
    return distance(model.embed_pixels(pixels), eagerly(model, pixels)) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "flip_tta", "head", "expected"),
    [
        ("resnet10", True, "unit", "fused"),
        ("bottlenecks", False, "bounded", "fused"),
        ("timm:resnet10t", False, "bounded", "fused"),
        ("timm:mobilenetv3_small_050", True, "bounded", "fused"),
        ("timm:tf_efficientnet_lite0", False, "bounded", "fused"),
    ],
)
def test_auto_is_the_same_function(name: str, flip_tta: bool, head: str, expected: str) -> None:
    model = make_model(name, flip_tta=flip_tta, head=head)
    for count in (1, 3, 12):
        assert same(model, draw(count))
    assert model.engine == f"auto: {expected}"


@pytest.mark.parametrize("side", [31, 33, 34, 36])
def test_fused_padding_suits_images_of_other_sizes(side: int) -> None:
    """TensorFlow's padding depends on the size; the copy was made for 32 pixels."""
    model = make_model("timm:tf_efficientnet_lite0")
    model.preprocessing = replace(model.preprocessing, size=None)
    assert same(model, draw(2))
    assert same(model, draw(2, side))
    assert model.engine == "auto: fused"


@pytest.mark.parametrize("fails", [False, True])
def test_without_onednn_a_copy_is_only_folded(fails: bool, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is not there, and where it refuses."""
    if fails:
        monkeypatch.setattr(inference, "fuse_convolutions", lambda *_: 1 / 0)
    else:
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert same(model, draw(3))
    assert model.engine == "auto: folded, channels last"


class Shared(nn.Module):
    """One activation behind two convolutions, another kind behind a third, and an output that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        layers = [(nn.Conv2d(width, 8, 3, padding=1), nn.BatchNorm2d(8)) for width in (3, 8, 8, 8)]
        self.layers = nn.ModuleList(nn.Sequential(*pair) for pair in layers)
        self.shared, self.own, self.unfused = nn.ReLU(inplace=True), nn.ReLU6(), nn.ELU()

    def forward(self, images: Tensor) -> Tensor:
        first, second, third, fourth = self.layers
        images = self.shared(second(self.shared(first(images))))
        return (self.unfused(third(images)) + self.own(fourth(images)) + images).mean((2, 3))


def test_only_activations_of_one_convolution_are_fused() -> None:
    encoder = learned(Encoder("shared", Backbone(Shared(), 8, "imagenet", ()), dim=DIM, head="linear"))
    preprocessing = Preprocessing(SIDE, (0.4, 0.5, 0.6), (0.2, 0.2, 0.3))
    model = Model(encoder, anchors=None, classes=[], preprocessing=preprocessing)
    assert same(model, draw(3))
    assert model.engine == "auto: fused"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc's malloc")
def test_the_memory_of_activations_is_used_again() -> None:
    """A batch would else have thousands of page faults, each time anew."""
    program = """
import resource, torch
from kedge.encoders import build_encoder
from kedge.model.inference import Inference

encoder, inference = build_encoder("timm:tf_efficientnet_lite0", dim=16).eval(), Inference()
faults = []
with torch.inference_mode():
    for _ in range(8):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        inference(encoder, torch.zeros(16, 3, 224, 224), flip_tta=False)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(min(faults[3:]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 1000


def test_batches_are_split_to_fit_the_cache(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    model.engine = "auto"
    monkeypatch.setattr(inference, "_BATCH_PIXELS", 5 * SIDE * SIDE)
    assert same(model, draw(12))
    monkeypatch.setattr(inference, "_BATCH_PIXELS", 1)  # of larger images, one at a time
    assert same(model, draw(3))
    assert model.embed_pixels(draw(3)[:0]).shape == (0, DIM)


def test_onnxruntime_by_name() -> None:
    encoder = learned(Encoder("twice", Backbone(Twice(), 8, "imagenet", ()), dim=DIM, head="linear"))
    preprocessing = Preprocessing(SIDE, (0.4, 0.5, 0.6), (0.2, 0.2, 0.3), flip_tta=True)
    model = Model(encoder, anchors=None, classes=[], preprocessing=preprocessing)
    model.engine = "onnxruntime"
    for count in (1, 3):
        assert same(model, draw(count))
    load(model)
    assert same(model, draw(3)), "other weights, another session"
    assert model.engine == "onnxruntime"


def test_a_vision_transformer_runs_as_it_is() -> None:
    encoder = build_encoder("timm:vit_tiny_patch16_224", dim=DIM).eval()
    preprocessing = Preprocessing(size=224, mean=(0.4, 0.5, 0.6), std=(0.2, 0.2, 0.3))
    model = Model(encoder, anchors=None, classes=[], preprocessing=preprocessing)
    assert same(model, draw(2, 224))
    assert model.engine == "auto: eager"


class Twice(nn.Module):
    """Uses the output of a convolution beside its normalisation: folding would change that, too."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)

    def forward(self, images: Tensor) -> Tensor:
        features = self.conv(images)
        return (self.norm(features) * features).mean((2, 3))


def test_a_copy_that_is_another_function_is_not_used() -> None:
    encoder = learned(Encoder("twice", Backbone(Twice(), 8, "imagenet", ()), dim=DIM, head="linear"))
    images = torch.rand(2, 3, SIDE, SIDE)
    folded = fold_batchnorm(encoder, images)
    assert folded is not None
    with torch.no_grad():
        assert distance(folded(images), encoder(images)) > TOLERANCE
    preprocessing = Preprocessing(SIDE, (0.4, 0.5, 0.6), (0.2, 0.2, 0.3))
    model = Model(encoder, anchors=None, classes=[], preprocessing=preprocessing)
    assert same(model, draw(3))
    assert model.engine == "auto: eager"


def test_a_network_that_cannot_be_folded_runs_as_it_is() -> None:
    network = ResNet(Bottleneck, [1, 1, 1, 1], norm_layer=partial(nn.BatchNorm2d, track_running_stats=False))
    network.fc = nn.Identity()
    encoder = Encoder("no statistics", Backbone(network, 2048, "imagenet", ()), dim=DIM, head="linear").eval()
    preprocessing = Preprocessing(SIDE, (0.4, 0.5, 0.6), (0.2, 0.2, 0.3))
    model = Model(encoder, anchors=None, classes=[], preprocessing=preprocessing)
    assert same(model, draw(3))
    assert model.engine == "auto: eager"


def step(model: Model) -> None:
    model.encoder.train()
    optimiser = torch.optim.SGD(model.encoder.parameters(), lr=0.1)
    model.encoder(torch.rand(4, 3, SIDE, SIDE)).square().sum().backward()
    optimiser.step()
    model.encoder.eval()


def load(model: Model) -> None:
    torch.manual_seed(5)
    state = {
        name: value + 0.1 * torch.rand_like(value) if value.is_floating_point() else value
        for name, value in model.encoder.state_dict().items()
    }
    model.encoder.load_state_dict(state)


def assign(model: Model) -> None:
    model.encoder.load_state_dict({name: value * 2 for name, value in model.encoder.state_dict().items()}, assign=True)


def statistics(model: Model) -> None:
    model.encoder.backbone.bn1.running_mean.add_(1)


def another_head(model: Model) -> None:
    model.encoder.head = nn.Linear(512, DIM)


def another_layer(model: Model) -> None:
    model.encoder.backbone.relu = nn.Sigmoid()


def another_encoder(model: Model) -> None:
    model.encoder = make_model("resnet18").encoder


def hooked(model: Model) -> None:
    model.encoder.head.register_forward_hook(lambda module, inputs, output: output + 1)


@pytest.mark.parametrize(
    "change", [step, load, assign, statistics, another_head, another_layer, another_encoder, hooked]
)
def test_changed_weights_are_never_stale(change: Callable[[Model], None]) -> None:
    model, pixels = make_model(), draw(3)
    before = model.embed_pixels(pixels)
    change(model)
    assert same(model, pixels)
    assert distance(model.embed_pixels(pixels), before) > 10 * TOLERANCE


def test_an_encoder_in_training_runs_as_it_is(model: Model) -> None:
    pixels = draw(4)
    model.embed_pixels(pixels)
    model.encoder.train()
    before = copy.deepcopy(model.encoder.state_dict())
    assert model.engine.startswith("auto: eager, since the encoder is in training")
    assert torch.equal(model.embed_pixels(pixels), eagerly(model, pixels))
    assert model.encoder.training
    assert all(torch.equal(value, before[name]) for name, value in model.encoder.state_dict().items())


def test_double_precision_is_kept(model: Model) -> None:
    model.encoder.double()
    model.preprocessing = Preprocessing(size=SIDE)
    assert "not in float32" in model.engine
    with pytest.raises(RuntimeError, match=r"dtype|type"):  # as without engines: pixels come as float32
        model.embed_pixels(draw(1))


def test_copies_start_again(model: Model, tmp_path: Path) -> None:
    pixels = draw(3)
    embeddings = model.embed_pixels(pixels)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.engine == "auto: nothing embedded yet"
        assert torch.equal(other.embed_pixels(pixels), embeddings)
    model.save(tmp_path / "model")
    assert torch.equal(Model.load(tmp_path / "model", "cpu").embed_pixels(pixels), embeddings)


def test_many_threads_begin_together(model: Model) -> None:
    batches = [draw(count) for count in (1, 2, 3, 9) * 4]
    expected = [eagerly(model, pixels) for pixels in batches]
    outputs: dict[int, Tensor] = {}
    start = threading.Barrier(len(batches))

    def embed(row: int) -> None:
        start.wait()
        outputs[row] = model.embed_pixels(batches[row])

    threads = [threading.Thread(target=embed, args=(row,)) for row in range(len(batches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(distance(outputs[row], expected[row]) < TOLERANCE for row in range(len(batches)))


def test_names(model: Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine must be one of auto, eager, onnxruntime; found 'fast'"):
        model.engine = "fast"
    model.save(tmp_path / "model")
    monkeypatch.setenv("KEDGE_ENGINE", "eager")
    assert Model.load(tmp_path / "model", "cpu").engine == "eager"
    assert Model.load(tmp_path / "model", "cpu", engine="auto").engine.startswith("auto: ")
    monkeypatch.setenv("KEDGE_ENGINE", "fast")
    with pytest.raises(ConfigError, match="'fast'"):
        Model.load(tmp_path / "model", "cpu")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ConfigError, match=r"pip install 'kedge\[onnx\]'"):
        model.engine = "onnxruntime"


def test_removed_engines_have_no_effect(model: Model) -> None:
    with pytest.warns(DeprecationWarning, match="engine compiled no longer has an effect; auto is used"):
        model.engine = "compiled"
    assert same(model, draw(1))
    with pytest.warns(DeprecationWarning, match=r"Model\.tune no longer has an effect"):
        assert model.tune(32) == model.engine == "auto: fused"
