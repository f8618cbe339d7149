"""Every error a user can meet: one sentence that says what was found and what to do."""

from __future__ import annotations

__all__ = [
    "ConfigError",
    "DataError",
    "DownloadError",
    "GalleryError",
    "KedgeError",
    "ModelError",
    "PictureError",
    "ServiceError",
    "TrainingError",
    "WeightsError",
]


class KedgeError(Exception):
    """The root of all errors Kedge raises on purpose."""


class ConfigError(KedgeError, ValueError):
    """An argument or a configuration value that cannot be used."""


class DataError(KedgeError):
    """A dataset, a folder or an array that cannot be used."""


class PictureError(DataError):
    """One picture that cannot be read."""


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
