"""Published weights: where the files of torchvision, timm and Hugging Face are, on this machine or on the network."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torchvision.models import get_model_weights

from kedge.encoders import huggingface
from kedge.encoders.backbones import TIMM, check_name, import_timm, timm_model
from kedge.encoders.huggingface import HF
from kedge.encoders.network import CONNECT_SECONDS, reach
from kedge.errors import WeightsError

__all__ = ["DEFAULT", "fetch_weights", "published_settings"]

DEFAULT = ("default", "imagenet")
STALL_SECONDS = 30.0


@dataclass(frozen=True)
class _HubFile:
    """A file of torchvision's, kept in the cache of torch.hub."""

    url: str

    @property
    def path(self) -> Path:
        return Path(torch.hub.get_dir()) / "checkpoints" / self.url.rsplit("/", 1)[-1]

    def cached(self) -> Path | None:
        return self.path if self.path.is_file() else None

    def download(self, *, progress: bool) -> Path:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        found = re.search(r"-([0-9a-f]{8,})\.", self.path.name)
        digest = found.group(1) if found else None
        with _socket_timeout(STALL_SECONDS):
            torch.hub.download_url_to_file(self.url, str(self.path), digest, progress=progress)
        return self.path


@dataclass(frozen=True)
class _HuggingFaceFile:
    """A file of timm's, kept in the cache of the Hugging Face hub."""

    repository: str
    file: str

    @property
    def url(self) -> str:
        from huggingface_hub import hf_hub_url

        return hf_hub_url(self.repository, self.file)

    def cached(self) -> Path | None:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(self.repository, self.file)
        return Path(found) if isinstance(found, str) else None

    def download(self, *, progress: bool) -> Path:  # noqa: ARG002 - the hub decides about its own bars
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(self.repository, self.file))


def fetch_weights(
    name: str, weights: str = "default", *, timeout: float = CONNECT_SECONDS, progress: bool = True
) -> Path:
    """The file (of ``hf:`` models the folder) with encoder ``name``'s weights, downloaded and verified if need be.

    Where no server answers within ``timeout`` seconds, a ``WeightsError`` says so.
    """
    if name.startswith(HF):
        check_name(name)
        if weights.lower() not in DEFAULT:
            raise _unknown(name, weights, DEFAULT)
        return huggingface.fetch_folder(name, timeout=timeout)
    source = _published(name, weights)
    cached = source.cached()
    if cached is not None:
        return cached
    try:
        reach(source.url, timeout)
        return source.download(progress=progress)
    except Exception as error:  # the network and the hubs raise errors of many kinds; all mean the same here
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise WeightsError(
            f"the {weights} weights of encoder {name} could not be fetched from {source.url} ({reason}): "
            "fetch that file elsewhere and pass encoder.weights=FILE, "
            "or pass encoder.weights=null to train from scratch."
        ) from error


def published_settings(name: str) -> dict[str, Any]:
    """What the published weights of encoder ``name`` were trained with, as far as it says so.

    ``mean``, ``std``, ``input_size`` and ``interpolation``, as timm calls them.
    """
    check_name(name)
    if name.startswith(HF):
        return huggingface.published_settings(name)
    if not name.startswith(TIMM):
        return {}
    found = import_timm().models.get_pretrained_cfg(timm_model(name))
    return {} if found is None else dict(found.to_dict())


def _published(name: str, weights: str) -> _HubFile | _HuggingFaceFile:
    """Where the weights called ``weights`` are published."""
    check_name(name)
    if name.startswith(TIMM):
        settings = import_timm().models.get_pretrained_cfg(timm_model(name))
        if weights.lower() not in DEFAULT:
            raise _unknown(name, weights, DEFAULT)
        if settings is None or not settings.hf_hub_id:
            raise _unpublished(name)
        return _HuggingFaceFile(settings.hf_hub_id, settings.hf_hub_filename or "model.safetensors")
    if name == "resnet10":
        raise _unpublished(name)
    published = get_model_weights(name)
    wanted = "DEFAULT" if weights.lower() in DEFAULT else weights.upper()
    if wanted not in published.__members__:
        raise _unknown(name, weights, (*DEFAULT, *(each.name for each in published)))
    return _HubFile(published[wanted].url)


def _unpublished(name: str) -> WeightsError:
    return WeightsError(
        f"encoder {name} has no published weights: pass encoder.weights=FILE, "
        "or encoder.weights=null to train from scratch."
    )


def _unknown(name: str, weights: str, valid: tuple[str, ...]) -> WeightsError:
    return WeightsError(
        f"encoder.weights {weights!r} is neither a file nor one of {', '.join(valid)} for encoder {name}."
    )


@contextmanager
def _socket_timeout(seconds: float) -> Iterator[None]:
    """Downloads of torch.hub have no timeout of their own: without this one a stalled server hangs them."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
