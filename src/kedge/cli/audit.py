"""`kedge audit`: what looks wrong in a gallery."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kedge.cli.options import GalleryArgument, line_console

if TYPE_CHECKING:
    from kedge.gallery import Gallery


def audit(
    gallery: GalleryArgument,
    against: Annotated[
        Path | None, typer.Option(help="Test images, as a folder or a gallery: say which are in this gallery too.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; all findings, unless -n is given.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write a page with the images to this file.")] = None,
    rows: Annotated[int | None, typer.Option("-n", min=1, help="How many findings; 20, on the page 200.")] = None,
) -> None:
    """Find wrong labels, duplicates, outliers, and test images that are in the gallery too."""
    from kedge.audit import audit as examine
    from kedge.audit import audit_page
    from kedge.gallery import Gallery

    opened = Gallery.open(gallery)
    with _other(opened, against) as other:
        report = examine(opened, against=other)
    if html is not None:
        audit_page(report, html, rows=rows or 200)
    if as_json:
        typer.echo(report.to_json(rows))
    elif not len(report):
        typer.echo(report.summary())
    else:
        line_console().print(report.table(rows or 20))
    if html is not None:
        typer.echo(f"The page with the images: {html}", err=True)


@contextmanager
def _other(gallery: Gallery, path: Path | None) -> Iterator[Gallery | None]:
    """The gallery at `path`; for a folder of images, one that is gone afterwards."""
    import tempfile

    from kedge.gallery import Gallery

    if path is None:
        yield None
    elif gallery.model is None or not path.is_dir() or (path / "gallery.json").exists():
        yield Gallery.open(path)
    else:
        with tempfile.TemporaryDirectory() as folder:
            other = Gallery.create(Path(folder, "gallery"), gallery.model)
            for file, reason in other.add(path).skipped:
                typer.echo(f"kedge: {file} was left out: {reason}", err=True)
            yield other
