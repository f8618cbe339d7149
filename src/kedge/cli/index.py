"""`kedge index`: images become a gallery, or join one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import kedge
from kedge.cli.options import AddressOption, ListsOption, PrecisionOption, check_runner
from kedge.console import stderr
from kedge.errors import ConfigError
from kedge.io import is_url

if TYPE_CHECKING:
    from kedge.gallery import Added


def index(
    source: Annotated[
        str,
        typer.Argument(
            help="A folder of images; its first-level folders are labels. With --runner ray also a .txt file with "
            "their paths, Parquet files or WebDataset shards (.tar)."
        ),
    ],
    gallery: Annotated[str, typer.Option(help="The gallery's folder or URL (s3://…); created if it does not exist.")],
    model: Annotated[
        Path | None,
        typer.Option(
            help="A run, a model or a pretrained encoder (timm:NAME, hf:NAME); default: EfficientNet-Lite0, trained on "
            "ImageNet. An existing gallery has its own model."
        ),
    ] = None,
    lists: ListsOption = None,
    precision: PrecisionOption = None,
    thumbnails: Annotated[
        int | None, typer.Option(help="Store thumbnails with this many pixels on the longer side; default: none.")
    ] = None,
    runner: Annotated[str, typer.Option(help="local, or ray: on many processes and machines.")] = "local",
    address: AddressOption = None,
    workers: Annotated[int | None, typer.Option(help="With ray: number of models that embed in parallel.")] = None,
) -> None:
    """Add images to a gallery; run it again to continue, or to add what is new."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    from kedge.gallery.ingest import UNREADABLE, existing_folder, index_folder

    check_runner(runner, address=address, workers=workers)
    del precision
    if runner == "local":
        existing_folder(source)
    opened = _open_or_create(gallery, model, {"lists": lists, "thumbnails": thumbnails})
    last: Added | None = None

    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(compact=True))
    with Progress(*columns, console=stderr()) as bar:
        task = bar.add_task("Indexing", total=None)

        def show(added: Added) -> None:
            nonlocal last
            last = added
            bar.update(task, total=added.total, completed=added.done)
            if added.done == added.total:
                bar.update(task, description="Optimising")

        try:
            if runner == "local":
                added = index_folder(opened, source, progress=show)
            else:
                from kedge.ray import build_index, index_with_ray
                from kedge.ray.cluster import connect

                with connect(address, workers):
                    added = index_with_ray(opened, source, workers=workers, progress=show)
                    build_index(opened, workers=workers)
        except KeyboardInterrupt:
            bar.stop()
            so_far = f" ({last})" if last else ""
            kept = "what was added stays" if runner == "local" else "what the workers finished is kept"
            typer.echo(f"kedge: stopped; {kept}{so_far}; run it again to continue.", err=True)
            raise typer.Exit(130) from None
        bar.update(task, description="Indexed")
    where = f", see {opened.path / UNREADABLE}" if added.skipped else ""
    typer.echo(f"{gallery}: {added}{where}.")


def _open_or_create(path: str, source: Path | None, options: dict[str, Any]) -> kedge.Gallery:
    from kedge.encoders.pretrained import default_encoder_note
    from kedge.gallery.location import Location

    chosen = {name: value for name, value in options.items() if value is not None}
    here = Path(path).expanduser()
    if is_url(path):
        missing = Location.of(path).read("gallery.json") is None
    else:
        path, missing = str(here), not here.exists() or (here.is_dir() and not any(here.iterdir()))
    if missing:
        if source is None:
            model = kedge.Model.pretrained()
            stderr().print(default_encoder_note("--model timm:MODEL, or --model RUN for one you trained"))
        else:
            model = _load(source)
        return kedge.Gallery.create(path, model, **chosen)
    gallery = kedge.Gallery.open(path)
    if gallery.model is None:
        raise ConfigError(f"Gallery '{path}' has no model to embed images; create another one with --model.")
    for name, value in chosen.items():
        if value != (made := getattr(gallery, name)):
            raise ConfigError(f"Gallery '{path}' was created with --{name} {made}, not {value}; leave --{name} out.")
    if source is not None and (other := _load(source).fingerprint) != gallery.model.fingerprint:
        raise ConfigError(
            f"Gallery '{path}' was created with model {gallery.model.fingerprint}, but --model {source} is {other}; "
            "leave --model out, or choose another gallery."
        )
    return gallery


def _load(source: Path) -> kedge.Model:
    named = str(source).startswith(("timm:", "hf:"))
    return kedge.Model.pretrained(str(source)) if named else kedge.Model.load(source, lazy=True)
