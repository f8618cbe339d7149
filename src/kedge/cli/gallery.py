"""`kedge info`, `kedge remove` and `kedge optimize`: a gallery looked at, reduced and tidied."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kedge.cli.options import GalleryArgument


def info(
    gallery: GalleryArgument,
    check: Annotated[
        bool, typer.Option("--check", help="Compare all files with their checksums; damaged lists are rebuilt.")
    ] = False,
) -> None:
    """Tell what a gallery holds, and whether it is as it was written."""
    from kedge.gallery import Gallery

    opened = Gallery.open(gallery)
    checked = {"check": opened.check()} if check else {}
    versions, model, anchors = opened.versions(), opened.model, opened.snapshot().anchors
    learned = set(opened.classes)
    labels = {name for name in anchors.names if name is not None}
    lines = {
        "items": f"{len(opened):,}",
        "classes": f"{len(labels | learned):,}, {len(learned):,} of them learned",
        "dim": f"{opened.dim}",
        **({} if anchors.index is None else {"anchors": f"{len(anchors):,}, searched through an index over them"}),
        "lists": f"by {opened.lists}",
        "model": "none" if model is None else f"{model.encoder.name}, loss {model.loss}, {model.fingerprint}",
        "versions": f"{len(versions)}, the last of {versions[-1].time:%Y-%m-%d %H:%M:%S}",
        "size on disk": _size(opened.path),
        **checked,
    }
    for name, value in lines.items():
        typer.echo(f"{name:<13} {value}")


def remove(
    gallery: GalleryArgument,
    ids: Annotated[list[int], typer.Argument(help="The items, by id, as kedge search shows them.")],
) -> None:
    """Remove items from a gallery; the image files stay where they are."""
    from kedge.errors import ConfigError
    from kedge.gallery import Gallery

    unique_ids = set(ids)
    if max(unique_ids) >= 2**63:
        raise ConfigError(f"An id is a whole number below 2^63, found {max(unique_ids)}.")
    count = Gallery.open(gallery).remove(sorted(unique_ids))
    missing = f"; {len(unique_ids) - count} not there" if count < len(unique_ids) else ""
    typer.echo(f"{gallery}: {count} removed{missing}.")
    if count == 0:
        raise typer.Exit(1)


def optimize(
    gallery: GalleryArgument,
    forget: Annotated[
        float | None,
        typer.Option(min=0, help="Delete versions older than so many days; they cannot be restored."),
    ] = None,
) -> None:
    """Merge new items into the inverted lists, and compact the table."""
    from kedge.gallery import Gallery

    opened = Gallery.open(gallery)
    opened.optimize(forget=forget)
    typer.echo(f"{gallery}: {len(opened):,} items in its lists.")


def _size(folder: Path) -> str:
    size = float(sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()))
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:,.4g} {unit}"
        size /= 1000
    return f"{size:,.4g} GB"
