"""Every configuration in the package composes, and what it describes can be built."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from kedge.config.compose import build, build_loss, compose
from kedge.encoders import Encoder
from kedge.losses import RetrievalLoss
from kedge.training.config import Settings

ROOT = Path(str(files("kedge.config")))
GROUPS = {
    folder.name: sorted(path.stem for path in folder.glob("*.yaml"))
    for folder in ROOT.iterdir()
    if folder.is_dir() and not folder.name.startswith("__")
}
NEEDED = {
    "arrays": ["dataset.path=x.npz"],
    **{key: ["dataset.path=photos"] for key in ("cars196", "cub200", "folder", "inshop", "online_products")},
    "stored": ["dataset.path=kept.npy"],
    "timm": ["encoder.name=timm:test_resnet.r160_in1k"],
    "swin_t": ["encoder.weights=null"],  # the weights cannot be downloaded in a test
    "metric_learning": ["loss.loss=NTXentLoss"],
}


def options(group: str) -> list[str]:
    return GROUPS[group]


def needed(name: str, group: str) -> list[str]:
    """What a configuration leaves to its user; two groups have one called huggingface."""
    if name == "huggingface":
        return ["encoder.name=hf:nobody/nothing"] if group == "encoder" else ["dataset.path=nobody/nothing"]
    return NEEDED.get(name, [])


def test_no_group_is_forgotten() -> None:
    assert set(GROUPS) == {"dataset", "encoder", "experiment", "logger", "loss", "recipe", "trainer"}
    assert sorted(path.name for path in ROOT.glob("*.yaml")) == ["reproduce.yaml", "train.yaml"]


@pytest.mark.parametrize("name", options("encoder"))
def test_encoder(name: str, tmp_path: Path) -> None:
    if name == "huggingface":
        import transformers

        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        transformers.ViTModel(transformers.ViTConfig(image_size=64, **sizes)).save_pretrained(tmp_path)
    given = [f"encoder.name=hf:{tmp_path}"] if name == "huggingface" else NEEDED.get(name, [])
    config = compose([f"encoder={name}", *given])
    size = 224 if name == "swin_t" else 64
    encoder = build(config.encoder, head="bounded", image_size=size)
    assert isinstance(encoder, Encoder)
    with torch.inference_mode():
        assert encoder.eval()(torch.zeros(1, 3, size, size)).shape == (1, encoder.dim)


@pytest.mark.parametrize("name", options("loss"))
def test_loss(name: str) -> None:
    loss = build_loss(compose([f"loss={name}", *NEEDED.get(name, [])]).loss, num_classes=3, dim=4)
    assert isinstance(loss, RetrievalLoss)
    assert loss.name == {"metric_learning": "NTXentLoss"}.get(name, name)
    assert loss(torch.randn(6, 4), torch.arange(6) % 3).isfinite()


@pytest.mark.parametrize("encoder", options("encoder"))
@pytest.mark.parametrize("name", options("recipe"))
def test_recipe(name: str, encoder: str) -> None:
    config = compose([f"recipe={name}", f"encoder={encoder}", *needed(encoder, "encoder")])
    recipe = Settings.from_config(config).recipe
    assert recipe.name == name
    images = torch.randint(256, (2, 3, 16, 16), dtype=torch.uint8)
    assert recipe.augmentation(images, torch.Generator().manual_seed(0)).shape == images.shape


@pytest.mark.parametrize("name", options("dataset"))
def test_dataset(name: str, stripes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Downloads are tested with their loaders; here, that the loaders take what the configuration gives."""
    import inspect

    from hydra.utils import get_object

    node = compose([f"dataset={name}", *needed(name, "dataset")]).dataset
    loader = get_object(node["_target_"])
    given = {key: value for key, value in node.items() if key != "_target_"}
    inspect.signature(loader).bind(**given)
    if name == "sample":
        assert len(build(node).classes) == 10
    if name == "arrays":
        assert len(build(compose(["dataset=arrays", f"dataset.path={stripes}"]).dataset).classes) == 4


@pytest.mark.parametrize("name", options("experiment"))
def test_experiment(name: str) -> None:
    config = compose([f"experiment={name}"])
    Settings.from_config(config)
    build(config.encoder, head="linear", image_size=32)


@pytest.mark.parametrize("name", options("trainer"))
def test_trainer(name: str) -> None:
    assert Settings.from_config(compose([f"trainer={name}"])).trainer.accelerator == "auto"


@pytest.mark.parametrize("name", options("logger"))
def test_logger(name: str) -> None:
    asked = Settings.from_config(compose([f"logger={name}"])).logger
    found = {key for key in vars(asked) if getattr(asked, key) is not None}
    assert found == {"auto": {"tensorboard"}, "none": set()}.get(name, {name})


@pytest.mark.parametrize("overlay", sorted(ROOT.glob("recipe/encoder/*.yaml")), ids=lambda path: path.stem)
def test_encoder_overlays(overlay: Path) -> None:
    """recipe/encoder/paper_swin_t.yaml, say, takes effect with recipe=paper encoder=swin_t."""
    recipe, _, encoder = overlay.stem.partition("_")
    composed = compose([f"recipe={recipe}", f"encoder={encoder}"]).recipe
    values = OmegaConf.load(overlay)
    values.pop("defaults", None)
    assert OmegaConf.merge(composed, values) == composed
    assert compose([f"recipe={recipe}", "encoder=resnet18"]).recipe != composed


def test_losses_adapt_the_recipe() -> None:
    """A loss's own file names what differs: Adam, no mixing for pairs, faster proxies; the paper's recipe is Adam's."""

    def adapted(recipe: str, loss: str) -> tuple[str, float, float, int, float]:
        made = compose([f"recipe={recipe}", f"loss={loss}"]).recipe
        optimizer = made.optimizer
        return optimizer.name, optimizer.lr, optimizer.anchor_lr, made.augmentation.cutout, made.mixing.cutmix

    assert adapted("kedge", "cam") == ("sgd", 0.3, 1, 0, 0.5)
    assert adapted("kedge", "arcface") == adapted("kedge-long", "cosface") == ("adam", 1e-3, 1, 0, 0.5)
    assert adapted("kedge", "triplet") == adapted("kedge-long", "contrastive") == ("adam", 1e-3, 1, 8, 0)
    assert adapted("kedge", "proxy_anchor") == ("adamw", 1e-3, 10, 8, 0)
    assert adapted("kedge", "supcon") == ("sgd", 0.5, 1, 0, 0)
    assert adapted("head", "cam") == ("adamw", 5e-3, 1, 0, 0)
    assert adapted("head", "supcon") == adapted("paper", "supcon") == ("adam", 1e-3, 1, 0, 0)
    assert adapted("paper", "proxy_anchor") == ("adamw", 1e-3, 10, 0, 0)
    assert compose(["loss=triplet", "recipe.optimizer.lr=7"]).recipe.optimizer.lr == 7
