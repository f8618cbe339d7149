"""A model as one file that runs without Kedge, from pixels to embeddings: ONNX (`.onnx`) or torch.export (`.pt2`)."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from kedge import __version__
from kedge.errors import ConfigError, KedgeError, ModelError
from kedge.io import atomic_write
from kedge.model import Model
from kedge.model.onnx import export, require_onnx, trace

__all__ = ["export_onnx", "export_program"]

TOLERANCE = 1e-4
"""Largest difference between an export and the model, over the model's largest absolute value."""

_ANCHORS_AT_ONCE = 1024
_ANY_SIDE = 64
"""The least side that is tried where a model takes images of any size."""


def export_onnx(
    model: Model, path: str | Path, *, pixels: bool = True, anchors: bool = False, batch: int | None = None
) -> Path:
    """Write the model as ONNX: one file, for onnxruntime and whatever else reads ONNX.

    Args:
        model: what is exported; it stays as it is.
        path: the file, `.onnx`; one that is there is replaced.
        pixels: the input is `pixels`, uint8, B x 3 x H x W of the model's size, and they are scaled, normalized and
            (with flip TTA) flipped inside; otherwise it is `images`, after `Preprocessing.to_input`.
        anchors: beside `embeddings` there is an output `scores`, as of `Model.scores`: minus the distance to each
            anchor, or the classifier's logits.
        batch: a fixed number of images; None for any.

    The file's metadata name the classes (JSON, in the order of the scores), the preprocessing, and what to do with an
    image before. It passes ONNX's own checker and is run by onnxruntime beside the model, on random images, before
    it gets its name: outputs may differ by 1e-4 of the model's largest absolute value.
    """
    target = _checked_target(path, ".onnx")
    require_onnx()
    network = _ExportedModel(model, pixels=pixels, anchors=anchors, batch=batch)
    content, run = export(
        network.traced(), model.encoder.name, input=network.input, outputs=network.outputs, metadata=network.metadata
    )
    return network.write(target, content, run)


def export_program(
    model: Model, path: str | Path, *, pixels: bool = True, anchors: bool = False, batch: int | None = None
) -> Path:
    """Write the model as a `torch.export` program (`.pt2`), which runs without Kedge: `torch.export.load(path)`.

    Arguments as of `export_onnx`. The program returns a tuple. Classes and preprocessing are in its extra file
    `kedge.json`. It is loaded and compared with the model on random images before it gets its name.
    """
    target = _checked_target(path, ".pt2")
    network = _ExportedModel(model, pixels=pixels, anchors=anchors, batch=batch)
    file = io.BytesIO()
    metadata = {"kedge.json": json.dumps(network.metadata, ensure_ascii=False)}
    torch.export.save(network.traced(), file, extra_files=metadata)
    file.seek(0)
    return network.write(target, file.getvalue(), torch.export.load(file).module())


class _ExportedModel(nn.Module):
    """A copy of a model on the CPU, as one module: `pixels` or `images` in, `embeddings` and perhaps `scores` out."""

    weight: Tensor
    bias: Tensor
    anchors: Tensor

    def __init__(self, model: Model, *, pixels: bool, anchors: bool, batch: int | None) -> None:
        super().__init__()
        if batch is not None and batch < 1:
            raise ConfigError(f"batch must be None (any number of images) or at least 1; found {batch}.")
        if anchors and model.anchors is None and model.classifier is None:
            raise ConfigError("anchors=True needs a model with anchors or a classifier; this one has neither.")
        self.encoder = deepcopy(model.encoder).cpu().eval().requires_grad_(False)
        self.preprocessing = model.preprocessing
        self.input = "pixels" if pixels else "images"
        self.outputs = ("embeddings", "scores") if anchors else ("embeddings",)
        self.batch = batch
        self.posterior, self.normalize = model.posterior, model.normalize
        self.has_logits = anchors and model.classifier is not None and not model.posterior
        # Only buffers that are used, and none that are None: torch.export would count them wrongly.
        if model.classifier is not None and (self.has_logits or model.posterior):
            self.register_buffer("weight", model.classifier[0].cpu())
            self.register_buffer("bias", model.classifier[1].cpu())
        if model._anchors is not None and (model.posterior or (anchors and not self.has_logits)):
            self.register_buffer("anchors", model._anchors.cpu())
        self.metadata = self._metadata(model)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Embed a batch, as `Model.embed_pixels` and `Model.scores` do."""
        if self.input == "pixels":
            images = self.preprocessing.to_input(images)
        embeddings: Tensor = self.encoder(images, flip_tta=self.preprocessing.flip_tta)
        if self.posterior:
            embeddings = F.linear(embeddings, self.weight, self.bias).softmax(dim=1) @ self.anchors
        if self.normalize:
            embeddings = F.normalize(embeddings, dim=1)
        if len(self.outputs) == 1:
            return (embeddings,)
        if self.has_logits:
            return embeddings, F.linear(embeddings, self.weight, self.bias)
        anchors = F.normalize(self.anchors, dim=1) if self.normalize else self.anchors
        # By differences, as Model.scores; a part of the anchors at a time, since each costs batch x dim numbers.
        parts = [embeddings[:, None] - some for some in torch.split(anchors, _ANCHORS_AT_ONCE)]
        return embeddings, -torch.cat([torch.linalg.vector_norm(part, dim=2) for part in parts], dim=1)

    def traced(self) -> ExportedProgram:
        """The program that torch makes of it."""
        dynamic: dict[int, Any] = {0: Dim("batch")} if self.batch is None else {}
        if self.preprocessing.size is None:
            dynamic |= {2: Dim.AUTO, 3: Dim.AUTO}
        # Two images: torch takes a batch of one for a number that never changes.
        return trace(self, self._random_input(self.batch or 2), dynamic, self.encoder.name)

    def write(self, target: Path, content: bytes, run: Callable[[Tensor], Sequence[Tensor]]) -> Path:
        """Write an export, unless what it gives for random images differs from the model by more than TOLERANCE."""
        for count in (1, 3) if self.batch is None else (self.batch,):
            images = self._random_input(count)
            with torch.inference_mode():
                expected = self(images)
            for name, reference, output in zip(self.outputs, expected, run(images), strict=True):
                same_shape = output.shape == reference.shape
                scale = float(reference.abs().max()) or 1.0
                difference = float((output - reference).abs().max()) / scale if same_shape else float("inf")
                if not difference <= TOLERANCE:  # a NaN is far, too
                    raise ModelError(
                        f"{target} would differ from the model: its {name} of {count} random images are "
                        f"{difference:.1e} of the largest value apart, more than {TOLERANCE:g}; nothing was written."
                    )
        try:
            with atomic_write(target) as stream:
                stream.write(content)
        except OSError as error:
            raise KedgeError(f"{target} could not be written ({error.strerror or error}).") from error
        return target

    def _random_input(self, count: int) -> Tensor:
        size = self.preprocessing.size
        shape = (count, 3, *((_ANY_SIDE, _ANY_SIDE + 16 * count) if size is None else (size, size)))
        generator = torch.Generator().manual_seed(count)
        if self.input == "pixels":
            return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        return torch.randn(shape, generator=generator)

    def _metadata(self, model: Model) -> dict[str, str]:
        """What someone must know who has the export alone: texts, and JSON where there is more than a text."""
        size, batch = self.preprocessing.size, self.batch or "B"
        sides = "H x W" if size is None else f"{size} x {size}"
        crop = "any size" if size is None else f"the centre square, resized to {sides} (bilinear, antialiased)"
        values = "uint8, 0 to 255" if self.input == "pixels" else "float32, scaled and normalized"
        metadata = {
            "kedge": __version__,
            "fingerprint": model.fingerprint,
            "encoder": self.encoder.name,
            "loss": model.loss,
            "dim": str(model.dim),
            "classes": json.dumps(model.classes, ensure_ascii=False),
            "preprocessing": json.dumps(self.preprocessing.to_json()),
            self.input: f"{batch} x 3 x {sides}, {values}: RGB, upright; {crop}",
            "embeddings": f"{batch} x {model.dim}, float32",
        }
        if len(self.outputs) == 2:
            meaning = "the classifier's logits" if self.has_logits else "minus the distance to each class's anchor"
            metadata["scores"] = f"{batch} x {len(model.classes)}, float32: {meaning}; the largest names the class"
        return metadata


def _checked_target(path: str | Path, suffix: str) -> Path:
    """The file that is to be written; its folder must be there."""
    target = Path(path).expanduser()
    if target.suffix.lower() != suffix:
        raise ConfigError(f"path must end in {suffix}; found {target}.")
    if target.is_dir() or not target.parent.is_dir():
        raise ConfigError(f"{target} is a folder, or {target.parent} does not exist; choose another path.")
    return target
