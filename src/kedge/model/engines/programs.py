"""Ways that are programs: a child process makes a file of the encoder, this process loads it.

Tracing changes every module of the process for a while and a compiler may take a minute, fail or crash; in a child,
threads that embed meanwhile notice nothing of it, and whoever leaves can end it.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kedge.encoders import Encoder

__all__ = ["compiled_program", "make", "onnx_program"]

_PATIENCE = 600.0
"""Seconds that a child may take."""
_ORDER, _PROGRAM = "order.pt", "program"
_OPSET = 18


def onnx_program(encoder: Encoder, images: Tensor, *, mirror: bool) -> Callable[[Tensor], Tensor]:
    """The encoder in an onnxruntime session, with as many threads as torch has."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    with _made("onnx", encoder, images, mirror) as file:
        session = onnxruntime.InferenceSession(file.read_bytes(), options, providers=["CPUExecutionProvider"])

    def way(images: Tensor) -> Tensor:
        return torch.from_numpy(session.run(None, {"images": images.contiguous().numpy()})[0])

    return way


def compiled_program(encoder: Encoder, images: Tensor, *, mirror: bool) -> Callable[[Tensor], Tensor]:
    """The encoder as torch's compiler makes it with its weights frozen."""
    with _made("compiled", encoder, images, mirror) as file, _without("torch.utils.cpp_extension"):
        program: Any = torch._inductor.aoti_load_package(str(file))

    def way(images: Tensor) -> Tensor:
        found: Tensor = program(images.contiguous())
        return found

    return way


@contextmanager
def _without(logger: str) -> Iterator[None]:
    """No warnings of this one: it misses a GPU that nobody asked for."""
    found = logging.getLogger(logger)
    before = found.level
    found.setLevel(logging.ERROR)
    try:
        yield
    finally:
        found.setLevel(before)


@contextmanager
def _made(kind: str, encoder: Encoder, images: Tensor, mirror: bool) -> Iterator[Path]:
    """The file that a child makes; it is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="kedge-engine-") as scratch:
        # Tensors and plain values only: the child reads no pickled objects.
        order: dict[str, Any] = {"kind": kind, "spec": json.dumps(encoder.spec), "state": dict(encoder.state_dict())}
        order |= {"images": images[:2].clone(), "mirror": mirror, "threads": torch.get_num_threads()}
        torch.save(order, Path(scratch, _ORDER))
        search = os.pathsep.join(part for part in sys.path if part)
        with Path(scratch, "said").open("w+b") as said:
            child = subprocess.Popen(
                [sys.executable, "-P", "-c", f"from {__name__} import make; make({scratch!r})"],
                env={**os.environ, "PYTHONPATH": search, "CUDA_VISIBLE_DEVICES": ""},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
            )
            _wait(child)
            if child.returncode:
                said.seek(0)
                lines = said.read().decode(errors="replace").strip().splitlines()
                raise RuntimeError(lines[-1] if lines else f"the child ended with {child.returncode}")
        yield Path(scratch, _name(kind))


def _wait(child: subprocess.Popen[bytes]) -> None:
    """Until it ends; it is ended when its time is over, or when this process wants to leave."""
    deadline = time.monotonic() + _PATIENCE
    try:
        while child.poll() is None and time.monotonic() < deadline and threading.main_thread().is_alive():
            time.sleep(0.05)
    finally:
        if child.poll() is None:
            child.kill()
        child.wait()


def _name(kind: str) -> str:
    return _PROGRAM + (".onnx" if kind == "onnx" else ".pt2")


# ---------------------------------------------------------------------- in the child


class _Network(nn.Module):
    """Images in, embeddings out."""

    def __init__(self, encoder: nn.Module, mirror: bool) -> None:
        super().__init__()
        self.encoder, self.mirror = encoder, mirror

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.encoder(images, mirror=self.mirror)
        return found


def make(folder: str) -> None:
    """Make the program that the order in this folder asks for."""
    scratch = Path(folder)
    order = torch.load(scratch / _ORDER, weights_only=True)
    torch.set_num_threads(order["threads"])
    encoder = Encoder.from_spec(json.loads(order["spec"]))
    encoder.load_state_dict(order["state"])
    network, images = _Network(encoder, order["mirror"]).eval().requires_grad_(False), order["images"]
    # Torch takes a batch of one for a number that never changes: so it is, and two stand for any.
    shapes = None if len(images) == 1 else ({0: torch.export.Dim("batch")},)
    with torch.no_grad():
        program = torch.export.export(network, (images,), dynamic_shapes=shapes)
        file = str(scratch / _name(order["kind"]))
        if order["kind"] == "onnx":
            torch.onnx.export(
                program,
                (),
                file,
                dynamo=True,
                input_names=["images"],
                output_names=["embeddings"],
                opset_version=_OPSET,
                external_data=False,
            )
        else:
            torch._inductor.aoti_compile_and_package(program, package_path=file, inductor_configs={"freezing": True})
