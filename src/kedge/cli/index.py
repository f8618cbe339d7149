"""`kedge index`: a folder of pictures becomes a gallery, or joins one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.progress import Progress

    from kedge.gallery import Gallery

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("index")(index)


def index(
    folder: Annotated[Path, typer.Argument(help="The pictures; its first-level folders are labels.")],
    gallery: Annotated[Path, typer.Option(help="The gallery's folder, made if it is not there.")],
    model: Annotated[Path | None, typer.Option(help="A run or a model; a gallery that is there has its own.")] = None,
    lists: Annotated[
        str | None, typer.Option(help="Where an item sits: in the list of its 'label' (default) or nearest 'anchor'.")
    ] = None,
    precision: Annotated[
        str | None, typer.Option(help="float32 (default); bfloat16 or int8: a half or a quarter of the bytes to read.")
    ] = None,
    thumbnails: Annotated[
        int | None, typer.Option(help="Keep small copies with so many pixels on the longer side; default: none.")
    ] = None,
) -> None:
    """Add a folder of pictures to a gallery; run it again to continue, or to add what is new."""
    from kedge.gallery import Added
    from kedge.gallery.indexing import UNREADABLE, existing_folder, index_folder

    existing_folder(folder)
    opened = _opened(gallery, model, {"lists": lists, "precision": precision, "thumbnails": thumbnails})
    last: Added | None = None

    with _progress() as bar:
        task = bar.add_task("Indexing", total=None)

        def show(added: Added) -> None:
            nonlocal last
            last = added
            bar.update(task, total=added.total, completed=added.done)
            if added.done == added.total:
                bar.update(task, description="Optimising")

        try:
            added = index_folder(opened, folder, progress=show)
        except KeyboardInterrupt:
            bar.stop()
            so_far = f" ({last})" if last else ""
            typer.echo(f"kedge: stopped; what was added stays{so_far}: run it again to continue.", err=True)
            raise typer.Exit(130) from None
        bar.update(task, description="Indexed")
    where = f", see {gallery / UNREADABLE}" if added.skipped else ""
    typer.echo(f"{gallery}: {added}{where}.")


def _opened(path: Path, source: Path | None, options: dict[str, Any]) -> Gallery:
    from kedge.errors import ConfigError
    from kedge.gallery import Gallery
    from kedge.model import Model

    given = {name: value for name, value in options.items() if value is not None}
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        if source is None:
            raise ConfigError(f"There is no gallery {path} yet: say with --model whose embeddings it is to hold.")
        return Gallery.create(path, Model.load(source), **given)
    gallery = Gallery.open(path)
    if gallery.model is None:
        raise ConfigError(f"{path} was made without a model, so pictures cannot be indexed: make a new gallery.")
    for name, value in given.items():
        if value != (made := getattr(gallery, name)):
            raise ConfigError(f"{path} was made with --{name} {made}, found {value}: leave it out.")
    if source is not None and (other := Model.load(source).fingerprint) != gallery.model.fingerprint:
        raise ConfigError(
            f"{path} was made with the model {gallery.model.fingerprint}, but --model {source} is {other}: "
            "leave --model out, or choose another gallery."
        )
    return gallery


def _progress() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
    from rich.progress import TimeRemainingColumn as TimeLeft
    from rich.text import Text

    class Speed(ProgressColumn):
        def render(self, task: Task) -> Text:
            speed = task.finished_speed or task.speed
            return Text("" if speed is None else f"{speed:,.0f} pictures/s", style="progress.data.speed")

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Speed(), TimeLeft(compact=True))
    return Progress(*columns, console=Console(stderr=True))
