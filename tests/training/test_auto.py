from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from kedge import Model, evaluate, train
from kedge.config.compose import build_dataset, load_config
from kedge.encoders import DEFAULT_ENCODER, build_encoder, pretrained_preprocessing
from kedge.images import Preprocessing, read_image
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


def test_without_weights_it_trains_from_scratch_and_says_so(
    photos: Path, no_weights: None, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = overrides_for(photos)
    assert "recipe=kedge" in overrides
    said = capsys.readouterr().err
    assert re.match(r"Training resnet\d+ from scratch, since no pretrained weights are available\.\n", said)
    assert "kedge[pretrained]" in said
    named = overrides_for(photos, ["encoder=resnet50", "encoder.weights=null"])
    assert "encoder=resnet10" not in named
    assert "recipe=kedge" in named
    assert named[-2:] == ["encoder=resnet50", "encoder.weights=null"]


def test_any_encoder_can_be_named(photos: Path, no_weights: None) -> None:
    for name in (["encoder=timm", "encoder.name=timm:test_resnet.r160_in1k"], ["encoder=swin_t"]):
        found = overrides_for(photos, name)
        assert "encoder.weights=null" in found
        assert found[-len(name) :] == name
    assert overrides_for(photos, ["encoder=resnet10,resnet18", "-m"])[2:] == ["encoder=resnet10,resnet18", "-m"]


def test_what_the_user_names_is_left_alone(photos: Path) -> None:
    assert overrides_for(photos, ["recipe=paper"])[2:] == ["recipe=paper"]
    assert overrides_for(photos, ["encoder.weights=my.pth"])[2:] == ["recipe=head", "encoder.weights=my.pth"]


def test_weights_of_the_package_give_a_frozen_encoder_by_default(
    photos: Path, tmp_path: Path, weights_package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The real weights are an extra; some of the same layout stand in for them."""
    model = train(photos, overrides=["dataset.size=64", "recipe.size=64"], folder=tmp_path / "run")
    said = " ".join(capsys.readouterr().err.split())
    assert "Using encoder tf_efficientnet_lite0 with ImageNet weights from the package" in said
    assert "choose another with encoder=timm encoder.name=timm:MODEL" in said
    assert model.encoder.name == DEFAULT_ENCODER
    stored = [*torch.load(weights_package, weights_only=True).values()]
    kept = model.encoder.backbone.state_dict().values()
    assert all(torch.equal(*pair) for pair in zip((value.cpu() for value in kept), stored[:-2], strict=True))
    assert model.preprocessing == replace(pretrained_preprocessing(DEFAULT_ENCODER), size=64)
    assert model.preprocessing.crop_pct == 0.875
    # The images that were trained on are those that the model makes of the files.
    dataset = build_dataset(load_config(tmp_path / "run/config.yaml").dataset)
    assert dataset.test.paths is not None
    decoded = model.preprocessing.to_pixels(read_image(dataset.test.paths[0]))
    assert np.array_equal(dataset.test.take([0])[0].numpy(), decoded)
    assert (tmp_path / "run/gain.json").exists()
    # Even random features tell red from green and blue.
    assert evaluate(Model.load(tmp_path / "run"), dataset).accuracy > 0.9


def test_a_named_encoder_brings_its_own_preprocessing(photos: Path, tmp_path: Path) -> None:
    named = ["encoder=timm", "encoder.name=timm:resnet10t.c3_in1k", "encoder.weights=my.pth"]
    assert overrides_for(photos, named)[2:-3] == [
        "recipe=head",
        "dataset.size=176",
        "recipe.size=176",
        "dataset.crop_pct=0.875",
        "dataset.interpolation=bicubic",
    ]
    assert overrides_for(photos, [*named, "dataset.crop_pct=1.0"])[-5:-4] == ["dataset.interpolation=bicubic"]


def test_a_model_of_ones_own_brings_its_preprocessing(photos: Path, tmp_path: Path) -> None:
    preprocessing = Preprocessing(32, crop_pct=0.9, interpolation="bicubic")
    Model(build_encoder("resnet10", dim=4), anchors=None, classes=(), preprocessing=preprocessing).save(tmp_path / "m")
    assert overrides_for(photos, ["encoder=resnet10", f"encoder.weights={tmp_path / 'm'}"])[3:-2] == [
        "dataset.size=32",
        "recipe.size=32",
        "dataset.crop_pct=0.9",
        "dataset.interpolation=bicubic",
    ]
