from __future__ import annotations

import json
import shutil
import socket
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image

from kedge import Model, train
from kedge.config.compose import compose
from kedge.encoders import Encoder, build_encoder, fetch_weights, pretrained_cfg
from kedge.encoders import transformers as adapter
from kedge.errors import ConfigError, ModelError, WeightsError
from kedge.images import Preprocessing
from kedge.training import overrides_for

transformers = pytest.importorskip("transformers")

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
PATCHES = {"image_size": 32, "patch_size": 8}
STAGES = {"hidden_sizes": [8, 16], "depths": [1, 1]}
TEXT = {**SMALL, "vocab_size": 50, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
CONFIGS: dict[str, Any] = {
    "vit": lambda: transformers.ViTConfig(**SMALL, **PATCHES),
    "dinov2": lambda: transformers.Dinov2Config(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=7
    ),
    "swin": lambda: transformers.SwinConfig(
        embed_dim=8, depths=[1, 1], num_heads=[1, 2], image_size=32, patch_size=4, window_size=4
    ),
    "convnext": lambda: transformers.ConvNextConfig(**STAGES, num_stages=2, image_size=32),
    "resnet": lambda: transformers.ResNetConfig(**STAGES, embedding_size=8, layer_type="basic"),
    "clip": lambda: transformers.CLIPConfig(
        text_config=TEXT, vision_config={**SMALL, **PATCHES, "hidden_size": 24}, projection_dim=16
    ),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of each kind, as the Hub has them: random weights, a ViT and a Swin with a classifier."""
    torch.manual_seed(0)
    found = {}
    for name, config in CONFIGS.items():
        kind = transformers.AutoModelForImageClassification if name in ("vit", "swin") else transformers.AutoModel
        found[name] = tmp_path_factory.mktemp("hub") / f"tiny-{name}"
        kind.from_config(config()).save_pretrained(found[name])
    processor = transformers.ViTImageProcessor(
        size={"height": 32, "width": 32}, resample=3, image_mean=[0.5, 0.4, 0.3], image_std=[0.2, 0.3, 0.4]
    )
    processor.save_pretrained(found["vit"])
    return found


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("there is no network in this test")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


def pooled(name: str, folder: Path, images: torch.Tensor) -> torch.Tensor:
    """What the library itself makes of them: the first token of a ViT, CLIP's projection, what the others pool."""
    if name == "clip":
        features = transformers.CLIPModel.from_pretrained(folder).eval().get_image_features(images)
        return getattr(features, "pooler_output", features)
    found = transformers.AutoModel.from_pretrained(folder).eval()(images)
    return found.last_hidden_state[:, 0] if name == "vit" else found.pooler_output.flatten(1)


@pytest.mark.parametrize("name", CONFIGS)
def test_features_are_the_librarys_and_survive_a_model_folder(
    name: str, folders: dict[str, Path], tmp_path: Path, no_network: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = build_encoder(f"hf:{folders[name]}", weights="default", dim=5).eval()
    assert (encoder.name, encoder.width, encoder.dim) == (f"hf:tiny-{name}", 16, 5)
    side = CONFIGS["dinov2"]().image_size if name == "dinov2" else 32
    pixels = torch.randint(256, (3, 3, side, side), dtype=torch.uint8)
    images = pixels / 255
    with torch.inference_mode():
        torch.testing.assert_close(encoder.backbone(images), pooled(name, folders[name], images))
    model = Model(encoder, anchors=torch.eye(5), classes=list("abcde"), preprocessing=Preprocessing(size=side))
    model.save(tmp_path / "model")
    # Whatever is needed lies in the folder: the weights' own one may be gone.
    monkeypatch.setattr(adapter, "fetch_folder", lambda *_, **__: pytest.fail("the Hub was asked"))
    loaded = Model.load(tmp_path / "model", device="cpu")
    assert torch.equal(loaded.embed(pixels), model.embed(pixels))
    assert loaded.fingerprint == model.fingerprint
    spec = json.loads((tmp_path / "model" / "model.json").read_text())["encoder"]
    assert spec == encoder.spec == json.loads(json.dumps(encoder.spec))
    assert str(folders[name]) not in json.dumps(spec)


def test_other_sizes(folders: dict[str, Path]) -> None:
    for name in ("vit", "dinov2", "swin", "convnext", "clip"):
        encoder = build_encoder(f"hf:{folders[name]}", image_size=48).eval()
        with torch.inference_mode():
            assert encoder(torch.rand(2, 3, 48, 48)).shape == (2, 16)


def test_what_the_image_processor_says(folders: dict[str, Path]) -> None:
    expected = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4), "input_size": (3, 32, 32)}
    assert pretrained_cfg(f"hf:{folders['vit']}") == expected
    assert pretrained_cfg(f"hf:{folders['swin']}") == {"input_size": (3, 32, 32)}
    assert pretrained_cfg("timm:vit_tiny_patch16_384")["input_size"] == (3, 384, 384)
    assert pretrained_cfg("resnet18") == {}


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    generator = np.random.default_rng(0)
    for name, colour in {"red": (200, 40, 40), "green": (40, 200, 40)}.items():
        (tmp_path / "photos" / name).mkdir(parents=True)
        for index in range(10):
            pixels = np.clip(generator.normal(colour, 30, (40, 40, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{index}.png")
    return tmp_path / "photos"


def test_a_frozen_one_trains_with_its_own_preprocessing(
    folders: dict[str, Path], photos: Path, tmp_path: Path, no_network: None
) -> None:
    named = ["encoder=huggingface", f"encoder.name=hf:{folders['vit']}"]
    given = overrides_for(photos, named)
    assert {"recipe=head", "encoder.weights=default", "dataset.size=32", "recipe.size=32"} <= {*given}
    model = train(photos, overrides=[*named, "recipe.epochs=2", "logger=none"], folder=tmp_path / "run")
    theirs = transformers.ViTModel.from_pretrained(folders["vit"]).state_dict()
    ours = model.encoder.backbone.model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert model.preprocessing.size == 32
    means = torch.tensor(model.preprocessing.mean) / model.preprocessing.scale / 255
    torch.testing.assert_close(means, torch.tensor([0.5, 0.4, 0.3]), rtol=0.005, atol=0)
    pictures = sorted(photos.rglob("*.png"))
    assert torch.equal(Model.load(tmp_path / "run", device="cpu").embed(pictures), model.to("cpu").embed(pictures))


def test_fine_tuning(folders: dict[str, Path], stripes: Path, tmp_path: Path) -> None:
    name = f"encoder.name=hf:{folders['convnext']}"
    data = ["dataset=arrays", f"dataset.path={stripes}"]
    how = ["recipe.epochs=1", "recipe.batch_size=32", "recipe.size=32", "logger=none"]
    model = train(overrides=[*data, "encoder=huggingface", name, *how], folder=tmp_path / "run")
    before = transformers.AutoModel.from_pretrained(folders["convnext"]).state_dict()
    after = model.to("cpu").encoder.backbone.model.state_dict()
    assert not any(torch.equal(before[key], after[key]) for key in before if key.endswith("weight"))


def test_a_stranger_s_folder_runs_no_code(folders: dict[str, Path], tmp_path: Path) -> None:
    encoder = build_encoder(f"hf:{folders['vit']}", dim=4)
    spec = json.loads(json.dumps(encoder.spec))
    for trap in ({"auto_map": {"AutoModel": "evil--code.Model"}}, {"attn_implementation": "evil/kernel"}):
        again = Encoder.from_spec({**spec, "config": {**spec["config"], **trap}})
        assert again.spec == spec
    for config in ({**spec["config"], "model_type": "bert"}, {**spec["config"], "backbone": "resnet50"}):
        with pytest.raises(ConfigError, match="features"):
            Encoder.from_spec({**spec, "config": config})
    model = Model(encoder, anchors=None, classes=[], preprocessing=Preprocessing(size=32))
    model.save(tmp_path / "model")
    said = json.loads((tmp_path / "model/model.json").read_text())
    said["encoder"]["config"]["hidden_size"] = 24
    (tmp_path / "model/model.json").write_text(json.dumps(said))
    with pytest.raises(ModelError):
        Model.load(tmp_path / "model")


def test_remote_code_is_refused(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("raise SystemExit('it was run')\n")
    said = {"model_type": "own", "auto_map": {"AutoConfig": "code.Config", "AutoModel": "code.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(said))
    with pytest.raises(ConfigError, match="remote code"):
        build_encoder(f"hf:{tmp_path}")


def test_without_a_network_one_sentence_says_what_to_do(
    no_network: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, photos: Path
) -> None:
    for ask in (
        lambda: build_encoder("hf:nobody/nothing", weights="default"),
        lambda: fetch_weights("hf:nobody/nothing"),
        lambda: overrides_for(photos, ["encoder=huggingface", "encoder.name=hf:nobody/nothing"]),
    ):
        with pytest.raises(
            WeightsError, match=r"hf:nobody/nothing .*hf download nobody/nothing .*encoder\.name=hf:FOLDER"
        ):
            ask()


def test_a_cached_download_is_enough(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_network: None
) -> None:
    """As the Hub's client leaves it; the download itself cannot be had here."""
    import huggingface_hub

    commit = "0" * 40
    kept = tmp_path / "models--someone--tiny"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text(commit)
    (kept / "snapshots").mkdir()
    (kept / "snapshots" / commit).symlink_to(folders["vit"])
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    encoder = build_encoder("hf:someone/tiny", weights="default")
    assert encoder.name == "hf:someone/tiny"
    assert fetch_weights("hf:someone/tiny").name == commit


@pytest.mark.parametrize("safe", [True, False])
def test_plain_tensors_are_fetched_rather_than_pickles(
    safe: bool, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    repository, cache = tmp_path / "repository", tmp_path / "cache"
    shutil.copytree(folders["vit"], repository)
    weights = repository / "model.safetensors"
    torch.save(safetensors.torch.load_file(weights), repository / "pytorch_model.bin")
    if not safe:
        weights.unlink()
    (repository / "onnx").mkdir()
    (repository / "onnx" / "model.safetensors").write_bytes(b"of no use")

    def download(name: str, *, allow_patterns: tuple[str, ...], local_files_only: bool = False, **_: object) -> str:
        assert name == "someone/tiny"
        cache.mkdir(exist_ok=True)
        files = [file for file in repository.rglob("*") if file.is_file() and not local_files_only]
        for file in files:
            if any(fnmatch(str(file.relative_to(repository)), pattern) for pattern in allow_patterns):
                shutil.copy(file, cache / file.name)
        return str(cache)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(adapter, "reach", lambda *_: None)
    assert fetch_weights("hf:someone/tiny") == cache
    fetched = {file.name for file in cache.iterdir()} - {"config.json", "preprocessor_config.json"}
    assert fetched == {"model.safetensors" if safe else "pytorch_model.bin"}
    assert build_encoder("hf:someone/tiny", weights="default").width == 16


def test_bad_arguments(folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        build_encoder(f"hf:{tmp_path}/nothing")
    with pytest.raises(ConfigError, match="stem"):
        build_encoder(f"hf:{folders['vit']}", stem="small")
    with pytest.raises(WeightsError, match="default"):
        build_encoder(f"hf:{folders['vit']}", weights="IMAGENET1K_V1")
    with pytest.raises(ConfigError, match="encoder must be one of"):
        build_encoder("hf:")
    with pytest.raises(WeightsError, match="do not fit"):
        build_encoder(f"hf:{folders['vit']}", weights=folders["convnext"])
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"kedge\[huggingface\]"):
        build_encoder(f"hf:{folders['vit']}")
    assert compose(["encoder=huggingface", "encoder.name=hf:a/b"]).encoder.weights == "default"
