"""Settings and limits of a server."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path

from kedge.errors import ConfigError

__all__ = ["KEY_VARIABLE", "Settings", "read_key"]

KEY_VARIABLE = "KEDGE_KEY"
_MIN_KEY_LENGTH = 16


@dataclass(frozen=True)
class Settings:
    """How a server behaves; the limits hold for each request."""

    key: str | None = None
    """Bearer token that requests must carry; without one, everybody may read and nobody write."""
    writable: bool = False
    hosts: tuple[str, ...] = ()
    """Names by which the server is called, beside localhost, addresses and the machine's own name."""
    origins: tuple[str, ...] = ()
    """Other sites whose pages may call the API."""
    images: tuple[Path, ...] = ()
    """Folders of this machine whose image files may be shown, beside what the gallery itself keeps."""
    max_bytes: int = 20 * 2**20
    max_pixels: int = 50_000_000
    seconds: float = 30.0
    """A request that takes longer is answered with 503."""
    header_seconds: float = 10.0
    """A connection without a complete header by then is closed."""
    upload_seconds: float = 15.0
    """An upload that takes longer is cut off."""
    decode_seconds: float = 10.0
    """An image that takes longer to decode is refused, and its decoder process is killed."""
    connections: int = 1024
    """Open connections; beyond, the one that has taken longest over its request is closed."""
    connections_per_address: int = 512
    """The same for one address; a proxy in front of the server is one address."""
    upload_memory: int = 256 * 2**20
    """Bytes of uploads in flight; beyond, the upload that has stalled longest is cut off."""
    concurrency: int = 128
    """Requests in flight; excess requests get 429."""
    batch: int = 32
    """Images that go through the encoder at once; 1: each alone."""
    memory: int = 2**30
    """Bytes that the gallery may keep, beside what the system keeps of its files."""

    def __post_init__(self) -> None:
        limits = {field.name: getattr(self, field.name) for field in fields(self) if field.type in ("int", "float")}
        for name, limit in limits.items():
            if not limit > 0:
                raise ConfigError(f"{name} must be above 0, found {limit}.")
        if self.writable and not self.key:
            raise ConfigError(f"A writable server needs an API key; set {KEY_VARIABLE}, or pass --key-file.")
        key = self.key
        if key is not None and not (len(key) >= _MIN_KEY_LENGTH and key.isascii() and key.isprintable()):
            raise ConfigError(
                f"The API key must have at least {_MIN_KEY_LENGTH} characters, all of them printable ASCII."
            )


def read_key(file: Path | None) -> str | None:
    """The key in a file or, without one, in the environment; none if neither is given."""
    if file is None:
        return os.environ.get(KEY_VARIABLE, "").strip() or None
    try:
        return file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"The API key cannot be read from {file}: {reason}.") from error
