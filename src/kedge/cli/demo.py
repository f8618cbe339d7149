"""`kedge demo`: train, compare and build a gallery on the bundled sample."""

from __future__ import annotations

import shutil
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kedge.datasets import Dataset
    from kedge.model import Model

_LOSSES = {"cam": "class anchors", "cross_entropy": "cross-entropy"}
_QUERIES = 8
_PER_CLASS = 200
"""Images of each class in the gallery; a tenth as many are queries."""


def demo(
    folder: Annotated[Path | None, typer.Option(help="Where to leave everything; by default below runs/demo.")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="Overrides, such as recipe.epochs=3.")] = None,
) -> None:
    """Train with class anchors and with cross-entropy on the bundled sample, compare, and build a gallery."""
    from kedge.console import stdout
    from kedge.datasets import sample
    from kedge.evaluation import compare, evaluate, retrieval_grid, top_hits
    from kedge.training import train

    folder = folder or Path("runs", "demo", f"{datetime.now():%Y-%m-%d_%H-%M-%S}")
    dataset = sample()
    models, reports = {}, {}
    for loss, title in _LOSSES.items():
        chosen = ["experiment=demo", f"loss={loss}", *(overrides or [])]
        models[title] = train(overrides=chosen, folder=folder / loss)
        reports[title] = evaluate(models[title], dataset)
        reports[title].save(folder / loss / "metrics.json")
    stdout().print(compare(reports))
    plot = folder / "top6.png"
    step = len(dataset.test) // _QUERIES
    queries = [row * step + step // 2 for row in range(_QUERIES)]
    hits = {title: top_hits(model, dataset, queries) for title, model in models.items()}
    retrieval_grid(dataset, queries, hits).savefig(plot)
    typer.echo(f"The first hits of both, side by side: {plot}")
    typer.echo(f"The models: {' and '.join(str(folder / loss / 'model') for loss in _LOSSES)}")
    anchored = models[_LOSSES["cam"]]
    _build_gallery(folder, anchored, dataset)
    typer.echo(f"A gallery, and pictures to ask with: {folder / 'gallery'} and {folder / 'queries'}")
    typer.echo(f"Open it as a page: {_command()} serve {folder / 'gallery'}")


def _command() -> str:
    """How to call this program from here."""
    own = Path(sys.argv[0])
    return "kedge" if shutil.which("kedge") or own.stem != "kedge" else str(own)


def _build_gallery(folder: Path, model: Model, dataset: Dataset) -> None:
    from kedge.datasets.files import write_pictures
    from kedge.gallery import Gallery

    gallery = Gallery.create(folder / "gallery", model, thumbnails=64)
    gallery.add(*write_pictures(folder / "pictures", dataset.train, dataset.classes, _PER_CLASS))
    queries, _ = write_pictures(folder / "queries", dataset.test, dataset.classes, _PER_CLASS // 10)
    gallery.calibrate(queries)
    gallery.optimize()
