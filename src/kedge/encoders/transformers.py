"""Vision models of Hugging Face's transformers: built from a plain configuration, cut off at their pooled features."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from kedge.deps import require
from kedge.encoders.network import CONNECT_SECONDS, fetching, reach
from kedge.errors import ConfigError, WeightsError, first_line

__all__ = [
    "HF",
    "TransformersBackbone",
    "fetch_folder",
    "import_transformers",
    "load_config",
    "pretrained_cfg",
    "quiet",
    "read_config",
    "shown_name",
]

HF = "hf:"
_SIDE = 224
_CONFIG_FILES = ("config.json", "preprocessor_config.json", "processor_config.json")
_TEXT_FILES = ("tokenizer*", "vocab.*", "merges.txt", "spiece.model", "special_tokens_map.json", "added_tokens.json")
_WEIGHT_FILES = (("model*.safetensors", "model*.safetensors.index.json"), ("pytorch_model*.bin", "pytorch_model*.json"))
# What is said of the weights' origin, of classes and of ways to compute. Some of it names code or kernels elsewhere,
# and a model's folder may come from a stranger.
_OMITTED = (
    *("architectures", "id2label", "label2id", "name_or_path", "num_labels", "problem_type", "transformers_version"),
    *("attn_implementation", "auto_map", "custom_pipelines", "dtype", "experts_implementation", "quantization_config"),
    *("return_dict", "torch_dtype"),
)
_PROJECTED = "projected"
"""In the configuration of a CLIP: features are in the space that it shares with texts. Models of 0.1 do not say so."""
_MAX_NUMBERS = 2**22
"""Sizes and depths of a network, all together: some are counted up to before its first layer is built."""


class TransformersBackbone(nn.Module):
    """A transformers model, with random weights, up to its pooled features.

    These are what the model itself pools. Where its pooler is a trained layer over the first token, as in ViT, that
    token is taken instead: pretrained weights often lack the layer, which would then be random.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.config = _plain(config)
        self.model = _without_dense_pooler(_build(self.config))
        self._side = _side(self.config.get("image_size"))
        self._resizable = "interpolate_pos_encoding" in inspect.signature(self.model.forward).parameters
        tokens = ("cls_token", "class_embedding")
        self._first_token = any(name.endswith(tokens) for name, _ in self.model.named_parameters())

    def forward(self, images: Tensor) -> Tensor:
        """Pooled features of a batch, B x width."""
        options = {}
        if self._resizable and self._side is not None and images.shape[-2:] != (self._side, self._side):
            options["interpolate_pos_encoding"] = True
        outputs = self.model(pixel_values=images, **options)
        pooled: Tensor | None = getattr(outputs, "image_embeds", getattr(outputs, "pooler_output", None))
        if pooled is None:
            values: Tensor = outputs.last_hidden_state
            tokens = values.flatten(2).mT if values.ndim == 4 else values
            pooled = tokens[:, 0] if self._first_token else tokens.mean(1)
        return pooled.flatten(1)

    def width(self, image_size: int | None = None) -> int:
        """How many features there are, seen on a black image of this size."""
        side = image_size or self._side or _SIDE
        try:
            with torch.no_grad():
                return int(self.eval()(torch.zeros(1, 3, side, side)).shape[1])
        except (RuntimeError, TypeError, ValueError) as error:
            hint = f": resize the images to {self._side}" if self._side and self._side != side else ""
            raise ConfigError(
                f"The {self.config['model_type']} model cannot embed images of {side} x {side} pixels "
                f"({first_line(error)}){hint}."
            ) from error
        finally:
            self.train()

    def load(self, folder: Path) -> None:
        """Take over the weights in a folder in the Hub's layout."""
        try:
            with quiet():
                kind: Any = type(self.model)
                pretrained, notes = kind.from_pretrained(
                    folder,
                    config=self.model.config,
                    dtype=torch.float32,
                    local_files_only=True,
                    output_loading_info=True,
                )
        except Exception as error:  # damaged and foreign files make transformers raise errors of many kinds
            raise WeightsError(
                f"The weights in {folder} cannot be read ({first_line(error)}); download them again."
            ) from error
        if missing := sorted({*notes["missing_keys"]} & {*self.model.state_dict()}):
            raise WeightsError(
                f"The weights in {folder} do not fit its config.json: {missing[0]} and {len(missing) - 1} more are "
                "missing; pass a folder that save_pretrained wrote."
            )
        self.model.load_state_dict(_without_dense_pooler(pretrained).state_dict())


def fetch_folder(name: str, *, weights: bool = True, text: bool = False, timeout: float = CONNECT_SECONDS) -> Path:
    """The folder of ``hf:<folder>`` or ``hf:<organisation>/<model>[@<revision>]``, downloaded if need be.

    With ``text``, a tokenizer is needed too.
    """
    source = name.removeprefix(HF)
    local = Path(source).expanduser()
    if local.is_dir():
        return local
    if source.startswith((".", "/", "~")):
        raise ConfigError(f"Folder {source} does not exist; check encoder.name.")
    import huggingface_hub as hub

    repository, _, revision = source.partition("@")

    def snapshot(files: tuple[str, ...], **options: Any) -> Path | None:
        folder = Path(hub.snapshot_download(repository, revision=revision or None, allow_patterns=[*files], **options))
        has_weights = any(folder.glob("*.safetensors")) or any(folder.glob("pytorch_model*.bin"))
        is_complete = (has_weights or not weights) and (any(folder.glob("tokenizer*")) or not text)
        return folder if (folder / "config.json").is_file() and is_complete else None

    what, use = ("The text tower of", "set model.text_source = '{}'") if text else ("Encoder", "pass encoder.name={}")
    advice = f"download it with a network (hf download {repository} --local-dir FOLDER) and "
    with fetching(
        f"{what} {name} could not be downloaded from the Hugging Face Hub", advice + use.format(f"{HF}FOLDER")
    ):
        with suppress(hub.errors.LocalEntryNotFoundError):
            if cached := snapshot(_CONFIG_FILES, local_files_only=True):
                return cached
        reach(hub.hf_hub_url(repository, "config.json"), timeout)
        # Plain tensors where there are any, else pickles, which are read without code.
        for files in _WEIGHT_FILES if weights else ((),):
            if folder := snapshot((*_CONFIG_FILES, *_TEXT_FILES, *files)):
                return folder
        raise FileNotFoundError(f"it holds no config.json, or no {'tokenizer' if text else 'weights'}")


def pretrained_cfg(name: str) -> dict[str, Any]:
    """The preprocessing of the pretrained weights of ``name``, in timm's words, as its image processor has it."""
    folder = fetch_folder(name, weights=False)
    values: dict[str, Any] = {}
    with suppress(Exception), quiet():  # it has none, or one that needs code of its own
        processor = import_transformers().AutoImageProcessor.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        values = processor.to_dict()
    cfg: dict[str, Any] = {}
    if values.get("do_normalize") and values.get("image_mean") and values.get("image_std"):
        cfg = {"mean": tuple(values["image_mean"]), "std": tuple(values["image_std"])}
    crop = values.get("crop_size") if values.get("do_center_crop") else None
    side = _side(crop) or _side(values.get("size")) or _side(read_config(folder).get("image_size"))
    if side:
        cfg["input_size"] = (3, side, side)
    return cfg


def shown_name(name: str) -> str:
    """The name under which a model is kept: of a local folder, the last part alone."""
    local = Path(name.removeprefix(HF)).expanduser()
    return HF + local.resolve().name if name.startswith(HF) and local.is_dir() else name


def import_transformers() -> ModuleType:
    """The module ``transformers``, or a sentence that says how to get it."""
    return require("transformers", extra="huggingface", purpose="An encoder called hf:<model>")


def _build(config: Mapping[str, Any]) -> nn.Module:
    transformers = import_transformers()
    kind = config.get("model_type")
    if kind not in transformers.CONFIG_MAPPING:
        raise ConfigError(f"transformers {transformers.__version__} has no model of type {kind!r}: upgrade it.")
    if _numbers(config) > _MAX_NUMBERS:
        raise ConfigError(f"The {kind} model has sizes that add up to more than {_MAX_NUMBERS:,}: it is too large.")
    options = {key: value for key, value in config.items() if key != _PROJECTED}
    built_config: Any = None if _wraps(config) else transformers.CONFIG_MAPPING[kind].from_dict(options)
    if kind == "clip_vision_model" and config.get(_PROJECTED):
        return transformers.CLIPVisionModelWithProjection(built_config)  # type: ignore[no-any-return]
    network = transformers.MODEL_MAPPING.get(type(built_config), None)
    network = network[0] if isinstance(network, tuple) else network
    if getattr(network, "main_input_name", None) != "pixel_values":
        raise ConfigError(f"Models of type {kind!r} do not turn one image into features: choose a ViT, DINOv2, Swin …")
    if hasattr(built_config, "mask_ratio"):
        built_config.mask_ratio = 0.0  # masked autoencoders would look at some patches only, at random
    with quiet():
        model: nn.Module = transformers.AutoModel.from_config(built_config, trust_remote_code=False)
    return model


def _wraps(config: Mapping[str, Any]) -> bool:
    """Whether this is a model around one of another kind, which may be fetched when it is built."""
    return str(config.get("model_type")).startswith("timm_") or any(
        _wraps(value) if isinstance(value, Mapping) and "backbone" not in key else value and "backbone" in key
        for key, value in config.items()
    )


def _numbers(value: Any) -> int:
    """The sum of all whole numbers in a configuration."""
    if isinstance(value, Mapping | list | tuple):
        return sum(map(_numbers, value.values() if isinstance(value, Mapping) else value))
    return abs(value) if isinstance(value, int) else 0


def read_config(folder: Path) -> dict[str, Any]:
    """The configuration in a folder in the Hub's layout, of a model with several parts that of the one for images."""
    config = load_config(folder)
    plain = _plain(getattr(config, "vision_config", config).to_dict())
    if config.model_type == "clip":
        plain |= {"projection_dim": config.projection_dim, _PROJECTED: True}
    return plain


def load_config(folder: Path) -> Any:
    """The configuration in a folder in the Hub's layout, as transformers has it."""
    transformers = import_transformers()
    try:
        with quiet():
            return transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a missing file, damaged JSON, a model that needs code of its own
        raise ConfigError(
            f"{folder} holds no configuration that transformers can use without remote code "
            f"({first_line(error)}): choose a model that is part of transformers."
        ) from error


def _side(size: Any) -> int | None:
    """The side of the square that a configuration or an image processor speaks of, in any of their ways."""
    if isinstance(size, Mapping):
        size = next((size[key] for key in ("height", "shortest_edge") if size.get(key)), None)
    elif isinstance(size, (list, tuple)) and size:
        size = size[0]
    return size if isinstance(size, int) and not isinstance(size, bool) and size > 0 else None


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a configuration that says what the architecture is."""
    return {
        key: _plain(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if isinstance(key, str) and key not in _OMITTED and not key.startswith(("_", "output_"))
    }


def _without_dense_pooler(model: nn.Module) -> nn.Module:
    if hasattr(getattr(model, "pooler", None), "dense"):
        model.register_module("pooler", None)
    return model


@contextmanager
def quiet() -> Iterator[None]:
    """Keep what transformers says of unused classifiers, and its bars, off the screen."""
    logs = import_transformers().utils.logging
    level, bars = logs.get_verbosity(), logs.is_progress_bar_enabled()
    logs.set_verbosity_error()
    logs.disable_progress_bar()
    try:
        yield
    finally:
        logs.set_verbosity(level)
        if bars:
            logs.enable_progress_bar()
