from __future__ import annotations

import copy
import json
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torchvision.models.resnet import Bottleneck, ResNet

from kedge.encoders import Encoder, build_encoder
from kedge.encoders.backbones import Backbone
from kedge.errors import ConfigError, ModelError
from kedge.images import Preprocessing
from kedge.model import Model
from kedge.model.engines import choosing, measuring
from kedge.model.engines.timings import Case, Timing, recall, remember
from kedge.model.engines.ways import CHEAP, TOLERANCE, Unfit, make

SIDE, DIM = 32, 16


@pytest.fixture(autouse=True)
def timings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KEDGE_TIMINGS", str(tmp_path / "timings"))
    monkeypatch.delenv("KEDGE_ENGINE", raising=False)
    return tmp_path / "timings"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small pictures go faster so, above all where something else runs."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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


def make_model(name: str = "resnet10", *, mirror: bool = False, head: str = "bounded") -> Model:
    if name == "bottlenecks":
        network = ResNet(Bottleneck, [2, 1, 1, 1])
        network.fc = nn.Identity()
        encoder = Encoder(name, Backbone(network, 2048, "imagenet", ()), dim=DIM, head=head)
    else:
        encoder = build_encoder(name, dim=DIM, stem="imagenet", head=head)
    encoder = learned(encoder)
    preprocessing = Preprocessing(size=SIDE, mirror=mirror, mean=(0.4, 0.5, 0.6), std=(0.2, 0.2, 0.3))
    return Model(encoder, anchors=None, classes=[], preprocessing=preprocessing)


@pytest.fixture
def model() -> Model:
    return make_model()


def draw(count: int, side: int = SIDE) -> Tensor:
    return torch.randint(256, (count, 3, side, side), dtype=torch.uint8, generator=torch.Generator().manual_seed(count))


def eagerly(model: Model, pixels: Tensor) -> Tensor:
    """What the encoder itself says, of inputs that are standardised here."""
    mean, std = (torch.tensor(each).view(1, 3, 1, 1) for each in ((0.4, 0.5, 0.6), (0.2, 0.2, 0.3)))
    images = (pixels.float() / 256 - mean) / std
    with torch.no_grad():
        return copy.deepcopy(model.encoder).eval()(images, mirror=model.preprocessing.mirror)


def distance(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm(dim=1).max() / wanted.norm(dim=1).mean())


def same(model: Model, pixels: Tensor) -> bool:
    return distance(model.embed_pixels(pixels), eagerly(model, pixels)) < TOLERANCE


def case(model: Model, batch: int) -> Case:
    spec = json.dumps(model.encoder.spec, sort_keys=True)
    return Case(spec, SIDE, SIDE, model.preprocessing.mirror, batch, torch.get_num_threads())


@pytest.mark.parametrize("engine", [*CHEAP, "bfloat16"])
@pytest.mark.parametrize(("name", "mirror", "head"), [("resnet10", True, "unit"), ("bottlenecks", False, "bounded")])
def test_every_way_is_the_same_function(engine: str, name: str, mirror: bool, head: str) -> None:
    model = make_model(name, mirror=mirror, head=head)
    model.engine = engine
    for count in (1, 3, 12):
        pixels = draw(count)
        apart = distance(model.embed_pixels(pixels), eagerly(model, pixels))
        assert apart < (0.1 if engine == "bfloat16" else TOLERANCE)
        assert engine != "bfloat16" or apart > TOLERANCE, "bfloat16 is expected to round, or was not used"
    assert model.engine.startswith(f"{engine}: ")


@pytest.mark.parametrize(
    "name", ["resnet10", "timm:resnet10t", "timm:mobilenetv3_small_050", "timm:vit_tiny_patch16_224"]
)
def test_what_is_used_at_once(name: str) -> None:
    side = 224 if "vit" in name else SIDE
    model = make_model("resnet10")
    if name != "resnet10":
        encoder = build_encoder(name, dim=DIM)
        model.encoder = encoder.eval() if "vit" in name else learned(encoder)
    model.preprocessing = Preprocessing(size=side, mean=(0.4, 0.5, 0.6), std=(0.2, 0.2, 0.3))
    pixels = draw(2, side)
    assert same(model, pixels)
    expected = "fused" if name == "resnet10" else "eager" if "vit" in name else "folded_channels_last"
    assert f"auto: {expected} for batches of 2 to 8" in model.engine


def test_few_pictures_are_never_measured(model: Model, timings: Path) -> None:
    for count in (1, 5, 40):
        model.embed_pixels(draw(count))
    assert not timings.exists()
    assert not [thread for thread in threading.enumerate() if thread.name == "kedge-engine"]


class Twice(nn.Module):
    """Uses what a convolution wrote beside its normalisation: folding would change that, too."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)

    def forward(self, images: Tensor) -> Tensor:
        found = self.conv(images)
        return (self.norm(found) * found).mean((2, 3))


def test_a_way_that_is_another_function_is_dropped() -> None:
    encoder = learned(Encoder("twice", Backbone(Twice(), 8, "imagenet", ()), dim=DIM, head="linear"))
    with pytest.raises(Unfit, match="differ"):
        make("folded", encoder, torch.rand(1, 3, SIDE, SIDE), mirror=False)
    model = Model(
        encoder, anchors=None, classes=[], preprocessing=Preprocessing(SIDE, (0.4, 0.5, 0.6), (0.2, 0.2, 0.3))
    )
    assert same(model, draw(3))
    assert "auto: eager" in model.engine
    model.engine = "folded"
    with pytest.raises(ModelError, match=r"engine folded cannot run twice here .*choose another"):
        model.embed_pixels(draw(1))


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


def past_the_count(model: Model) -> None:
    model.encoder.backbone.conv1.weight.data.mul_(2)


def statistics(model: Model) -> None:
    model.encoder.backbone.bn1.running_mean.add_(1)


def another_head(model: Model) -> None:
    model.encoder.head = nn.Linear(512, DIM)


def another_layer(model: Model) -> None:
    model.encoder.backbone.relu = nn.Sigmoid()


def another_encoder(model: Model) -> None:
    model.encoder = make_model("resnet18").encoder


def wider(model: Model) -> None:
    model.encoder.head.register_forward_hook(lambda module, inputs, output: output + 1)


@pytest.mark.parametrize(
    "change",
    [step, load, assign, past_the_count, statistics, another_head, another_layer, another_encoder, wider],
)
@pytest.mark.parametrize("engine", ["auto", "folded_channels_last"])
def test_changed_weights_are_never_stale(change: Callable[[Model], None], engine: str) -> None:
    model, pixels = make_model(), draw(3)
    model.engine = engine
    before = model.embed_pixels(pixels)
    change(model)
    assert same(model, pixels)
    assert distance(model.embed_pixels(pixels), before) > 10 * TOLERANCE


def test_an_encoder_in_training_goes_the_plain_way(model: Model) -> None:
    pixels = draw(4)
    model.embed_pixels(pixels)
    model.encoder.train()
    before = copy.deepcopy(model.encoder.state_dict())
    assert "eager, since the encoder is in training" in model.engine
    assert torch.equal(model.embed_pixels(pixels), eagerly(model, pixels))
    assert model.encoder.training
    assert all(torch.equal(value, before[name]) for name, value in model.encoder.state_dict().items())


def test_double_precision_is_kept(model: Model) -> None:
    model.encoder.double()
    model.preprocessing = Preprocessing(size=SIDE)
    assert "not in float32" in model.engine
    with pytest.raises(RuntimeError, match=r"dtype|type"):  # as without engines: pixels come as float32
        model.embed_pixels(draw(1))


def test_copies_begin_anew(model: Model, tmp_path: Path) -> None:
    pixels = draw(3)
    model.engine = "folded"
    found = model.embed_pixels(pixels)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.engine == "folded: nothing embedded yet"
        assert torch.equal(other.embed_pixels(pixels), found)
    model.save(tmp_path / "model")
    assert torch.equal(Model.load(tmp_path / "model", "cpu", engine="folded").embed_pixels(pixels), found)


def test_many_threads_begin_together(model: Model) -> None:
    batches = [draw(count) for count in (1, 2, 3, 9) * 4]
    wanted = [eagerly(model, pixels) for pixels in batches]
    found: dict[int, Tensor] = {}
    start = threading.Barrier(len(batches))

    def embed(row: int) -> None:
        start.wait()
        found[row] = model.embed_pixels(batches[row])

    threads = [threading.Thread(target=embed, args=(row,)) for row in range(len(batches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(distance(found[row], wanted[row]) < TOLERANCE for row in range(len(batches)))


def test_names(model: Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine must be one of auto, eager.*found 'fast'"):
        model.engine = "fast"
    monkeypatch.setenv("KEDGE_ENGINE", "eager")
    model.save(tmp_path / "model")
    assert Model.load(tmp_path / "model", "cpu").engine == "eager: asked for"
    assert Model.load(tmp_path / "model", "cpu", engine="folded").engine.startswith("folded: ")
    monkeypatch.setenv("KEDGE_ENGINE", "fast")
    with pytest.raises(ConfigError, match="'fast'"):
        Model.load(tmp_path / "model", "cpu")
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    with pytest.raises(ConfigError, match=r"pip install 'kedge\[onnx\]'"):
        model.engine = "onnxruntime"


def test_times_are_remembered_whole_or_not_at_all(model: Model, timings: Path) -> None:
    one, many = case(model, 1), case(model, 16)
    assert recall(one) is None
    known = {"eager": Timing(0.5, 0.0), "folded": Timing(0.25, 0.125)}
    writers = [threading.Thread(target=remember, args=(one, known)) for _ in range(8)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert recall(one) == known
    assert recall(many) is None
    assert [file.suffix for file in timings.iterdir()] == [".json"], "nothing half-written is left"
    text = one.file.read_text()
    for damaged in (text[: len(text) // 2], "", "[]", "{}", text.replace("0.25", "-1"), text.replace("0.25", "NaN")):
        one.file.write_text(damaged)
        assert recall(one) is None
    one.file.write_text(text.replace('"torch": "', '"torch": "0.'))
    assert recall(one) is None, "of another torch"
    one.file.unlink()
    one.file.mkdir()
    remember(one, known)  # cannot be written, and is no error
    assert recall(one) is None


def test_remembered_times_decide(model: Model) -> None:
    pixels = draw(1)
    times = {"eager": Timing(0.02, 0), "channels_last": Timing(0.01, 0.1), "compiled": Timing(0.009, 1e6)}
    remember(case(model, 1), times)
    assert same(model, pixels)
    assert "channels_last for single pictures" in model.engine
    assert "2.00 x eager, measured" in model.engine
    assert same(model, draw(2))
    assert "fused for batches of 2 to 8" in model.engine, "of which nothing is remembered"


def test_a_costly_way_is_made_when_it_pays(model: Model) -> None:
    """Meanwhile, and while the weights change, embeddings are right."""
    remember(case(model, 4), {"eager": Timing(1.0, 0), "fused": Timing(0.5, 0), "onnxruntime": Timing(0.25, 1.0)})
    pixels = draw(2)
    for _ in range(3):
        assert same(model, pixels)
        assert "fused" in model.engine, "four pictures would have saved no more than the second that making takes"
    deadline = time.monotonic() + 200
    while "onnxruntime" not in model.engine and time.monotonic() < deadline:
        assert same(model, pixels)
        time.sleep(0.1)
    assert "onnxruntime for batches of 2 to 8" in model.engine
    for count in (2, 5, 8):
        assert same(model, draw(count))
    load(model)
    assert same(model, pixels)
    assert "fused" in model.engine, "other weights begin anew"


def test_much_work_is_measured_in_the_background(
    model: Model, monkeypatch: pytest.MonkeyPatch, timings: Path, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "no-compiler"))  # which is no error
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    monkeypatch.setattr(choosing, "WORTH", 0.0)
    monkeypatch.setattr(measuring, "_CALM", float("inf"))
    monkeypatch.setattr(measuring, "_SECONDS", 0.0)
    pixels = draw(1)
    deadline = time.monotonic() + 200
    while recall(case(model, 1)) is None and time.monotonic() < deadline:
        assert same(model, pixels)
        time.sleep(0.1)
    known = recall(case(model, 1))
    assert known is not None
    assert set(known) == {*CHEAP, "onnxruntime"}
    assert same(model, pixels)
    assert "x eager, measured" in model.engine
    written = {file: file.stat().st_mtime_ns for file in timings.iterdir()}
    again = make_model()
    for _ in range(3):
        assert same(again, pixels)
    assert "x eager, measured" in again.engine
    assert again.tune(1).startswith("auto: ")
    assert {file: file.stat().st_mtime_ns for file in timings.iterdir()} == written, "measured once"


def test_tune_refuses(model: Model) -> None:
    with pytest.raises(ConfigError, match=r"batch_size of at least 1.*found batch_size 0"):
        model.tune(0)
    model.preprocessing = Preprocessing(size=None)
    with pytest.raises(ConfigError, match="without a size"):
        model.tune(1)
