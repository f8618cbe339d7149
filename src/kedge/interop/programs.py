"""A model as one program, from pixels to embeddings: what `.pt2` files hold and `.onnx` files are made of."""

from __future__ import annotations

import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from copy import deepcopy
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from kedge.errors import ConfigError, KedgeError, ModelError
from kedge.io import atomic_write
from kedge.model import Model

__all__ = ["Network", "export_program"]

TOLERANCE = 1e-4
"""How far an export may be from the model: its largest difference over the model's largest absolute value."""

_ABOUT = "kedge.json"
_ANCHORS_AT_ONCE = 1024
_ANY_SIDE = 64
"""The least side that is tried where a model takes pictures of any size."""


class Network(nn.Module):
    """A copy of a model on the CPU, as one module: `pixels` in (uint8), `embeddings` and perhaps `scores` out.

    Without `pixels` it takes `images`, which are scaled and standardised already. With `anchors` it also returns
    what `Model.scores` says of the embeddings. `batch` fixes the number of pictures.
    """

    weight: Tensor
    bias: Tensor
    anchors: Tensor
    expected: Tensor

    def __init__(self, model: Model, *, pixels: bool = True, anchors: bool = False, batch: int | None = None) -> None:
        super().__init__()
        if batch is not None and batch < 1:
            raise ConfigError(f"batch must be None (any number of pictures) or at least 1; found {batch}.")
        if anchors and model.anchors is None and model.classifier is None:
            raise ConfigError("anchors=True needs a model with anchors or a classifier; this one has neither.")
        self.encoder = deepcopy(model.encoder).cpu().eval().requires_grad_(False)
        self.preprocessing = model.preprocessing
        self.inputs = ("pixels",) if pixels else ("images",)
        self.outputs = ("embeddings", "scores") if anchors else ("embeddings",)
        self.batch = batch
        self.has_logits = anchors and model.classifier is not None and not model.posterior
        # Only buffers that are used, and none that are None: torch.export would count them wrongly.
        if self.has_logits and model.classifier is not None:
            for name, part in zip(("weight", "bias"), model.classifier, strict=True):
                self.register_buffer(name, part.cpu())
        elif anchors and model.anchors is not None:
            self.register_buffer("anchors", model.anchors.cpu())
        # What `Model.project` makes of the encoder's outputs.
        self.posterior, self.normalize = model.posterior, model.normalize
        if model.posterior and model.classifier is not None and model._anchors is not None:
            for name, part in zip(("weight", "bias"), model.classifier, strict=True):
                self.register_buffer(name, part.cpu())
            self.register_buffer("expected", model._anchors.cpu())
        self.about = self._about(model)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Embed a batch."""
        if self.inputs == ("pixels",):
            images = self.preprocessing.normalise(images)
        embeddings: Tensor = self.encoder(images, mirror=self.preprocessing.mirror)
        if self.posterior:
            embeddings = F.linear(embeddings, self.weight, self.bias).softmax(dim=1) @ self.expected
        if self.normalize:
            embeddings = F.normalize(embeddings, dim=1)
        return (embeddings, self._scores(embeddings)) if len(self.outputs) == 2 else (embeddings,)

    def draw(self, count: int) -> Tensor:
        """Random pictures as it takes them, always the same."""
        size = self.preprocessing.size
        shape = (count, 3, *((_ANY_SIDE, _ANY_SIDE + 16 * count) if size is None else (size, size)))
        generator = torch.Generator().manual_seed(count)
        if self.inputs == ("pixels",):
            return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        return torch.randn(shape, generator=generator)

    def traced(self) -> ExportedProgram:
        """The program that torch makes of it."""
        sides = {2: Dim.AUTO, 3: Dim.AUTO} if self.preprocessing.size is None else {}
        count = {0: Dim("batch")} if self.batch is None else {}
        try:
            # Two pictures: torch takes a batch of one for a number that never changes.
            with quiet():
                return torch.export.export(self, (self.draw(self.batch or 2),), dynamic_shapes=({**count, **sides},))
        except Exception as error:  # torch raises errors of many kinds where it cannot trace a network
            hint = "" if self.batch is not None else "; batch=1 asks for less: a fixed number of pictures"
            raise ModelError(
                f"{self.encoder.name} cannot be traced by torch.export ({reason(error)}){hint}."
            ) from error

    def compare(self, run: Callable[[Tensor], Sequence[Tensor]], what: str) -> None:
        """Refuse an export whose `run` differs from the model by more than TOLERANCE, on random pictures."""
        for count in (1, 3) if self.batch is None else (self.batch,):
            images = self.draw(count)
            with torch.inference_mode():
                expected = self(images)
            for name, wanted, found in zip(self.outputs, expected, run(images), strict=True):
                if found.shape != wanted.shape:
                    raise ModelError(f"{what} gives {name} of shape {tuple(found.shape)}, not {tuple(wanted.shape)}.")
                scale = float(wanted.abs().max()) or 1.0
                apart = float((found - wanted).abs().max()) / scale
                if not apart <= TOLERANCE:  # a NaN is far, too
                    raise ModelError(
                        f"{what} would differ from the model: its {name} of {count} random pictures are {apart:.1e} of "
                        f"the largest value apart, more than {TOLERANCE:g}; nothing was written."
                    )

    def _scores(self, embeddings: Tensor) -> Tensor:
        if self.has_logits:
            return F.linear(embeddings, self.weight, self.bias)
        # By differences, as Model.scores; a part of the anchors at a time, since each costs batch x dim numbers.
        starts = range(0, len(self.anchors), _ANCHORS_AT_ONCE)
        parts = [embeddings[:, None] - self.anchors[start : start + _ANCHORS_AT_ONCE] for start in starts]
        return -torch.cat([torch.linalg.vector_norm(part, dim=2) for part in parts], dim=1)

    def _about(self, model: Model) -> dict[str, str]:
        """What someone must know who has the export alone: texts, and JSON where there is more than a text."""
        from kedge import __version__

        size = self.preprocessing.size
        sides = "H x W" if size is None else f"{size} x {size}"
        before = "RGB, upright; " + (
            "any size" if size is None else f"the centre square, resized to {sides} (bilinear, antialiased)"
        )
        values = "uint8, 0 to 255" if self.inputs == ("pixels",) else "float32, scaled and standardised"
        about = {
            "kedge": __version__,
            "fingerprint": model.fingerprint,
            "encoder": self.encoder.name,
            "loss": model.loss,
            "dim": str(model.dim),
            "classes": json.dumps(model.classes, ensure_ascii=False),
            "preprocessing": json.dumps(self.preprocessing.to_json()),
            self.inputs[0]: f"{self.batch or 'B'} x 3 x {sides}, {values}: {before}",
            "embeddings": f"{self.batch or 'B'} x {model.dim}, float32",
        }
        if len(self.outputs) == 2:
            meaning = "the classifier's logits" if self.has_logits else "minus the distance to each class's anchor"
            about["scores"] = (
                f"{self.batch or 'B'} x {len(model.classes)}, float32: {meaning}; the largest names the class"
            )
        return about


def export_program(
    model: Model, path: str | Path, *, pixels: bool = True, anchors: bool = False, batch: int | None = None
) -> Path:
    """Write the model as a `torch.export` program (`.pt2`), which runs without Kedge: `torch.export.load(path)`.

    Args:
        model: what is exported; it stays as it is.
        path: the file; one that is there is replaced.
        pixels: take uint8 pixels, B x 3 x H x W of the model's size, and scale, standardise and (if the model does)
            mirror them inside; otherwise take float images that went through `Preprocessing.normalise`.
        anchors: return a second output, `Model.scores`: minus the distance to each anchor, or the classifier's logits.
        batch: a fixed number of pictures; None for any.

    The program returns a tuple. Classes and preprocessing are in its extra file `kedge.json`. It is loaded and compared
    with the model on random pictures before it gets its name.
    """
    target = checked_target(path, ".pt2")
    network = Network(model, pixels=pixels, anchors=anchors, batch=batch)
    file = io.BytesIO()
    torch.export.save(network.traced(), file, extra_files={_ABOUT: json.dumps(network.about, ensure_ascii=False)})
    file.seek(0)
    loaded = torch.export.load(file).module()
    network.compare(lambda images: loaded(images), str(target))
    return write(target, file.getvalue())


def checked_target(path: str | Path, suffix: str) -> Path:
    """The file that is to be written; its folder must be there."""
    target = Path(path).expanduser()
    if target.suffix.lower() != suffix:
        raise ConfigError(f"path must end in {suffix}; found {target}.")
    if target.is_dir() or not target.parent.is_dir():
        found = "it is a folder" if target.is_dir() else f"there is no folder {target.parent}"
        raise ConfigError(f"{target} cannot be written, {found}: choose another path.")
    return target


def write(target: Path, content: bytes) -> Path:
    """Write a file whole or not at all."""
    try:
        with atomic_write(target) as stream:
            stream.write(content)
    except OSError as error:
        raise KedgeError(f"{target} could not be written ({error.strerror or error}).") from error
    return target


@contextmanager
def quiet() -> Iterator[None]:
    """Without what exporters write about their own doings, and of graphs that they cannot finish."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"), redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)


def reason(error: Exception) -> str:
    """The first line of an error of somebody else's."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
