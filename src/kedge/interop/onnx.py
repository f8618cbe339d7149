"""ONNX: the encoder as a file that any runtime reads, with all that a user of it must know inside."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kedge.errors import ConfigError, ModelError
from kedge.interop.programs import Network, checked_target, quiet, reason, write
from kedge.model import Model

__all__ = ["export_onnx"]

OPSET = 18


def export_onnx(
    model: Model, path: str | Path, *, pixels: bool = True, anchors: bool = False, batch: int | None = None
) -> Path:
    """Write the model as ONNX: one file, for onnxruntime and whatever else reads ONNX.

    Args:
        model: what is exported; it stays as it is.
        path: the file, `.onnx`; one that is there is replaced.
        pixels: the input is `pixels`, uint8, B x 3 x H x W of the model's size, and they are scaled, standardised and
            (if the model does) mirrored inside; otherwise it is `images`, after `Preprocessing.normalise`.
        anchors: beside `embeddings` there is an output `scores`, as of `Model.scores`: minus the distance to each
            anchor, or the classifier's logits.
        batch: a fixed number of pictures; None for any.

    The file's metadata name the classes (JSON, in the order of the scores), the preprocessing, and what to do with a
    picture before. It passes ONNX's own checker and is run by onnxruntime beside the model, on random pictures, before
    it gets its name: outputs may differ by 1e-4 of the model's largest absolute value.
    """
    target = checked_target(path, ".onnx")
    onnx, runtime = _libraries()
    network = Network(model, pixels=pixels, anchors=anchors, batch=batch)
    content = _translated(network, onnx)
    try:
        onnx.checker.check_model(content, full_check=True)
        session = runtime.InferenceSession(content, providers=["CPUExecutionProvider"])
    except Exception as error:  # each of the two has errors of its own
        raise ModelError(f"{target} would be no good ONNX file ({reason(error)}); nothing was written.") from error

    def run(images: Tensor) -> list[Tensor]:
        return [torch.from_numpy(found) for found in session.run(None, {network.inputs[0]: images.numpy()})]

    network.compare(run, str(target))
    return write(target, content)


def _translated(network: Network, onnx: ModuleType) -> bytes:
    """The content of the file."""
    program = network.traced()
    try:
        with quiet():
            made: Any = torch.onnx.export(
                program,
                dynamo=True,
                input_names=network.inputs,
                output_names=network.outputs,
                opset_version=OPSET,
                external_data=False,
                verbose=False,
            )
        proto = made.model_proto
        onnx.helper.set_model_props(proto, network.about)
        content: bytes = proto.SerializeToString()
    except Exception as error:  # what has no counterpart in ONNX, or more than the 2 GB that one file can hold
        raise ModelError(f"{network.encoder.name} cannot be written as ONNX ({reason(error)}).") from error
    return content


def _libraries() -> tuple[ModuleType, ModuleType]:
    try:
        import onnx
        import onnxruntime
        import onnxscript  # noqa: F401  torch writes ONNX with it
    except ImportError as error:
        raise ConfigError(f"ONNX needs {error.name}, which is not installed: pip install 'kedge[onnx]'.") from error
    return onnx, onnxruntime
