"""`kedge remove`: take items out of a gallery."""

from __future__ import annotations

from typing import Annotated

import typer

from kedge.cli.options import GalleryArgument


def remove(
    gallery: GalleryArgument,
    ids: Annotated[list[int], typer.Argument(help="The items, by id, as kedge search shows them.")],
) -> None:
    """Remove items from a gallery; the picture files stay where they are."""
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
