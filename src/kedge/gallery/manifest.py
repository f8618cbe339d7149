"""`gallery.json`, the manifest of a gallery's folder, and how the folder is created."""

from __future__ import annotations

import json
import secrets
import shutil
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tokenize import TokenError
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from kedge.errors import ConfigError, GalleryError
from kedge.gallery.calibration import FILE as CALIBRATION
from kedge.gallery.location import Location, wrap_url_errors
from kedge.gallery.schema import check_label, seal_json, unseal_json
from kedge.gallery.table import Table
from kedge.io import Folder

if TYPE_CHECKING:
    from kedge.model import Model

__all__ = [
    "ListKind",
    "Manifest",
    "create_folder",
    "is_taken",
    "open_folder",
    "open_model",
    "open_table",
    "read_manifest",
]

FILE = "gallery.json"
FORMAT = 3
"""Since 2, checksums tell damaged bytes (see `integrity.py`); since 3, features and perceptual hashes are kept."""
KIND = "kedge-gallery"
_ANCHORS = "anchors.npy"
ListKind = Literal["label", "anchor"]


@dataclass(frozen=True)
class Manifest:
    """What was chosen when a gallery was created."""

    dim: int
    lists: ListKind
    classes: Sequence[str]
    model: str | None
    """The fingerprint of the model that embeds its images."""
    thumbnails: int = 0
    """The longer side of its thumbnails in pixels; 0: it keeps none."""
    anchors: int | None = None
    """The CRC-32 of the file of anchors, in a gallery of external embeddings that came with some."""
    precision: str = "float32"
    """Of the lists that earlier releases wrote; such lists are rebuilt."""
    features: int = 0
    """The size of the features that it keeps beside its embeddings; 0: it keeps none."""
    format: int = FORMAT

    def __post_init__(self) -> None:
        if self.lists not in get_args(ListKind):
            raise ConfigError(f"lists must be one of {', '.join(get_args(ListKind))}, found {self.lists!r}.")
        if not 0 <= self.thumbnails <= 1024:
            raise ConfigError(f"thumbnails must lie between 0 and 1024 pixels, found {self.thumbnails}.")
        if self.dim < 1:
            raise ConfigError(f"dim must be at least 1, found {self.dim}.")
        if self.features < 0:
            raise ConfigError(f"features must be at least 0, found {self.features}.")


def create_folder(
    location: Location,
    model: Model | None,
    anchors: np.ndarray | None,
    classes: Sequence[str] | None,
    dim: int | None,
    lists: ListKind,
    thumbnails: int,
) -> tuple[Manifest, np.ndarray | None]:
    """An empty gallery, the whole of it or, after a kill, nothing in its place; its manifest and learned anchors."""
    if model is None:
        learned, names, dim = _check_anchors(anchors, classes, dim)
    elif anchors is not None or classes is not None or dim is not None:
        raise ConfigError("A model has its own anchors, classes and dim; pass only the model.")
    else:
        learned, names, dim = _learned_anchors(model), tuple(model.classes), model.dim
    manifest = Manifest(dim, lists, names, None if model is None else model.fingerprint, thumbnails)
    if model is not None and model.has_features:
        manifest = replace(manifest, features=model.width)
    if is_taken(location):
        raise GalleryError(f"{location} already exists; open it with Gallery.open, or choose another path.")
    folder = location.folder
    if location.url is not None:
        # What is here is the cache of a gallery that is there no more.
        shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.part")
    part.mkdir()
    try:
        if model is not None:
            model.save(part / "model")
        elif learned is not None:
            np.save(part / _ANCHORS, learned)
            manifest = replace(manifest, anchors=zlib.crc32((part / _ANCHORS).read_bytes()))
        if location.url is None:
            Table.create(part, dim, manifest.features)
        (part / FILE).write_bytes(seal_json({"kind": KIND, **asdict(manifest)}, indent=2))
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    if location.url is not None:
        Table.create(location, dim, manifest.features)
        location.create_counter()
        files = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
        # The manifest, which makes a gallery of it, comes last.
        location.upload(*(name for name in files if name != FILE), FILE)
    return manifest, learned


def open_folder(path: str | Path) -> tuple[Location, Manifest]:
    """Where an existing gallery is, and its manifest."""
    location = Location.of(path)
    with wrap_url_errors(location):
        _download_folder(location)
    return location, read_manifest(location)


def open_table(path: str | Path) -> Table:
    """The table of an existing gallery alone, for what needs neither its model nor torch."""
    location, manifest = open_folder(path)
    return Table(location, manifest.dim)


def _download_folder(location: Location) -> None:
    """Copy what is at the URL into the folder, but for the table."""
    if location.url is None:
        return
    local = location.folder / FILE
    if not local.exists() or local.read_bytes() != location.read(FILE):
        model = [f"model/{name}" for name in Folder(location.url).names("model")]
        location.download(*model, _ANCHORS, FILE)
    location.download(CALIBRATION)


def is_taken(location: Location) -> bool:
    """Whether something is in a gallery's place already."""
    if location.url is not None:
        return location.read(FILE) is not None
    folder = location.folder
    return folder.exists() and (not folder.is_dir() or any(folder.iterdir()))


def read_manifest(location: Location) -> Manifest:
    """The manifest of a gallery."""
    file = location.folder / FILE
    if not location.folder.exists() or (location.url is not None and not file.exists()):
        raise GalleryError(f"Gallery '{location}' does not exist; create it with kedge index or Gallery.create.")
    try:
        content = file.read_bytes()
        stated = json.loads(content)
    except FileNotFoundError as error:
        raise GalleryError(f"{location} is not a gallery: it has no {file.name}.") from error
    except (OSError, ValueError) as error:
        raise GalleryError(f"{file} is damaged: it cannot be read as JSON.") from error
    if not isinstance(stated, dict) or stated.get("kind") != KIND:
        raise GalleryError(f"{location} is not a Kedge gallery.")
    written = stated.get("format", 0)
    if isinstance(written, int) and written > FORMAT:
        raise GalleryError(
            f"Gallery '{location}' has format {written}, and this Kedge reads up to {FORMAT}; upgrade Kedge."
        )
    try:
        # Galleries of format 1 have no checksum.
        values = unseal_json(content, optional=written == 1)
        return Manifest(**{name: value for name, value in values.items() if name != "kind"})
    except (TypeError, ValueError, ConfigError) as error:
        raise GalleryError(f"{file} is damaged: its checksum differs; restore it from a backup.") from error


def open_model(location: Location, manifest: Manifest, model: Model | None) -> tuple[Model | None, np.ndarray | None]:
    """The model of a gallery, which is loaded unless it is in memory already, and its learned anchors, if any."""
    if manifest.model is None:
        if model is not None:
            raise ConfigError(f"Gallery '{location}' has no model; open it without one.")
        return None, _read_anchors(location, manifest)
    made_with = f"Gallery '{location}' was created with model {manifest.model}"
    if model is not None and model.fingerprint != manifest.model:
        raise ConfigError(f"{made_with}, found {model.fingerprint}; open it without naming one.")
    from kedge.model import Model

    model = model or Model.load(location.folder / "model", lazy=True)
    if model.fingerprint != manifest.model:
        raise GalleryError(f"{made_with}, but holds {model.fingerprint}; restore its model folder from a backup.")
    if list(model.classes) != list(manifest.classes):
        raise GalleryError(
            f"Gallery '{location}' and its model have different classes; restore its folder from a backup."
        )
    return model, _learned_anchors(model)


def _learned_anchors(model: Model) -> np.ndarray:
    """The anchors of a model; no rows where it was not trained."""
    return np.zeros((0, model.dim), np.float32) if model.anchors is None else model.anchors.cpu().numpy()


def _read_anchors(location: Location, manifest: Manifest) -> np.ndarray | None:
    """The anchors of a gallery without a model, if it was created with any."""
    file = location.folder / _ANCHORS
    if manifest.anchors is None and not file.exists():
        return None
    try:
        if manifest.anchors is not None and zlib.crc32(file.read_bytes()) != manifest.anchors:
            raise ValueError("The checksum differs.")
        anchors: np.ndarray = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError, SyntaxError, TokenError) as error:
        raise GalleryError(f"{file} is damaged: it cannot be read.") from error
    return anchors


def _check_anchors(
    anchors: np.ndarray | None, classes: Sequence[str] | None, dim: int | None
) -> tuple[np.ndarray | None, tuple[str, ...], int]:
    """Anchors, class names and dimension of a gallery of external embeddings."""
    if anchors is None:
        if dim is None or dim < 1:
            raise ConfigError("Pass a model, anchors, or the dim of the vectors.")
        return None, tuple(classes or ()), dim
    matrix = np.asarray(anchors, dtype=np.float32)
    if matrix.ndim != 2 or 0 in matrix.shape or not np.isfinite(matrix).all():
        raise ConfigError(f"anchors must be a finite matrix, one row per class, found shape {matrix.shape}.")
    names = tuple(map(check_label, classes)) if classes is not None else tuple(map(str, range(len(matrix))))
    if len(names) != len(matrix) or len(set(names)) < len(names):
        raise ConfigError(f"classes must be {len(matrix)} different names, one per anchor.")
    return matrix, names, matrix.shape[1]
