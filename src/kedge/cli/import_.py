"""`kedge import`: a file of vectors becomes a gallery."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("import")(import_)


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
        Path | None, typer.Option(help="The run or model that made the vectors, to search pictures.")
    ] = None,
    vectors: Annotated[str | None, typer.Option(help="The column or array of vectors.")] = None,
    labels: Annotated[str | None, typer.Option(help="The column or array of labels.")] = None,
    paths: Annotated[str | None, typer.Option(help="The column or array of paths.")] = None,
    anchors: Annotated[int | None, typer.Option(help="Without labels: route by so many k-means centres.")] = None,
    lists: Annotated[
        str | None, typer.Option(help="Where an item sits: in the list of its 'label' (default) or nearest 'anchor'.")
    ] = None,
    precision: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Make a gallery of a file of vectors."""
    from kedge.cli.index import warn_precision
    from kedge.interop.vectors import import_gallery
    from kedge.model import Model

    chosen: dict[str, Any] = {"vectors": vectors, "labels": labels, "paths": paths, "anchors": anchors}
    chosen["lists"] = lists
    warn_precision(precision)
    made = import_gallery(gallery, source, model=None if model is None else Model.load(model), **chosen)
    anchored = len(made.snapshot().anchors)
    typer.echo(f"{gallery}: {len(made):,} items with {made.dim} numbers each, in {anchored:,} lists.")
