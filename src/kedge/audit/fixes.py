"""`apply_fixes`: the findings that someone accepted, written back to the gallery in one commit."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from kedge.audit.report import CSV_COLUMNS, KINDS
from kedge.errors import ConfigError, first_line
from kedge.gallery import Gallery
from kedge.gallery.schema import CHECKSUM, check_label

__all__ = ["Fixes", "apply_fixes"]

_NEEDED = CSV_COLUMNS[: CSV_COLUMNS.index("path") + 1]


class Fixes(NamedTuple):
    """What was changed; `version` is the one before, for `Gallery.restore`."""

    relabelled: int
    removed: int
    version: int

    def __str__(self) -> str:
        if not self.relabelled + self.removed:
            return "nothing is accepted, nothing was changed"
        return f"{self.relabelled:,} relabelled, {self.removed:,} removed"


def apply_fixes(gallery: Gallery, path: str | Path) -> Fixes:
    """Fix what a CSV file of `Audit.to_csv` accepts: `yes` in its column `accept`.

    A wrong label becomes the suggested one; of the other kinds, the item is removed (the image file stays where it
    is). All in one commit: where a row does not fit the gallery, nothing changes. An item with a new label gets a new
    id, as an id stands for one content and label in all versions.
    """
    fixes = _accepted(Path(path))
    with gallery.writing() as table:
        version = table.version
        if not fixes:
            return Fixes(0, 0, version)
        where = f"id IN ({', '.join(map(str, fixes))})"
        names = [name for name in (*table.own_columns, *table.metadata_columns) if name != CHECKSUM]
        batches = list(table.batches(names, where))
        current = {row["id"]: row for batch in batches for row in batch.select(["id", "label", "path"]).to_pylist()}
        for id, fix in fixes.items():
            if id not in current:
                raise ConfigError(f"{path}, line {fix.line}: {gallery.location} has no item {id}; audit again.")
            if (current[id]["label"], current[id]["path"]) != (fix.label, fix.path):
                raise ConfigError(f"{path}, line {fix.line}: item {id} has changed since the audit; audit again.")
        relabelled = [id for id in current if fixes[id].new_label is not None]
        chosen = pa.Table.from_batches(batches).filter([fixes[id].new_label is not None for id in current])
        values: dict[str, Any] = {name: chosen[name].combine_chunks() for name in chosen.column_names}
        first = table.reserve_ids(len(relabelled))
        values["id"] = range(first, first + len(relabelled))
        values["label"] = [fixes[id].new_label for id in relabelled]
        table.replace(fixes, table.write(values) if relabelled else [])
    return Fixes(len(relabelled), len(fixes) - len(relabelled), version)


class _Fix(NamedTuple):
    line: int
    label: str | None
    path: str | None
    new_label: str | None
    """None where the item is removed."""


def _accepted(path: Path) -> dict[int, _Fix]:
    """The accepted rows by id; raises where one cannot be understood. An item that is removed needs no label."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            header = file.readline()
            file.seek(0)
            # Some spreadsheets write semicolons.
            reader = csv.DictReader(file, delimiter=";" if header.count(";") > header.count(",") else ",", strict=True)
            if missing := [name for name in _NEEDED if name not in (reader.fieldnames or ())]:
                raise ConfigError(f"{path} has no column {missing[0]!r}; pass a file that kedge audit --csv wrote.")
            rows = [(reader.line_num, row) for row in reader]
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}).") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path} is not a CSV file in UTF-8: {first_line(error)}.") from error
    fixes: dict[int, _Fix] = {}
    for line, row in rows:
        where, accept, new_label = f"{path}, line {line}", (row["accept"] or "").strip().lower(), None
        if accept not in ("yes", "no", ""):
            raise ConfigError(f"{where}: accept must be yes or no, found {row['accept']!r}.")
        if row["kind"] not in KINDS:
            raise ConfigError(f"{where}: kind must be one of {', '.join(KINDS)}, found {row['kind']!r}.")
        if not (row["id"] or "").isdecimal() or int(row["id"]) >= 2**63:
            raise ConfigError(f"{where}: id must be a whole number, found {row['id']!r}.")
        if accept != "yes":
            continue
        if row["kind"] == "wrong label":
            try:
                new_label = check_label(row["suggestion"] or "")
            except ConfigError as error:
                raise ConfigError(f"{where}: suggestion cannot be a label: {error}") from error
        id, before = int(row["id"]), fixes.get(int(row["id"]))
        if before is None or new_label is None:
            fixes[id] = _Fix(line, row["label"] or None, row["path"] or None, new_label)
        elif before.new_label not in (None, new_label):
            raise ConfigError(f"{where}: item {id} has two accepted labels; accept only one.")
    return fixes
