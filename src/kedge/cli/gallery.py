"""`kedge info`, `remove`, `optimize` and `audit`: what is done with a gallery beside indexing and searching."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

import kedge
from kedge.cli.options import GalleryArgument, line_console
from kedge.errors import ConfigError


def info(
    gallery: GalleryArgument,
    check: Annotated[
        bool, typer.Option("--check", help="Compare all files with their checksums; damaged lists are rebuilt.")
    ] = False,
) -> None:
    """Tell what a gallery holds, and whether it is as it was written."""
    from rich.filesize import decimal

    opened = kedge.Gallery.open(gallery)
    checked = {"check": opened.check()} if check else {}
    versions, model, anchors = opened.versions(), opened.model, opened.snapshot().anchors
    learned = set(opened.classes)
    labels = {name for name in anchors.names if name is not None}
    lines = {
        "items": f"{len(opened):,}",
        "classes": f"{len(labels | learned):,}, {len(learned):,} of them learned",
        "dim": f"{opened.dim}",
        **({"features": f"{opened.features}, for searches by looks"} if opened.features else {}),
        **({} if anchors.index is None else {"anchors": f"{len(anchors):,}, searched through an index over them"}),
        "lists": f"by {opened.lists}",
        "model": "none" if model is None else f"{model.encoder.name}, loss {model.loss}, {model.fingerprint}",
        "versions": f"{len(versions)}, the last of {versions[-1].time:%Y-%m-%d %H:%M:%S}",
        "size on disk": decimal(sum(file.stat().st_size for file in opened.path.rglob("*") if file.is_file())),
        **checked,
    }
    for name, value in lines.items():
        typer.echo(f"{name:<13} {value}")


def remove(
    gallery: GalleryArgument,
    ids: Annotated[list[int], typer.Argument(help="The items, by id, as kedge search shows them.")],
) -> None:
    """Remove items from a gallery; the image files stay where they are."""
    unique_ids = set(ids)
    if max(unique_ids) >= 2**63:
        raise ConfigError(f"An id is a whole number below 2^63, found {max(unique_ids)}.")
    count = kedge.Gallery.open(gallery).remove(sorted(unique_ids))
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
    opened = kedge.Gallery.open(gallery)
    opened.optimize(forget=forget)
    typer.echo(f"{gallery}: {len(opened):,} items in its lists.")


def audit(
    gallery: GalleryArgument,
    against: Annotated[
        Path | None, typer.Option(help="Test images, as a folder or a gallery: say which are in this gallery too.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; all findings, unless -n is given.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write a page with the images to this file.")] = None,
    csv: Annotated[
        Path | None, typer.Option(help="Write the findings to this file; say yes there to those to fix.")
    ] = None,
    rows: Annotated[int | None, typer.Option("-n", min=1, help="How many findings; 20, on the page 200.")] = None,
    apply: Annotated[
        Path | None, typer.Option(help="Fix what such a file accepts, and no more: labels change, copies are removed.")
    ] = None,
) -> None:
    """Find wrong labels, duplicates, outliers, and test images that are in the gallery too."""
    from kedge.audit import apply_fixes, audit_page
    from kedge.audit import audit as examine

    opened = kedge.Gallery.open(gallery)
    if apply is not None:
        if against or as_json or html or csv or rows:
            raise ConfigError("--apply takes no other option: audit again afterwards.")
        typer.echo(f"{gallery}: {apply_fixes(opened, apply)}.")
        return
    with _other(opened, against) as other:
        report = examine(opened, against=other)
    if html is not None:
        audit_page(report, html, rows=rows or 200)
    if csv is not None:
        report.to_csv(csv, rows)
    if as_json:
        typer.echo(report.to_json(rows))
    elif not len(report):
        typer.echo(report.summary())
    else:
        line_console().print(report.table(rows or 20))
    if html is not None:
        typer.echo(f"The page with the images: {html}", err=True)
    if csv is not None:
        typer.echo(f"Say yes in {csv} to what is right; then: kedge audit {gallery} --apply {csv}", err=True)


@contextmanager
def _other(gallery: kedge.Gallery, path: Path | None) -> Iterator[kedge.Gallery | None]:
    """The gallery at `path`; for a folder of images, one that is gone afterwards."""
    import tempfile

    if path is None:
        yield None
    elif gallery.model is None or not path.is_dir() or (path / "gallery.json").exists():
        yield kedge.Gallery.open(path)
    else:
        with tempfile.TemporaryDirectory() as folder:
            other = kedge.Gallery.create(Path(folder, "gallery"), gallery.model)
            for file, reason in other.add(path).skipped:
                typer.echo(f"kedge: {file} was left out: {reason}", err=True)
            yield other
