"""`kedge remove`: take items out of a gallery."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("remove")(remove)


def remove(
    gallery: Annotated[str, typer.Argument(help="The gallery's folder or address (s3://…).")],
    ids: Annotated[list[int], typer.Argument(help="The items, by id, as kedge search shows them.")],
) -> None:
    """Remove items from a gallery; the picture files stay where they are."""
    from kedge.errors import ConfigError
    from kedge.gallery import Gallery

    wanted = set(ids)
    if max(wanted) >= 2**63:
        raise ConfigError(f"An id is a whole number below 2^63, found {max(wanted)}.")
    count = Gallery.open(gallery).remove(sorted(wanted))
    missing = f"; {len(wanted) - count} not there" if count < len(wanted) else ""
    typer.echo(f"{gallery}: {count} removed{missing}.")
    if count == 0:
        raise typer.Exit(1)
