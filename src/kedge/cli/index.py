"""`kedge index`: pictures become a gallery, or join one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.progress import Progress

    from kedge.gallery import Added, Gallery

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("index")(index)


def index(
    source: Annotated[
        str,
        typer.Argument(
            help="A folder of pictures; its first-level folders are labels. With --runner ray also a .txt file with "
            "their paths, Parquet files or WebDataset shards (.tar)."
        ),
    ],
    gallery: Annotated[str, typer.Option(help="The gallery's folder or address (s3://…), made if it is not there.")],
    model: Annotated[Path | None, typer.Option(help="A run or a model; a gallery that is there has its own.")] = None,
    lists: Annotated[
        str | None, typer.Option(help="Where an item sits: in the list of its 'label' (default) or nearest 'anchor'.")
    ] = None,
    precision: Annotated[str | None, typer.Option(hidden=True)] = None,
    thumbnails: Annotated[
        int | None, typer.Option(help="Keep small copies with so many pixels on the longer side; default: none.")
    ] = None,
    runner: Annotated[str, typer.Option(help="local, or ray: over many processes and machines.")] = "local",
    address: Annotated[
        str | None, typer.Option(help="The Ray cluster, such as ray-head:6379; default: one is started here.")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="With ray: how many models embed at a time.")] = None,
) -> None:
    """Add pictures to a gallery; run it again to continue, or to add what is new."""
    from kedge.gallery.ingest import UNREADABLE, existing_folder

    check_runner(runner, address=address, workers=workers)
    warn_precision(precision)
    if runner == "local":
        existing_folder(source)
    opened = _opened(gallery, model, {"lists": lists, "thumbnails": thumbnails})
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
            added = _added(opened, source, runner, address, workers, show)
        except KeyboardInterrupt:
            bar.stop()
            so_far = f" ({last})" if last else ""
            kept = "what was added stays" if runner == "local" else "what the workers finished is kept"
            typer.echo(f"kedge: stopped; {kept}{so_far}: run it again to continue.", err=True)
            raise typer.Exit(130) from None
        bar.update(task, description="Indexed")
    where = f", see {opened.path / UNREADABLE}" if added.skipped else ""
    typer.echo(f"{gallery}: {added}{where}.")


def check_runner(runner: str, **options: object) -> None:
    """Refuse a runner that is not there, and options that the local one does not have."""
    from kedge.errors import ConfigError

    if runner not in ("local", "ray"):
        raise ConfigError(f"--runner must be local or ray, found {runner}.")
    for name, value in options.items():
        if runner == "local" and value is not None:
            raise ConfigError(f"--{name} is for --runner ray: leave it out, or say that.")


def warn_precision(precision: str | None) -> None:
    """Accept --precision for one release."""
    if precision is not None:
        typer.echo("kedge: --precision has no effect any more, lists are float32: leave it out.", err=True)


def _added(
    gallery: Gallery,
    source: str,
    runner: str,
    address: str | None,
    workers: int | None,
    progress: Callable[[Added], None],
) -> Added:
    if runner == "local":
        from kedge.gallery.ingest import index_folder

        return index_folder(gallery, source, progress=progress)
    from kedge.ray import build_index, index_with_ray
    from kedge.ray.cluster import connect

    with connect(address, workers):
        added = index_with_ray(gallery, source, workers=workers, progress=progress)
        build_index(gallery, workers=workers)
    return added


def _opened(path: str, source: Path | None, options: dict[str, Any]) -> Gallery:
    from kedge.errors import ConfigError
    from kedge.gallery import Gallery
    from kedge.gallery.location import Location
    from kedge.io import is_url
    from kedge.model import Model

    given = {name: value for name, value in options.items() if value is not None}
    here = Path(path).expanduser()
    if is_url(path):
        missing = Location.of(path).read("gallery.json") is None
    else:
        path, missing = str(here), not here.exists() or (here.is_dir() and not any(here.iterdir()))
    if missing:
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
