"""`kedge info`, `remove`, `versions`, `restore`, `calibrate`, `optimize` and `audit`: the care of a gallery."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import kedge
from kedge.cli.options import GalleryArgument, line_console
from kedge.errors import ConfigError

if TYPE_CHECKING:
    from kedge.gallery.table import Table


def info(
    gallery: GalleryArgument,
    check: Annotated[
        bool, typer.Option("--check", help="Compare all files with their checksums; damaged lists are rebuilt.")
    ] = False,
) -> None:
    """Show what a gallery holds, and check whether its files are intact."""
    from rich.filesize import decimal

    opened = kedge.Gallery.open(gallery)
    checked = {"check": opened.check()} if check else {}
    versions, model, anchors = opened.versions(), opened.model, opened.snapshot().anchors
    trained = "untrained" if model is not None and model.loss == "none" else f"trained with {model and model.loss}"
    lines = {
        "items": f"{len(opened):,}",
        "classes": _class_counts(opened),
        "embeddings": f"{opened.dim} numbers each",
        **({"features": f"{opened.features} numbers each, for searches by looks"} if opened.features else {}),
        **({} if anchors.index is None else {"anchors": f"{len(anchors):,}, searched through an index"}),
        "lists": f"one for each {opened.lists}",
        "model": "none" if model is None else f"{model.encoder_name}, {trained} (fingerprint {model.fingerprint})",
        "unknown": _unknown(opened),
        "versions": f"{len(versions)}, the last from {versions[-1].time:%Y-%m-%d %H:%M:%S}",
        "size on disk": decimal(sum(file.stat().st_size for file in opened.path.rglob("*") if file.is_file())),
        **checked,
    }
    for name, value in lines.items():
        typer.echo(f"{name:<13} {value}")


def _class_counts(gallery: kedge.Gallery) -> str:
    """The number of classes, and how many of them the model was trained on."""
    trained = set(gallery.classes)
    later = {name for name in gallery.snapshot().anchors.names if name is not None} - trained
    if not later or not trained:
        return f"{len(trained):,} (all trained)" if trained else f"{len(later):,} (none trained)" if later else "none"
    return f"{len(trained) + len(later):,} ({len(trained):,} trained, {len(later):,} added later)"


def _unknown(gallery: kedge.Gallery) -> str:
    """Whether a search says that a query is unknown, and where it learned that."""
    if (own := gallery.calibration) is not None:
        return f"calibrated on {own.items:,} images, of which {own.accept:.0%} count as known"
    if gallery.features and gallery.min_familiarity is not None:
        return "as the model learned it in training"
    return "not calibrated; kedge calibrate does it"


def remove(
    gallery: GalleryArgument,
    items: Annotated[
        list[str] | None, typer.Argument(metavar="[ITEM]...", help="Ids, as kedge search shows them, files or folders.")
    ] = None,
    where: Annotated[str | None, typer.Option(help="Items that match, such as \"label = 'cat'\".")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before the gallery is emptied.")] = False,
) -> None:
    """Remove items from a gallery; the image files stay where they are."""
    from kedge.gallery.manifest import open_table

    if not items and where is None:
        raise ConfigError("Name the items to remove: ids, paths or --where.")
    table = open_table(gallery)
    ids, missing = _find_items(table, items or [])
    if where is not None:
        ids |= set(table.ids(where))
    version, total = table.version, len(table)
    if ids and len(ids) == total and not yes:
        question = f"This removes all {total:,} items of {gallery}"
        if not sys.stdin.isatty():
            raise ConfigError(f"{question}: pass --yes to do it.")
        typer.confirm(f"{question}. Go on?", abort=True)
    count = 0
    if ids:
        with table.writing():
            count = table.delete(sorted(ids))
    not_found = f"; not found: {', '.join(missing[:5])}{' …' if len(missing) > 5 else ''}" if missing else ""
    typer.echo(f"{gallery}: {count:,} removed, {total - count:,} left{not_found}.")
    if count == 0:
        raise typer.Exit(1)
    typer.echo(f"To undo it: kedge restore {shlex.quote(gallery)} {version}")


def _find_items(table: Table, texts: list[str]) -> tuple[set[int], list[str]]:
    """The ids of items that are named by id, by file or by folder, and the names that no item has."""
    ids: set[int] = set()
    missing: list[str] = []
    for text in texts:
        if text.isascii() and text.isdigit():
            condition = f"id = {text}" if int(text) < 2**63 else "id < 0"
        else:
            path = str(Path(text).expanduser().absolute()).replace("'", "''")
            given = text.replace("'", "''")
            condition = f"path IN ('{given}', '{path}') OR starts_with(path, '{path}/')"
        matches = table.ids(condition)
        ids.update(matches)
        if not matches:
            missing.append(text)
    return ids, missing


def versions(
    gallery: GalleryArgument,
    rows: Annotated[int, typer.Option("-n", min=1, help="Number of versions, the newest last.")] = 20,
) -> None:
    """List the versions of a gallery that can be restored, and what each changed."""
    import rich.table
    from rich.table import Column

    from kedge.gallery.manifest import open_table

    opened = open_table(gallery)
    table = rich.table.Table(
        Column("version", justify="right"),
        "time",
        Column("items", justify="right"),
        "change",
        box=None,
        pad_edge=False,
        header_style="bold",
    )
    changes = opened.history(rows)
    for change in changes:
        table.add_row(f"{change.number}", f"{change.time:%Y-%m-%d %H:%M:%S}", f"{change.items:,}", str(change))
    console = line_console()
    console.print(table)
    if older := len(opened.versions()) - len(changes):
        console.print(f"{older:,} older ones; -n shows more.", style="dim")
    typer.echo(f"To bring one back: kedge restore {shlex.quote(gallery)} VERSION", err=True)


def restore(
    gallery: GalleryArgument,
    version: Annotated[int, typer.Argument(help="Its number, as kedge versions shows it.")],
) -> None:
    """Make an old version of a gallery the current one; the versions after it are kept."""
    from kedge.gallery.manifest import open_table

    table = open_table(gallery)
    current, before = table.version, len(table)
    with table.writing():
        table.restore(version)
    typer.echo(f"{gallery} is as it was in version {version}: {len(table):,} items, before {before:,}.")
    typer.echo(f"To go back: kedge restore {shlex.quote(gallery)} {current}")


def calibrate(
    gallery: GalleryArgument,
    held_out: Annotated[
        Path, typer.Argument(help="A folder of images of known classes that were neither trained on nor added.")
    ],
    accept: Annotated[float, typer.Option(help="Share of images like these that will count as known.")] = 0.95,
) -> None:
    """Learn from held-out images when a search calls a query unknown, and keep that with the gallery."""
    from kedge.gallery.ingest import existing_folder

    calibration = kedge.Gallery.open(gallery).calibrate(existing_folder(held_out), accept)
    rule = f"farther than {calibration.threshold:.3g} from every anchor"
    if calibration.familiarity is not None:
        rule = f"less familiar than {calibration.familiarity:.3g}"
    typer.echo(f"{gallery}: calibrated on {calibration.items:,} images; a query {rule} is unknown.")


def optimize(
    gallery: GalleryArgument,
    forget: Annotated[
        float | None,
        typer.Option(min=0, help="Delete versions older than this many days; they can no longer be restored."),
    ] = None,
) -> None:
    """Merge new items into the inverted lists, and compact the table."""
    opened = kedge.Gallery.open(gallery)
    opened.optimize(forget=forget)
    typer.echo(f"{gallery}: {len(opened):,} items in its lists.")


def audit(
    gallery: GalleryArgument,
    against: Annotated[
        Path | None,
        typer.Option(help="Test images (a folder or a gallery): report which of them are in this gallery too."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; all findings, unless -n is given.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write a page with the images to this file.")] = None,
    csv: Annotated[
        Path | None, typer.Option(help="Write the findings to this CSV file, where you mark those to fix.")
    ] = None,
    rows: Annotated[
        int | None, typer.Option("-n", min=1, help="Number of findings; default: 20, on the page 200.")
    ] = None,
    apply: Annotated[
        Path | None,
        typer.Option(help="Apply what is marked yes in such a file: labels change, duplicates are removed."),
    ] = None,
) -> None:
    """Find wrong labels, duplicates, outliers, and test images that are in the gallery too."""
    from kedge.audit import apply_fixes, audit_page
    from kedge.audit import audit as examine

    opened = kedge.Gallery.open(gallery)
    if apply is not None:
        if against or as_json or html or csv or rows:
            raise ConfigError("--apply takes no other option; run kedge audit again afterwards.")
        fixes = apply_fixes(opened, apply)
        typer.echo(f"{gallery}: {fixes}.")
        if fixes.relabelled or fixes.removed:
            typer.echo(f"To undo it: kedge restore {shlex.quote(gallery)} {fixes.version}")
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
        then = f"kedge audit {shlex.quote(gallery)} --apply {csv}"
        typer.echo(f"Write yes in the column accept of {csv} where a fix is right, then run: {then}", err=True)


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
                typer.echo(f"kedge: skipped {file}: {reason}", err=True)
            yield other
