"""`kedge optimize`: fold what is new into a gallery's lists."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("optimize")(optimize)


def optimize(
    gallery: Annotated[str, typer.Argument(help="The gallery's folder or address (s3://…).")],
    forget: Annotated[
        float | None, typer.Option(min=0, help="Remove states older than so many days, which cannot be restored then.")
    ] = None,
) -> None:
    """Fold what is new into the lists, and join the record's small files."""
    from kedge.gallery import Gallery

    opened = Gallery.open(gallery)
    opened.optimize(forget=forget)
    typer.echo(f"{gallery}: {len(opened):,} items in its lists.")
