"""The field's datasets for classes that are never trained on: read from their official folders, test classes `unseen`.

They are not downloaded: their hosts ask for consent, or have no address that lasts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from kedge.datasets.base import Dataset
from kedge.datasets.folder import FileSource, from_files
from kedge.datasets.splits import keep_classes
from kedge.deps import require
from kedge.errors import DataError

__all__ = ["cars196", "cub200", "inshop", "online_products"]

Labelled = list[tuple[Path, str]]


def cub200(path: str | Path, size: int = 224) -> Dataset:
    """CUB-200-2011: 11,788 photographs of birds; classes 1 to 100 are trained on, 101 to 200 searched.

    ``path`` holds ``images/``, ``images.txt`` and ``image_class_labels.txt``.
    """
    folder = Path(path).expanduser()
    files = dict(line.split() for line in _lines(folder, "images.txt"))
    labelled = [
        (folder / "images" / files[number], int(label))
        for number, label in (line.split() for line in _lines(folder, "image_class_labels.txt"))
    ]
    return _by_number("cub200", folder, labelled, 100, size, name=lambda file, _: file.parent.name)


def cars196(path: str | Path, size: int = 224) -> Dataset:
    """Cars-196: 16,185 photographs of cars; classes 1 to 98 are trained on, 99 to 196 searched.

    ``path`` holds ``car_ims/`` and ``cars_annos.mat``.
    """
    folder = Path(path).expanduser()
    scipy_io = require("scipy.io", extra="svhn", purpose="Cars-196, whose labels come as a Matlab file,")
    try:
        contents = scipy_io.loadmat(folder / "cars_annos.mat", squeeze_me=True)
        names = [str(name).strip() for name in contents["class_names"]]
        labelled = [
            (folder / str(row["relative_im_path"]).strip(), int(row["class"])) for row in contents["annotations"]
        ]
    except Exception as error:  # scipy promises no particular error for a file that is not Matlab's
        raise DataError(f"{folder} has no cars_annos.mat of Cars-196 ({error}).") from error
    return _by_number("cars196", folder, labelled, 98, size, name=lambda _, label: names[label - 1])


def online_products(path: str | Path, size: int = 224) -> Dataset:
    """Stanford Online Products: 59,551 photographs of 11,318 products are trained on, 60,502 of 11,316 searched.

    ``path`` holds ``Ebay_train.txt``, ``Ebay_test.txt`` and the folders that they name.
    """
    folder = Path(path).expanduser()
    parts = []
    for split in ("train", "test"):
        rows = (line.split() for line in _lines(folder, f"Ebay_{split}.txt")[1:])
        parts.append([(folder / file, label) for _, label, _, file in rows])
    return _disjoint("online_products", folder, parts[0], parts[1], size)


def inshop(path: str | Path, size: int = 224) -> Dataset:
    """In-Shop Clothes Retrieval: 25,882 photographs of 3,997 items are trained on; of 3,985 others, 14,218 photographs
    are queries and 12,612 the gallery that they are searched in.

    ``path`` holds ``list_eval_partition.txt`` (or ``Eval/`` with it) and ``img/``.
    """
    folder = Path(path).expanduser()
    listing = "list_eval_partition.txt"
    lines = _lines(folder, listing if (folder / listing).exists() else f"Eval/{listing}")
    rows = [line.split() for line in lines[2:]]
    train, queries, gallery = (
        [(folder / file, item) for file, item, status in rows if status == part]
        for part in ("train", "query", "gallery")
    )
    dataset = _disjoint("inshop", folder, train, queries + gallery, size)
    [images] = dataset.unseen
    is_query = np.isin(images.paths or (), [str(file) for file, _ in queries])
    asked, searched = (images.subset(np.flatnonzero(chosen)) for chosen in (is_query, ~is_query))
    if not len(asked) or not len(searched):
        raise DataError(
            f"{folder} lists no images {'of the gallery' if len(asked) else 'to query with'}: check its lists."
        )
    return replace(dataset, unseen=(asked,), unseen_gallery=searched)


def _lines(folder: Path, name: str) -> list[str]:
    """The lines of one of its lists."""
    try:
        return [line for line in (folder / name).read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{folder} has no list {name} that can be read: point at the dataset's own folder.") from error


def _by_number(
    name_of_set: str,
    folder: Path,
    labelled: Sequence[tuple[Path, int]],
    trained: int,
    size: int,
    *,
    name: Callable[[Path, int], str],
) -> Dataset:
    """Of classes numbered from 1, the first `trained` are trained on."""
    train, test = (
        [(file, name(file, label)) for file, label in labelled if (label <= trained) == own] for own in (True, False)
    )
    return _disjoint(name_of_set, folder, train, test, size)


def _disjoint(name: str, folder: Path, train: Labelled, test: Labelled, size: int) -> Dataset:
    trained, searched = (list(dict.fromkeys(label for _, label in part)) for part in (train, test))
    if both := set(trained) & set(searched):
        raise DataError(f"{folder} lists the class {min(both)} for training and for testing: check its lists.")
    if not trained or not searched:
        raise DataError(f"{folder} lists no images for {'testing' if trained else 'training'}: check its lists.")
    classes = (*trained, *searched)
    sources = (FileSource(name, folder, part, classes) for part in (train, test))
    return keep_classes(from_files(*sources, size=size), np.arange(len(trained)))
