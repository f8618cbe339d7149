"""`kedge import`: a file of vectors becomes a gallery."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kedge.cli.options import ListsOption, PrecisionOption


def import_(
    source: Annotated[
        Path,
        typer.Argument(
            help="A file that export_gallery wrote, or anyone's vectors: Parquet (a file or a folder), .npz, .npy, "
            ".faiss or .index."
        ),
    ],
    gallery: Annotated[Path, typer.Option(help="The gallery's folder, which must not be there yet.")],
    model: Annotated[
        Path | None, typer.Option(help="The run or model that made the vectors, to search images.")
    ] = None,
    vectors: Annotated[str | None, typer.Option(help="The column or array of vectors.")] = None,
    labels: Annotated[str | None, typer.Option(help="The column or array of labels.")] = None,
    paths: Annotated[str | None, typer.Option(help="The column or array of paths.")] = None,
    anchors: Annotated[int | None, typer.Option(help="Without labels: route by so many k-means centres.")] = None,
    lists: ListsOption = None,
    precision: PrecisionOption = None,
) -> None:
    """Make a gallery of a file of vectors."""
    from kedge.interop.vectors import import_gallery
    from kedge.model import Model

    del precision
    columns: dict[str, Any] = {"vectors": vectors, "labels": labels, "paths": paths, "anchors": anchors, "lists": lists}
    imported = import_gallery(gallery, source, model=None if model is None else Model.load(model), **columns)
    lists_count = len(imported.snapshot().anchors)
    typer.echo(f"{gallery}: {len(imported):,} items with {imported.dim} numbers each, in {lists_count:,} lists.")
