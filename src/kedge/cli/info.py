"""`kedge info`: what a gallery holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("info")(info)


def info(
    gallery: Annotated[str, typer.Argument(help="The gallery's folder or address (s3://…).")],
    check: Annotated[
        bool, typer.Option("--check", help="Compare all files with their checksums; damaged lists are rebuilt.")
    ] = False,
) -> None:
    """Tell what a gallery holds, and whether it is as it was written."""
    from kedge.gallery import Gallery

    opened = Gallery.open(gallery)
    checked = {"check": opened.check()} if check else {}
    versions = opened.versions()
    model = opened.model
    learned = set(opened.classes)
    state = opened.snapshot()
    labels = {name for name in state.anchors.names if name is not None}
    sent = state.anchors.index
    lines = {
        "items": f"{len(opened):,}",
        "classes": f"{len(labels | learned):,}, {len(learned):,} of them learned",
        "dim": f"{opened.dim}",
        **({} if sent is None else {"anchors": f"{len(state.anchors):,}, found through an index over them"}),
        "lists": f"by {opened.lists}",
        "model": "none" if model is None else f"{model.encoder.name}, loss {model.loss}, {model.fingerprint}",
        "versions": f"{len(versions)}, the last of {versions[-1].time:%Y-%m-%d %H:%M:%S}",
        "size on disk": _size(opened.path),
        **checked,
    }
    for name, value in lines.items():
        typer.echo(f"{name:<13} {value}")


def _size(folder: Path) -> str:
    size = float(sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()))
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:,.4g} {unit}"
        size /= 1000
    return f"{size:,.4g} GB"
