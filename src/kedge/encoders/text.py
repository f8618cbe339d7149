"""Text towers of two-tower models (CLIP, SigLIP): a text as a vector in the space of the image features."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kedge.encoders.transformers import HF, fetch_folder, import_transformers, load_config, quiet
from kedge.errors import ConfigError, WeightsError, first_line

__all__ = ["EXAMPLE", "TextTower", "text_source"]

EXAMPLE = HF + "openai/clip-vit-base-patch32"
_LOADING = threading.Lock()


class _Kind(NamedTuple):
    network: str
    inputs: tuple[str, ...]
    padding: bool | str


_KINDS = {
    "clip": _Kind("CLIPTextModelWithProjection", ("input_ids", "attention_mask"), padding=True),
    # SigLIP is trained on texts of one length, and sees the padding.
    "siglip": _Kind("SiglipTextModel", ("input_ids",), padding="max_length"),
}
"""By the type of the whole model."""


def text_source(name: str, folder: Path) -> str | None:
    """Where the text tower of model ``name``, fetched to ``folder``, is found again; None where it has none.

    That is ``hf:<folder>``, or ``hf:<organisation>/<model>@<commit>``.
    """
    if load_config(folder).model_type not in _KINDS:
        return None
    repository = name.removeprefix(HF)
    if Path(repository).expanduser().is_dir():
        return HF + str(folder.resolve())
    return f"{HF}{repository.partition('@')[0]}@{folder.name}"


class TextTower:
    """Tokenizer and text tower of ``hf:<model>``, loaded when they are first used."""

    def __init__(self, source: str) -> None:
        self.source = source
        self._loaded: tuple[_Kind, Any, Any] | None = None

    @torch.inference_mode()
    def embed(self, texts: Sequence[str]) -> Tensor:
        """Vectors of length 1, N x width; a text that is too long is cut off where the tower's input ends."""
        with _LOADING:
            if self._loaded is None:
                self._loaded = self._load()
            kind, tokenizer, network = self._loaded
        longest = network.config.max_position_embeddings
        try:
            tokens = tokenizer(
                list(texts), padding=kind.padding, truncation=True, max_length=longest, return_tensors="pt"
            )
            outputs = network(**{name: tokens[name] for name in kind.inputs})
        except Exception as error:  # a tokenizer of another model
            raise WeightsError(
                f"the tokenizer in {self.source} does not fit its text tower ({first_line(error)}): fetch it again."
            ) from error
        vectors: Tensor = outputs.text_embeds if "text_embeds" in outputs else outputs.pooler_output
        return F.normalize(vectors.float(), dim=1)

    def _load(self) -> tuple[_Kind, Any, Any]:
        transformers = import_transformers()
        if (local := Path(self.source.removeprefix(HF))).is_absolute() and not local.is_dir():
            raise ConfigError(
                f"the folder {local} with this model's text tower is gone: put it back, "
                f"or name another with model.text_source = '{HF}FOLDER'."
            )
        folder = fetch_folder(self.source, text=True)
        config = load_config(folder)
        if (kind := _KINDS.get(config.model_type)) is None:
            raise ConfigError(f"{self.source} has no text tower: name a CLIP or SigLIP model, such as {EXAMPLE}.")
        part = config.text_config
        if hasattr(config, "projection_dim"):
            part.projection_dim = config.projection_dim
        try:
            with quiet():
                options: dict[str, Any] = {"local_files_only": True}
                tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False, **options)
                options |= {"config": part, "dtype": torch.float32, "output_loading_info": True}
                network, notes = getattr(transformers, kind.network).from_pretrained(folder, **options)
                if notes["missing_keys"]:
                    raise WeightsError(f"it lacks {min(notes['missing_keys'])}")
        except Exception as error:  # missing, damaged and foreign files make transformers raise errors of many kinds
            raise WeightsError(
                f"the text tower in {folder} cannot be read ({first_line(error)}): fetch the whole model again."
            ) from error
        return kind, tokenizer, network.eval()
