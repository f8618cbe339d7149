"""`kedge optimize`: fold what is new into a gallery's lists."""

from __future__ import annotations

from typing import Annotated

import typer

from kedge.cli.options import GalleryArgument


def optimize(
    gallery: GalleryArgument,
    forget: Annotated[
        float | None, typer.Option(min=0, help="Remove states older than so many days, which cannot be restored then.")
    ] = None,
) -> None:
    """Fold what is new into the lists, and join the record's small files."""
    from kedge.gallery import Gallery

    opened = Gallery.open(gallery)
    opened.optimize(forget=forget)
    typer.echo(f"{gallery}: {len(opened):,} items in its lists.")
