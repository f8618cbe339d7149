from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.models import resnet18

from kedge import Model, evaluate, train
from kedge.datasets import folder as class_folders
from kedge.encoders import pretrained
from kedge.training import overrides_for


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Class folders of plain colours with noise; a name with spaces and letters beyond ASCII."""
    root = tmp_path_factory.mktemp("my photos") / "größe 'a'"
    generator = np.random.default_rng(0)
    for name, colour in {"red": (200, 40, 40), "grün": (40, 200, 40), "blue sky": (40, 40, 200)}.items():
        (root / name).mkdir(parents=True)
        for index in range(12):
            pixels = np.clip(generator.normal(colour, 40, (40, 50, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(root / name / f"{index}.png")
    return root


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(pretrained, "CONNECT_SECONDS", 0.5)


def test_without_weights_it_trains_from_scratch_and_says_so(
    photos: Path, no_network: None, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = overrides_for(photos)
    assert "recipe=kedge" in overrides
    assert "Training from scratch" in capsys.readouterr().err
    named = overrides_for(photos, ["encoder=resnet50", "encoder.weights=null"])
    assert "encoder=resnet10" not in named
    assert "recipe=kedge" in named
    assert named[-2:] == ["encoder=resnet50", "encoder.weights=null"]


def test_any_encoder_can_be_named(photos: Path, no_network: None) -> None:
    for name in (["encoder=timm", "encoder.name=timm:test_resnet.r160_in1k"], ["encoder=swin_t"]):
        found = overrides_for(photos, name)
        assert "encoder.weights=null" in found
        assert found[-len(name) :] == name
    assert overrides_for(photos, ["encoder=resnet10,resnet18", "-m"])[2:] == ["encoder=resnet10,resnet18", "-m"]


def test_what_the_user_names_is_left_alone(photos: Path) -> None:
    assert overrides_for(photos, ["recipe=paper"])[2:] == ["recipe=paper"]
    assert overrides_for(photos, ["encoder.weights=my.pth"])[2:] == ["recipe=head", "encoder.weights=my.pth"]


def test_pretrained_weights_in_the_cache_give_a_frozen_encoder_by_default(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The published file itself cannot be had here; one of the same layout stands in for it."""
    torch.manual_seed(0)
    network = resnet18()
    hub = tmp_path / "hub/checkpoints"
    hub.mkdir(parents=True)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    torch.save(network.state_dict(), hub / "resnet18-f37072fd.pth")

    model = train(photos, overrides=["dataset.size=64", "recipe.size=64"], folder=tmp_path / "run")
    assert model.encoder.spec["stem"] == "imagenet"
    trained = dict(model.encoder.backbone.named_parameters())
    assert torch.equal(trained["layer1.0.conv1.weight"].cpu(), network.layer1[0].conv1.weight)
    statistics = dict(model.encoder.backbone.named_buffers())
    assert torch.equal(statistics["bn1.running_mean"].cpu(), network.bn1.running_mean)
    assert (tmp_path / "run/gain.json").exists()
    # Even random features tell red from green and blue.
    report = evaluate(Model.load(tmp_path / "run"), class_folders(photos, size=64))
    assert report.accuracy > 0.9
