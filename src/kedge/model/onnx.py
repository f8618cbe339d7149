"""The ONNX exporter: a network as the content of one `.onnx` file, for `export_onnx` and the onnxruntime engine."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from kedge.deps import require
from kedge.errors import ModelError, first_line

__all__ = ["export", "require_onnx", "trace"]

OPSET = 18


def require_onnx() -> None:
    """Refuse to go on without the packages of the extra `onnx`."""
    for package in ("onnx", "onnxscript", "onnxruntime"):
        require(package, extra="onnx", purpose="ONNX")


def trace(network: nn.Module, images: Tensor, dynamic: Mapping[int, Any], name: str) -> ExportedProgram:
    """The program that `torch.export` makes of a network; `dynamic` has the dimensions that may vary."""
    try:
        with _quiet(), torch.no_grad():
            return torch.export.export(network, (images,), dynamic_shapes=(dict(dynamic),))
    except Exception as error:  # torch raises errors of many kinds where it cannot trace a network
        hint = "; batch=1 asks for less: a fixed number of images" if 0 in dynamic else ""
        raise ModelError(f"{name} cannot be traced by torch.export ({first_line(error)}){hint}.") from error


def export(
    program: ExportedProgram, name: str, *, input: str, outputs: Sequence[str], metadata: Mapping[str, str]
) -> tuple[bytes, Callable[[Tensor], list[Tensor]]]:
    """The content of an `.onnx` file, weights and metadata included, and onnxruntime running it on the CPU."""
    require_onnx()
    import onnx
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    try:
        with _quiet():
            exported: Any = torch.onnx.export(
                program,
                dynamo=True,
                input_names=[input],
                output_names=outputs,
                opset_version=OPSET,
                external_data=False,
                verbose=False,
            )
        proto = exported.model_proto
        onnx.helper.set_model_props(proto, dict(metadata))
        content: bytes = proto.SerializeToString()
        onnx.checker.check_model(content, full_check=True)
        session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # what has no counterpart in ONNX, or more than the 2 GB that one file can hold
        raise ModelError(f"{name} cannot be written as ONNX ({first_line(error)}).") from error
    return content, lambda images: [
        torch.from_numpy(output) for output in session.run(None, {input: images.contiguous().numpy()})
    ]


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporters' progress reports and warnings."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"), redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)
