"""Every error a user can meet: one sentence that says what was found and what to do."""

from __future__ import annotations

import warnings
from typing import Any

__all__ = [
    "ConfigError",
    "DataError",
    "DownloadError",
    "GalleryError",
    "ImageError",
    "KedgeError",
    "ModelError",
    "ServiceError",
    "TrainingError",
    "WeightsError",
    "first_line",
]


class KedgeError(Exception):
    """The root of all errors Kedge raises on purpose."""


class ConfigError(KedgeError, ValueError):
    """An argument or a configuration value that cannot be used."""


class DataError(KedgeError):
    """A dataset, a folder or an array that cannot be used."""


class ImageError(DataError):
    """One image that cannot be read."""


class DownloadError(KedgeError):
    """A file that could not be fetched, or arrived damaged."""


class WeightsError(KedgeError):
    """Pretrained weights that cannot be had or do not fit."""


class ModelError(KedgeError):
    """A model folder that is missing, damaged, foreign or too new."""


class GalleryError(KedgeError):
    """A gallery folder that is missing, damaged, foreign, too new or in use."""


class ServiceError(KedgeError):
    """A server that does not answer, or refuses."""


class TrainingError(KedgeError):
    """A training run that cannot go on."""


def first_line(error: BaseException) -> str:
    """The first line of what an error of a library says, or its kind: for a sentence of ours."""
    lines = (line.strip().rstrip(".:") for line in str(error).splitlines())
    return next((line for line in lines if line), type(error).__name__)


def __getattr__(name: str) -> Any:
    if name == "PictureError":  # the name in 0.1, accepted until the next release
        warnings.warn("kedge.errors.PictureError is now ImageError.", DeprecationWarning, stacklevel=2)
        return ImageError
    raise AttributeError(f"module 'kedge.errors' has no attribute {name!r}")
