"""A model's folder on disk: ``model.json`` says what it is, ``weights.safetensors`` holds the tensors.

Nothing in it is code, so nothing is executed when a folder is opened. A save is all or nothing: the new
folder is written beside the old one and then takes its name.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from math import prod
from pathlib import Path
from typing import Any, Self

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.overrides import TorchFunctionMode

from kedge.encoders import Encoder
from kedge.encoders.heads import build_head
from kedge.encoders.pretrained import misfits
from kedge.errors import ModelError
from kedge.io import atomic_write

__all__ = [
    "StoredEncoder",
    "check_shapes",
    "is_model",
    "kedge_version",
    "read_description",
    "read_weights",
    "wrap_misfits",
    "write_folder",
]

FORMAT = 2
"""2: the description may say `posterior` or `normalize`, which an older reader would not apply."""
KIND = "kedge-model"
DESCRIPTION = "model.json"
WEIGHTS = "weights.safetensors"

Shapes = Mapping[str, tuple[int, ...]]

_SPARE_TENSORS, _SPARE_NUMBERS = 1000, 2**24
"""Beyond twice what the file holds: classifiers and poolers that are built and cut off."""


def write_folder(path: str | Path, description: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write a model folder; an earlier model of that name is replaced, or left as it was if writing fails."""
    target = Path(path).expanduser().resolve()
    _check_replaceable(target)
    weights = safetensors.torch.save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()})
    head = {"kind": KIND, "format": FORMAT, "kedge": kedge_version()}
    file = {"file": WEIGHTS, "bytes": len(weights), "sha256": hashlib.sha256(weights).hexdigest()}
    text = json.dumps({**head, **description, "weights": file}, indent=2, ensure_ascii=False) + "\n"
    staging = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.saving")
    try:
        staging.mkdir(parents=True)
        for name, content in ((WEIGHTS, weights), (DESCRIPTION, text.encode())):
            with atomic_write(staging / name) as stream:
                stream.write(content)
        _sync_folder(staging)
        _rename_over(staging, target)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        reason = "the disk is full: make room and save again" if full else f"{error.strerror or error}"
        raise ModelError(f"model {target} could not be saved, {reason}.") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def read_description(path: str | Path) -> tuple[Path, dict[str, Any]]:
    """The folder of a model, which may be inside a run's, and what it says of itself."""
    path = Path(path).expanduser()
    for folder in (path, path / "model"):
        # A save that was killed between its two renames leaves the earlier model under its second name.
        for candidate in (folder, _previous(folder.absolute())):
            if (candidate / DESCRIPTION).is_file():
                return candidate, _read_description(candidate)
    if not path.exists():
        raise ModelError(f"Model folder {path} does not exist; check the path.")
    raise ModelError(
        f"{path} is not a Kedge model: it holds no {DESCRIPTION}; pass one left by Model.save or by a run."
    )


def is_model(folder: Path) -> bool:
    """Whether a folder has the description of a Kedge model."""
    try:
        _read_description(folder)
    except ModelError:
        return False
    return True


def _read_description(folder: Path) -> dict[str, Any]:
    file = folder / DESCRIPTION
    try:
        description = json.loads(_read(file))
    except (ValueError, RecursionError) as error:
        raise _damaged(file, ", it is not valid JSON") from error
    if not isinstance(description, dict) or description.get("kind") != KIND:
        raise ModelError(f"{folder} is not a Kedge model: its {DESCRIPTION} does not say kind {KIND!r}.")
    if not isinstance(description.get("format"), int):
        raise _damaged(file, ", it names no format version")
    return description


def read_weights(folder: Path, description: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of a model of a format that is known, compared with the checksum in its description."""
    version, file = description["format"], folder / WEIGHTS
    if version > FORMAT:
        raise ModelError(
            f"model {folder} has format version {version} (written by kedge {description.get('kedge', 'unknown')}); "
            f"this kedge reads versions up to {FORMAT}: upgrade kedge."
        )
    if not file.exists():
        raise ModelError(f"model {folder} lacks its {WEIGHTS}: save or copy the model again.")
    weights, saved = _read(file), description.get("weights")
    if not isinstance(saved, dict) or hashlib.sha256(weights).hexdigest() != saved.get("sha256"):
        raise _damaged(file, ", it differs from what was saved")
    try:
        return safetensors.torch.load(weights)
    except (safetensors.SafetensorError, ValueError, KeyError) as error:
        raise _damaged(file, f" ({error})") from error


@contextmanager
def wrap_misfits(path: str | Path) -> Iterator[None]:
    """A ModelError where the parts of the model at `path` do not fit together."""
    try:
        yield
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ModelError(f"model {path} cannot be opened, its parts do not fit together: {reason}") from error


class StoredEncoder:
    """The encoder of a model's folder before its network is built: what can be known and done without that.

    Networks take seconds to import and build, which cached features need not wait for.
    """

    training = False

    def __init__(self, path: str | Path, spec: Mapping[str, Any], width: int, state: dict[str, Tensor]) -> None:
        self.path, self.spec, self.width = path, dict(spec), width
        self.name: str = spec["name"]
        self.dim: int = spec["dim"]
        self.text_source: str | None = None
        self.device = torch.device("cpu")
        self._state = state
        own = {name.removeprefix("head."): tensor for name, tensor in state.items() if name.startswith("head.")}
        with torch.device("meta"), _bounded({name: tuple(tensor.shape) for name, tensor in own.items()}):
            self.head = build_head(spec["head"], width, self.dim).eval()
        self.head.load_state_dict(own, assign=True)

    def state_dict(self) -> dict[str, Tensor]:
        """The tensors of the whole encoder."""
        return self._state

    def to(self, device: torch.device) -> Self:
        """Move the head; the network will be built there."""
        self.device = device
        self.head.to(device)
        return self

    def build(self) -> Encoder:
        """The encoder itself, evaluating."""
        # Inference tensors could not be changed, or be told apart by their versions.
        with wrap_misfits(self.path), torch.inference_mode(False):
            encoder = build_stored(self.spec, self._state)
        encoder.text_source = self.text_source
        return encoder.to(self.device)


def build_stored(spec: Mapping[str, Any], state: Mapping[str, Tensor]) -> Encoder:
    """The encoder of a spec and its tensors, evaluating."""
    check_shapes(spec, {name: tuple(tensor.shape) for name, tensor in state.items()})
    encoder = Encoder.from_spec(spec)
    encoder.load_state_dict(state)
    return encoder.eval()


def check_shapes(spec: Mapping[str, Any], shapes: Shapes) -> None:
    """Raise a ValueError unless `shapes`, by their names in the encoder, are those of the encoder in `spec`.

    A few bytes of `model.json` can describe a network of any size, so it is built on torch's meta device, where tensors
    have shapes and no numbers, and only as far as the file with the weights has tensors to fill it.
    """
    with torch.device("meta"), _WithoutNormal(), _bounded(shapes):
        expected = {name: tuple(tensor.shape) for name, tensor in Encoder.from_spec(spec).state_dict().items()}
    if problems := misfits(expected, shapes):
        raise ValueError(f"its weights file {problems}")


class _WithoutNormal(TorchFunctionMode):
    """Inside the block no normal numbers are drawn: on the meta device, that imports torch's compiler."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func in (nn.init.normal_, Tensor.normal_):
            return (*args, *(kwargs or {}).values())[0]
        return func(*args, **(kwargs or {}))


@contextmanager
def _bounded(shapes: Shapes) -> Iterator[None]:
    """Stop building a network that has far more tensors, or larger ones, than there are weights for."""
    tensors = 2 * len(shapes) + _SPARE_TENSORS
    numbers = 2 * sum(prod(shape) for shape in shapes.values()) + _SPARE_NUMBERS
    thread = threading.get_ident()

    def count(network: nn.Module, name: str, tensor: Tensor | None) -> None:
        nonlocal tensors, numbers
        del network, name
        if tensor is None or threading.get_ident() != thread:
            return
        tensors -= 1
        numbers -= tensor.numel()
        if tensors < 0 or numbers < 0:
            raise ValueError("its description is of a far larger network than its weights are")

    handles = [
        hooks.register_module_parameter_registration_hook(count),
        hooks.register_module_buffer_registration_hook(count),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ModelError(f"{file} cannot be read ({error.strerror or error}).") from error


def _damaged(file: Path, reason: str) -> ModelError:
    return ModelError(f"{file} is damaged{reason}: save or copy the model again.")


def _check_replaceable(target: Path) -> None:
    if target.exists() and not target.is_dir():
        raise ModelError(f"model {target} cannot be saved there, since it is a file; choose another path.")
    names = {file.name for file in target.iterdir() if file.name[0] != "."} if target.exists() else set()
    if foreign := names - {DESCRIPTION, WEIGHTS}:
        raise ModelError(
            f"{target} holds other files than a Kedge model ({min(foreign)}): choose another path, "
            "since saving replaces the whole folder."
        )
    if names and not is_model(target):
        raise ModelError(f"model cannot be saved over {target}, which is not a Kedge model; choose another path.")


def _rename_over(staging: Path, target: Path) -> None:
    previous = _previous(target)
    if target.exists():
        shutil.rmtree(previous, ignore_errors=True)
        target.rename(previous)
    try:
        staging.rename(target)
    except OSError:
        if previous.exists():
            previous.rename(target)
        raise
    _sync_folder(target.parent)
    shutil.rmtree(previous, ignore_errors=True)


def _previous(target: Path) -> Path:
    return target.parent / f".{target.name}.previous"


def _sync_folder(folder: Path) -> None:
    if os.name != "posix":  # elsewhere folders cannot be opened, and renames need no sync
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def kedge_version() -> str:
    """That of the installed package."""
    try:
        return metadata.version("kedge")
    except metadata.PackageNotFoundError:
        return "unknown"
