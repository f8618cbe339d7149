from __future__ import annotations

import json

import pytest
import torch
import torchvision
from torch import nn

from kedge.encoders import Encoder, build_encoder
from kedge.errors import ConfigError


@pytest.mark.parametrize("stem", ["imagenet", "small"])
@pytest.mark.parametrize(("name", "width"), [("resnet10", 512), ("resnet18", 512), ("resnet50", 2048)])
def test_resnet_shapes(name: str, width: int, stem: str) -> None:
    encoder = build_encoder(name, stem=stem).eval()
    assert (encoder.width, encoder.dim, encoder.stem) == (width, width, stem)
    images = torch.rand(2, 3, 32, 32)
    with torch.inference_mode():
        assert encoder.backbone(images).shape == (2, width)
        assert encoder(images).shape == (2, width)


def test_resnet101_and_swin() -> None:
    with torch.inference_mode():
        for name, width in (("resnet101", 2048), ("swin_t", 768)):
            encoder = build_encoder(name, dim=7).eval()
            assert encoder.width == width
            assert encoder(torch.rand(1, 3, 64, 64)).shape == (1, 7)
    assert build_encoder("swin_t", image_size=224).dim == 768


@pytest.mark.parametrize("head", ["none", "linear", "bounded", "unit"])
@pytest.mark.parametrize("dim", [1, 2, 32, 512, 600])
def test_any_dim_with_any_head(dim: int, head: str) -> None:
    encoder = build_encoder("resnet10", dim=dim, head=head, stem="imagenet")
    assert encoder(torch.rand(3, 3, 16, 16)).shape == (3, dim)


@pytest.mark.parametrize(
    ("stem", "kernel", "stride", "pool"),
    [("imagenet", 7, 2, nn.MaxPool2d), ("small", 3, 1, nn.Identity)],
)
def test_stems(stem: str, kernel: int, stride: int, pool: type) -> None:
    network = build_encoder("resnet10", stem=stem).backbone
    assert network.conv1.kernel_size == (kernel, kernel)
    assert network.conv1.stride == (stride, stride)
    assert isinstance(network.maxpool, pool)
    # torchvision draws stems by fan-out; ours must have that spread too
    expected = (2 / (64 * kernel * kernel)) ** 0.5
    assert network.conv1.weight.std().item() == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize(
    ("image_size", "stem"),
    [(None, "imagenet"), (32, "small"), (64, "small"), (65, "imagenet"), (224, "imagenet")],
)
def test_auto_stem(image_size: int | None, stem: str) -> None:
    assert build_encoder("resnet10", image_size=image_size).stem == stem


def test_same_function_as_torchvision() -> None:
    theirs = torchvision.models.resnet18().eval()
    ours = build_encoder("resnet18", head="none").eval()
    weights = {name: value for name, value in theirs.state_dict().items() if not name.startswith("fc.")}
    ours.backbone.load_state_dict(weights)
    theirs.fc = nn.Identity()
    images = torch.rand(2, 3, 64, 64)
    with torch.inference_mode():
        torch.testing.assert_close(ours(images), theirs(images))
        assert (ours(images) >= 0).all()


def test_spec_rebuilds_the_architecture() -> None:
    for encoder in (
        build_encoder("resnet10", dim=9, head="bounded", image_size=32),
        build_encoder("resnet50", head="none", stem="imagenet"),
        build_encoder("timm:resnet10t", dim=5),
        build_encoder("resnet10", dim=6, head="unit", stem="imagenet"),
    ):
        spec = json.loads(json.dumps(encoder.spec))
        again = Encoder.from_spec(spec)
        again.load_state_dict(encoder.state_dict())
        assert again.spec == encoder.spec
        images = torch.rand(2, 3, 32, 32)
        with torch.inference_mode():
            torch.testing.assert_close(again.eval()(images), encoder.eval()(images))


def test_frozen_backbone_does_not_move() -> None:
    encoder = build_encoder("resnet10", dim=4, stem="imagenet").freeze().train()
    before = {name: value.clone() for name, value in encoder.backbone.state_dict().items()}
    assert encoder.head.training
    assert not encoder.backbone.training
    encoder(torch.rand(4, 3, 16, 16)).square().sum().backward()
    assert all(parameter.grad is None for parameter in encoder.backbone.parameters())
    assert all(parameter.grad is not None for parameter in encoder.head.parameters())
    for name, value in encoder.backbone.state_dict().items():
        assert torch.equal(value, before[name])


def test_channels_last_and_autocast() -> None:
    encoder = build_encoder("resnet10", dim=8, stem="imagenet", head="bounded")
    nn.init.normal_(encoder.head.linear.weight)
    encoder.eval()
    images = torch.rand(4, 3, 32, 32)
    with torch.inference_mode():
        plain = encoder(images)
        encoder.to(memory_format=torch.channels_last)
        torch.testing.assert_close(encoder(images.to(memory_format=torch.channels_last)), plain, rtol=1e-4, atol=1e-5)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            low = encoder(images)
    assert (low.float() - plain).norm() < 0.1 * plain.norm()


def test_timm_features() -> None:
    encoder = build_encoder("timm:mobilenetv3_small_050", dim=3).eval()
    with torch.inference_mode():
        images = torch.rand(2, 3, 32, 32)
        assert encoder.backbone(images).shape == (2, encoder.width)
        assert encoder(images).shape == (2, 3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"name": "resnet19"}, ["resnet19", "resnet10", "resnet18", "resnet101", "swin_t", "timm:"]),
        ({"name": "timm:resnet18x"}, ["resnet18x", "timm:resnet18"]),
        ({"name": "timm:resnet18.no_such_tag"}, ["no_such_tag"]),
        ({"name": "timm:hf-hub:someone/model"}, ["someone/model"]),
        ({"name": "timm:vit_tiny_patch16_224", "image_size": 32}, ["224", "32"]),
        ({"name": "swin_t", "image_size": 32}, ["swin_t", "224", "32"]),
        ({"name": "swin_t", "stem": "small"}, ["stem", "small", "ResNets"]),
        ({"stem": "tiny"}, ["stem", "tiny", "imagenet", "small"]),
        ({"head": "cosine"}, ["head", "cosine", "bounded"]),
        ({"dim": 0}, ["dim", "0"]),
        ({"dim": 2.5}, ["dim", "2.5"]),
    ],
)
def test_bad_arguments(arguments: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        build_encoder(**arguments)
    for word in words:
        assert word in str(caught.value)
