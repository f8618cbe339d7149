"""Vectors between a gallery and a file: rows in batches, and the manifest that makes the same gallery of them again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kedge.errors import ConfigError, DataError, KedgeError, first_line
from kedge.gallery.manifest import ListKind
from kedge.io import is_url

__all__ = ["BATCH", "LIST", "VECTOR", "Manifest", "Rows", "choose_column", "local_path", "read_errors"]

FORMAT, KIND = 1, "kedge-vectors"
VECTOR = "embedding"
LIST = "kedge_list"
"""The column that says in which anchor's list an item sits."""
_USUAL_NAMES = {
    "vectors": (VECTOR, "embeddings", "vector", "vectors", "X", "x"),
    "labels": ("label", "labels", "y"),
    "paths": ("path", "paths"),
}
BATCH = 8192
_BATCH_BYTES = 64 << 20


@dataclass(frozen=True)
class Manifest:
    """Everything but the rows of one version of a gallery."""

    dim: int
    lists: ListKind
    classes: tuple[str, ...]
    model: str | None
    """The fingerprint of the model that embeds its images."""
    precision: str
    """Of the lists, in files of earlier releases; now always float32."""
    thumbnails: int
    calibration: dict[str, Any] | None
    next_id: int
    learned: int
    """How many of the anchors were learned; the others follow the items."""
    names: tuple[str | None, ...]
    """The label of each anchor."""
    anchors: np.ndarray

    def to_json(self) -> str:
        """All but the anchors, as JSON."""
        values = {name: value for name, value in vars(self).items() if name != "anchors"}
        return json.dumps({"kind": KIND, "format": FORMAT, **values}, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str | bytes, anchors: np.ndarray, source: Path) -> Manifest:
        """What :meth:`to_json` wrote, and the anchors; DataError where they do not fit."""
        try:
            content = json.loads(text)
            kind, version = content.pop("kind"), int(content.pop("format"))
            if version > FORMAT:
                raise DataError(f"{source} has format {version}, this Kedge reads up to {FORMAT}: upgrade Kedge.")
            content |= {"classes": tuple(content["classes"]), "names": tuple(content["names"])}
            matrix = np.ascontiguousarray(anchors, np.float32).reshape(-1, int(content["dim"]))
            manifest = cls(**content, anchors=matrix)
            fits = (
                kind == KIND
                and manifest.lists in get_args(ListKind)
                and 0 <= manifest.learned <= len(manifest.names) == len(matrix)
                and (not manifest.learned or manifest.names[: manifest.learned] == manifest.classes)
                and np.isfinite(matrix).all()
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{source} is damaged: its description is incomplete.") from error
        if not fits:
            raise DataError(f"{source} is damaged: its anchors do not fit the names of its classes.")
        return manifest


@dataclass(frozen=True)
class Rows:
    """The rows of a file or of a gallery, which can be read several times."""

    source: Path
    schema: pa.Schema
    count: int
    read: Callable[[], Iterable[pa.RecordBatch]]

    @classmethod
    def of_table(cls, source: Path, table: pa.Table) -> Rows:
        """Rows that are in memory, or mapped there."""
        return cls(source, table.schema, len(table), lambda: table.to_batches(max_chunksize=BATCH))

    def batches(self) -> Iterator[pa.RecordBatch]:
        """All rows, in batches of some dozen MiB, however small the parts are in which they are stored."""
        pending: list[pa.RecordBatch] = []
        with read_errors(self.source):
            for batch in filter(len, self.read()):
                pending.append(batch)
                if sum(part.nbytes for part in pending) >= _BATCH_BYTES:
                    yield from pa.Table.from_batches(pending).combine_chunks().to_batches()
                    pending = []
        if pending:
            yield from pa.Table.from_batches(pending).combine_chunks().to_batches()

    def dim(self) -> int:
        """How many numbers the first vector has."""
        with read_errors(self.source):
            first = next(filter(len, self.read()))
            return int(pc.list_value_length(first.column(VECTOR))[0].as_py() or 0)

    def matrices(self, dim: int) -> Iterator[tuple[pa.RecordBatch, np.ndarray]]:
        """Each batch, and its vectors as float32."""
        first = 0
        for batch in self.batches():
            column = batch.column(VECTOR)
            lengths = np.asarray(pc.list_value_length(column).fill_null(0))
            for row in np.flatnonzero(lengths != dim)[:1]:
                found = f"{lengths[row]} numbers instead of {dim}"
                raise DataError(f"The vector in row {first + row} of {self.source} has {found}.")
            flat = column.flatten().cast(pa.float32(), safe=False).fill_null(np.nan)
            vectors = np.asarray(flat).reshape(-1, dim)
            for row in np.flatnonzero(~np.isfinite(vectors).all(axis=1))[:1]:
                found = "NaN, infinity or nothing in place of a number"
                raise DataError(f"The vector in row {first + row} of {self.source} holds {found}.")
            yield batch, vectors
            first += len(batch)


@contextmanager
def read_errors(source: Path) -> Iterator[None]:
    """One sentence in place of what the libraries that read files raise, which are errors of many kinds."""
    try:
        yield
    except KedgeError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"File {source} does not exist; check the path.") from error
    except Exception as error:
        raise DataError(f"{source} cannot be read ({first_line(error)}): it is damaged, or of another kind.") from error


def local_path(name: str, path: str | Path) -> Path:
    """The path of this machine that the argument `name` must be."""
    if is_url(str(path)):
        raise ConfigError(f"{name} must be a path on this machine, found {path}; copy it first.")
    return Path(path).expanduser().absolute()


def choose_column(argument: str, name: str | None, fitting: Sequence[str], source: Path) -> str | None:
    """The column or array of `fitting` called `name`; without, one that is called as usual, if any.

    Of vectors the only one will do, and there must be one.
    """
    if name is not None and name not in fitting:
        listed = ", ".join(fitting)
        raise ConfigError(f"{argument}={name!r} is not a column of {argument} in {source}; choose one of {listed}.")
    chosen = name or next((usual for usual in _USUAL_NAMES[argument] if usual in fitting), None)
    if chosen is None and argument == "vectors":
        if len(fitting) == 1:
            return fitting[0]
        listed = f"{', '.join(fitting)}; choose one with vectors=" if fitting else "no column of vectors"
        raise ConfigError(f"{source} has {listed}.")
    return chosen
