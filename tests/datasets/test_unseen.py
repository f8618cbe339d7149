"""Datasets of classes that are never trained on, in folders laid out as the official ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import savemat

from kedge.datasets import Dataset, cars196, cub200, inshop, leave_classes_out, online_products
from kedge.errors import DataError


def write(path: Path, shade: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (20, 16), (shade, shade, shade)).save(path)


def write_cub(folder: Path) -> None:
    labels = [1, 2, 100, 101, 200, 200]
    files = [f"{label:03d}.Bird_{label}/Bird_{row}.jpg" for row, label in enumerate(labels)]
    for file, label in zip(files, labels, strict=True):
        write(folder / "images" / file, label)
    (folder / "images.txt").write_text("".join(f"{row} {file}\n" for row, file in enumerate(files, 1)))
    (folder / "image_class_labels.txt").write_text("".join(f"{row} {label}\n" for row, label in enumerate(labels, 1)))


def write_cars(folder: Path) -> None:
    labels = [1, 2, 98, 99, 196, 196]
    kind = np.dtype([("relative_im_path", object), ("class", object)])
    rows = np.array([(f"car_ims/{row:06d}.jpg", label) for row, label in enumerate(labels)], kind)
    for file, label in rows:
        write(folder / file, label)
    savemat(folder / "cars_annos.mat", {"annotations": rows, "class_names": [f"car {n}" for n in range(1, 197)]})


def write_products(folder: Path) -> None:
    for split, labels in {"train": [1, 2, 7], "test": [11, 12, 12]}.items():
        lines = ["image_id class_id super_class_id path"]
        for row, label in enumerate(labels):
            file = f"bicycle_final/{label}_{row}.JPG"
            write(folder / file, label)
            lines.append(f"{row} {label} 1 {file}")
        (folder / f"Ebay_{split}.txt").write_text("\n".join(lines) + "\n")


def write_inshop(folder: Path) -> None:
    parts = {"train": [1, 2, 7], "query": [12], "gallery": [11, 12]}
    lines = []
    for part, labels in parts.items():
        for label in labels:
            file = f"img/WOMEN/{part}_{label}.jpg"
            write(folder / file, label)
            lines.append(f"{file}   id_{label:08d}   {part}")
    (folder / "Eval").mkdir()
    (folder / "Eval/list_eval_partition.txt").write_text(
        "\n".join([str(len(lines)), "image_name item_id evaluation_status", *lines]) + "\n"
    )


CASES: dict[str, tuple[Callable[[Path], None], Callable[..., Dataset], str, str]] = {
    "cub200": (write_cub, cub200, "001.Bird_1", "images.txt"),
    "cars196": (write_cars, cars196, "car 1", "cars_annos.mat"),
    "online_products": (write_products, online_products, "1", "Ebay_train.txt"),
    "inshop": (write_inshop, inshop, "id_00000001", "Eval/list_eval_partition.txt"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_official_split(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEDGE_DATA", str(tmp_path / "cache"))
    make, load, first, listing = CASES[name]
    folder = tmp_path / "there"
    folder.mkdir()
    make(folder)
    dataset = load(folder, size=8)
    assert dataset.name == name
    assert len(dataset.classes) == 3
    assert dataset.classes[0] == first
    assert dataset.train.labels.tolist() == [0, 1, 2]
    assert len(dataset.test) == 0
    assert len(dataset.unseen) == 1
    assert (dataset.unseen_gallery is not None) == (name == "inshop")
    splits = [*dataset.unseen, *([dataset.unseen_gallery] if dataset.unseen_gallery else [])]
    labels = np.concatenate([split.labels for split in splits])
    # Three images of two classes; two of one class share a shade.
    assert sorted(np.bincount(labels - labels.min()).tolist()) == [1, 2]
    shades = torch.cat([split.take(range(len(split))) for split in splits]).float().mean((1, 2, 3)).round()
    for one, label in zip(shades, labels, strict=True):
        same = [float(other) for other, own in zip(shades, labels, strict=True) if own == label]
        assert same == pytest.approx([float(one)] * len(same), abs=2)
    assert dataset.train.take([0]).float().mean() < shades.min()
    changed = load(folder, size=8).fingerprint()
    assert changed == dataset.fingerprint()
    (folder / listing).unlink()
    with pytest.raises(DataError, match=r"there has no .*" + Path(listing).name):
        load(folder)


def test_in_shop_has_queries_and_a_gallery(tmp_path: Path) -> None:
    write_inshop(tmp_path)
    dataset = inshop(tmp_path, size=8)
    (queries,), gallery = dataset.unseen, dataset.unseen_gallery
    assert gallery is not None
    files = [[Path(file).name for file in split.paths or ()] for split in (queries, gallery)]
    assert files == [["query_12.jpg"], ["gallery_11.jpg", "gallery_12.jpg"]]
    assert queries.labels[0] == gallery.labels[1] != gallery.labels[0]
    listing = tmp_path / "Eval/list_eval_partition.txt"
    text = listing.read_text()
    # The protocol is part of the dataset: with other queries it is another one.
    listing.write_text(text.replace("   gallery\n", "   query\n", 1))
    other = inshop(tmp_path, size=8)
    assert [len(split.labels) for split in (*other.unseen, other.unseen_gallery) if split] == [2, 1]
    assert other.fingerprint() != dataset.fingerprint()
    # Classes that are drawn have no protocol: they are searched among themselves.
    assert leave_classes_out(dataset, 0.3).unseen_gallery is None
    for status, sentence in {"gallery": "no images of the gallery", "query": "no images to query with"}.items():
        listing.write_text("".join(line for line in text.splitlines(keepends=True) if not line.endswith(f"{status}\n")))
        with pytest.raises(DataError, match=sentence):
            inshop(tmp_path, size=8)


def test_a_class_in_both_lists_is_refused(tmp_path: Path) -> None:
    write_products(tmp_path)
    (tmp_path / "Ebay_test.txt").write_text((tmp_path / "Ebay_train.txt").read_text())
    with pytest.raises(DataError, match="lists the class 1 for training and for testing"):
        online_products(tmp_path)
