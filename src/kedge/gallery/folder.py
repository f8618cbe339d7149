"""What a gallery's folder says of itself, and how one comes into being."""

from __future__ import annotations

import json
import secrets
import shutil
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tokenize import TokenError
from typing import Any, Literal, get_args

import numpy as np

from kedge.errors import ConfigError, GalleryError
from kedge.gallery.checksums import CHECKSUM, json_checksum
from kedge.gallery.labels import stored_label
from kedge.gallery.place import Place
from kedge.gallery.precision import PRECISIONS, Precision
from kedge.gallery.record import Record
from kedge.model import Model

__all__ = [
    "About",
    "ListKind",
    "fetch_folder",
    "make_folder",
    "own_anchors",
    "read_about",
    "read_anchors",
    "taken",
]

ABOUT = "gallery.json"
FORMAT = 2
"""Since 2, checksums tell damaged bytes; see `checksums.py`."""
KIND = "kedge-gallery"
ListKind = Literal["label", "anchor"]


@dataclass(frozen=True)
class About:
    """What was chosen when a gallery was made."""

    dim: int
    lists: ListKind
    classes: Sequence[str]
    model: str | None
    """The fingerprint of the model that embeds its pictures."""
    precision: Precision = "float32"
    thumbnails: int = 0
    """The longer side of the small copies that it keeps; 0: it keeps none."""
    anchors: int | None = None
    """The CRC-32 of the file of anchors, in a gallery for vectors of one's own that came with some."""


def make_folder(place: Place, about: About, model: Model | None, learned: np.ndarray | None) -> None:
    """An empty gallery: the whole of it or, after a kill, nothing in its place."""
    path = place.folder
    if place.address is not None:
        # What is here was copied from an address that is there no more.
        shutil.rmtree(path, ignore_errors=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    making = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    making.mkdir()
    try:
        if model is not None:
            model.save(making / "model")
        elif learned is not None:
            np.save(making / "anchors.npy", learned)
            about = replace(about, anchors=zlib.crc32((making / "anchors.npy").read_bytes()))
        if place.address is None:
            Record.create(making, about.dim)
        written = {"kind": KIND, "format": FORMAT, **asdict(about)}
        written[CHECKSUM] = json_checksum(written)
        (making / ABOUT).write_text(json.dumps(written, indent=2, ensure_ascii=False), encoding="utf-8")
        making.rename(path)
    finally:
        shutil.rmtree(making, ignore_errors=True)
    if place.address is not None:
        Record.create(place, about.dim)
        place.begin_counting()
        names = sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())
        # The one that makes a gallery of it comes last.
        place.publish(*(name for name in names if name != ABOUT), ABOUT)


def fetch_folder(place: Place) -> None:
    """Copy what is at an address and not here yet: all but the record."""
    if place.address is None:
        return
    here = place.folder / ABOUT
    if not here.exists() or here.read_bytes() != place.read(ABOUT):
        place.fetch("model")
        place.fetch_file("anchors.npy")
        place.fetch_file(ABOUT)


def taken(place: Place) -> bool:
    """Whether something is in a gallery's place already."""
    if place.address is not None:
        return place.read(ABOUT) is not None
    return place.folder.exists() and (not place.folder.is_dir() or any(place.folder.iterdir()))


def read_about(place: Place) -> About:
    """What the folder of a gallery says of itself."""
    path = place.folder
    file = path / ABOUT
    if not path.exists() or (place.address is not None and not file.exists()):
        raise GalleryError(f"There is no gallery {place}: check the path, or make one with Gallery.create.")
    try:
        about: Any = json.loads(file.read_bytes())
    except FileNotFoundError as error:
        raise GalleryError(f"{place} is no gallery: it holds no {file.name}.") from error
    except (OSError, ValueError) as error:
        raise GalleryError(f"{file} is damaged: it cannot be read as JSON.") from error
    if not isinstance(about, dict) or about.get("kind") != KIND:
        raise GalleryError(f"{place} is no Kedge gallery.")
    written = about.get("format", 0)
    if isinstance(written, int) and written > FORMAT:
        raise GalleryError(f"{place} has format {written}, this Kedge reads up to {FORMAT}: upgrade Kedge.")
    # Galleries of format 1 have no checksum.
    if written != 1 and about.get(CHECKSUM) != json_checksum(about):
        raise GalleryError(f"{file} is damaged: it is not as it was written; bring it back from a backup.")
    try:
        found = About(**{name: value for name, value in about.items() if name not in ("kind", "format", CHECKSUM)})
        if found.precision not in PRECISIONS or found.lists not in get_args(ListKind) or not found.dim >= 1:
            raise ValueError(found)
    except (TypeError, ValueError) as error:
        raise GalleryError(f"{file} is damaged: it does not say what a gallery must.") from error
    return found


def read_anchors(path: Path, about: About) -> np.ndarray | None:
    """The anchors of a gallery without a model, if it was given any."""
    file = path / "anchors.npy"
    if about.anchors is None and not file.exists():
        return None
    try:
        if about.anchors is not None and zlib.crc32(file.read_bytes()) != about.anchors:
            raise ValueError("The checksum differs.")
        anchors: np.ndarray = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError, SyntaxError, TokenError) as error:
        raise GalleryError(f"{file} is damaged: it cannot be read.") from error
    return anchors


def own_anchors(
    anchors: np.ndarray | None, classes: Sequence[str] | None, dim: int | None
) -> tuple[np.ndarray | None, tuple[str, ...], int]:
    """Anchors, class names and dimension of a gallery for vectors of one's own."""
    if anchors is None:
        if dim is None or dim < 1:
            raise ConfigError("Give a model, anchors, or the dim of the vectors.")
        return None, tuple(classes or ()), dim
    matrix = np.asarray(anchors, dtype=np.float32)
    if matrix.ndim != 2 or 0 in matrix.shape or not np.isfinite(matrix).all():
        raise ConfigError(f"anchors must be a finite matrix, one row per class, found shape {matrix.shape}.")
    names = tuple(map(stored_label, classes)) if classes is not None else tuple(map(str, range(len(matrix))))
    if len(names) != len(matrix) or len(set(names)) < len(names) or None in names:
        raise ConfigError(f"classes must be {len(matrix)} different names, one per anchor.")
    return matrix, names, matrix.shape[1]
