"""Optional dependencies: one sentence where an extra is missing."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from kedge.errors import ConfigError

__all__ = ["missing_extra", "require"]


def require(module: str, *, extra: str, purpose: str) -> ModuleType:
    """Import an optional dependency, or say which extra of Kedge brings it.

    >>> require("kedge_no_such_module", extra="onnx", purpose="ONNX export")
    Traceback (most recent call last):
        ...
    kedge.errors.ConfigError: ONNX export needs kedge_no_such_module, which is not installed: pip install 'kedge[onnx]'.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise missing_extra(error.name or module, extra=extra, purpose=purpose) from error


def missing_extra(package: str, *, extra: str, purpose: str) -> ConfigError:
    """The error for an optional dependency that is not installed."""
    return ConfigError(f"{purpose} needs {package}, which is not installed: pip install 'kedge[{extra}]'.")
