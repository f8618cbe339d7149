"""`kedge sample`: folders of pictures to try everything on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_UNKNOWN_CLASS = "Bag"
"""The class that photos/ leaves out, so that there are images of an unknown class."""


def sample(
    folder: Annotated[Path, typer.Argument(help="Where photos/, queries/ and strangers/ go.")] = Path(),
    pictures: Annotated[int, typer.Option(min=3, max=700, help="Pictures of each class in photos/.")] = 60,
    queries: Annotated[int, typer.Option(min=1, max=100, help="Pictures of each class in queries/.")] = 20,
) -> None:
    """Write bundled pictures of clothes as class folders, for whoever has no pictures at hand.

    photos/ has nine classes, queries/ other pictures of the same nine, strangers/ pictures of a tenth.
    """
    from kedge.datasets import sample as load
    from kedge.datasets.files import write_pictures
    from kedge.errors import DataError

    for name in ("photos", "queries", "strangers"):
        if (folder / name).exists():
            raise DataError(f"{folder / name} is there already: choose another folder.")
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
        typer.echo(f"{folder / name}: {len(files)} pictures")
