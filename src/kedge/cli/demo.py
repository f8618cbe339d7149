"""`kedge demo` and `kedge sample`: training, comparison and a gallery of the bundled sample; its images as files."""

from __future__ import annotations

import shutil
import sys
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

import kedge
from kedge.console import stdout
from kedge.errors import DataError

_LOSSES = {"cam": "class anchors", "cross_entropy": "cross-entropy"}
_QUERIES = 8
_PER_CLASS = 200
"""Images of each class in the gallery; a tenth as many are queries."""
_UNKNOWN_CLASS = "Bag"
"""The class that photos/ leaves out, so that there are images of an unknown class."""


def demo(
    folder: Annotated[Path | None, typer.Option(help="Where to leave everything; by default below runs/demo.")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="Overrides, such as recipe.epochs=3.")] = None,
) -> None:
    """Train with class anchors and with cross-entropy on the bundled sample, compare, and build a gallery."""
    from kedge.datasets import sample
    from kedge.datasets.folder import write_pictures
    from kedge.evaluation import compare, retrieval_grid, top_hits

    folder = folder or Path("runs", "demo", f"{datetime.now():%Y-%m-%d_%H-%M-%S}")
    dataset = sample()
    models, reports = {}, {}
    for loss, title in _LOSSES.items():
        chosen = ["experiment=demo", f"loss={loss}", *(overrides or [])]
        models[title] = kedge.train(overrides=chosen, folder=folder / loss)
        reports[title] = kedge.evaluate(models[title], dataset)
        reports[title].save(folder / loss / "metrics.json")
    stdout().print(compare(reports))
    plot = folder / "top6.png"
    step = len(dataset.test) // _QUERIES
    queries = range(step // 2, step * _QUERIES, step)
    hits = {title: top_hits(model, dataset, queries) for title, model in models.items()}
    retrieval_grid(dataset, queries, hits).savefig(plot)
    gallery = kedge.Gallery.create(folder / "gallery", models[_LOSSES["cam"]], thumbnails=64)
    gallery.add(*write_pictures(folder / "pictures", dataset.train, dataset.classes, _PER_CLASS))
    files, _ = write_pictures(folder / "queries", dataset.test, dataset.classes, _PER_CLASS // 10)
    gallery.calibrate(files)
    gallery.optimize()
    typer.echo(f"The first hits of both, one below the other: {plot}")
    typer.echo(f"The models: {' and '.join(str(folder / loss / 'model') for loss in _LOSSES)}")
    typer.echo(f"A gallery, and query images: {folder / 'gallery'} and {folder / 'queries'}")
    # How to call this program from here.
    own = Path(sys.argv[0])
    command = "kedge" if shutil.which("kedge") or own.stem != "kedge" else own
    typer.echo(f"Open it as a page: {command} serve {folder / 'gallery'}")


def sample(
    folder: Annotated[Path, typer.Argument(help="Where photos/, queries/ and strangers/ go.")] = Path(),
    pictures: Annotated[int, typer.Option(min=3, max=700, help="Images of each class in photos/.")] = 60,
    queries: Annotated[int, typer.Option(min=1, max=100, help="Images of each class in queries/.")] = 20,
) -> None:
    """Write bundled images of clothes as class folders, to try Kedge without images of your own.

    photos/ has nine classes, queries/ other images of the same nine, strangers/ images of a tenth.
    """
    from kedge.datasets import sample as load
    from kedge.datasets.folder import write_pictures

    for name in ("photos", "queries", "strangers"):
        if (folder / name).exists():
            raise DataError(f"{folder / name} already exists; choose another folder.")
    dataset = load()
    unknown = dataset.classes.index(_UNKNOWN_CLASS)
    train, test = dataset.train, dataset.test
    splits = {
        "photos": (train.subset((train.labels != unknown).nonzero()[0]), pictures),
        "queries": (test.subset((test.labels != unknown).nonzero()[0]), queries),
        "strangers": (test.subset((test.labels == unknown).nonzero()[0]), queries),
    }
    for name, (split, most) in splits.items():
        files, _ = write_pictures(folder / name, split, dataset.classes, most)
        typer.echo(f"{folder / name}: {len(files)} images")
