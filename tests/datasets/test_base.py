from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import kedge.datasets
from kedge.datasets import Dataset, ImageSplit
from kedge.errors import DataError


def pictures(count: int = 10, side: int = 4, seed: int = 0, classes: int = 3) -> ImageSplit:
    images = np.random.default_rng(seed).integers(0, 256, (count, 3, side, side), np.uint8)
    return ImageSplit(images, np.arange(count) % classes, paths=tuple(f"{row}.jpg" for row in range(count)))


def dataset(**changes: object) -> Dataset:
    parts = {"name": "mine", "classes": ("a", "b", "c"), "train": pictures(), "test": pictures(4, seed=1)}
    return Dataset(**{**parts, **changes})


@pytest.mark.parametrize("convert", [list, np.array, torch.tensor])
def test_take_and_batches(convert) -> None:
    split = pictures()
    batch = split.take(convert([3, 3, 0]))
    assert batch.dtype == torch.uint8
    assert np.array_equal(batch.numpy(), split.images[[3, 3, 0]])
    images, labels = split.__getitems__(convert([3, 3, 0]))
    assert torch.equal(images, batch)
    assert labels.dtype == torch.int64
    assert labels.tolist() == [0, 0, 0]


def test_a_batch_is_a_copy(tmp_path: Path) -> None:
    before = pictures().images.copy()
    np.save(tmp_path / "images.npy", before)
    for images in (before.copy(), np.load(tmp_path / "images.npy", mmap_mode="r")):
        split = ImageSplit(images, pictures().labels)
        split.take([0, 1]).zero_()
        split.subset([0, 1]).take([0]).zero_()
        assert np.array_equal(split.images, before)


def test_subsets_of_subsets_share_the_images() -> None:
    split = pictures()
    view = split.subset([9, 2, 5, 7]).subset([3, 0])
    assert view.images is split.images
    assert view.labels.tolist() == split.labels[[7, 9]].tolist()
    assert view.paths == ("7.jpg", "9.jpg")
    assert np.array_equal(view.take([0, 1]).numpy(), split.images[[7, 9]])
    assert len(view) == 2
    assert view.size == (4, 4)
    assert len(split.subset([])) == 0


def test_data_loader_fetches_whole_batches() -> None:
    loader = DataLoader(pictures(), batch_size=4, collate_fn=lambda batch: batch)
    batches = list(loader)
    assert [len(labels) for _, labels in batches] == [4, 4, 2]
    assert np.array_equal(torch.cat([images for images, _ in batches]).numpy(), pictures().images)


def test_memory_mapped_pictures_travel_by_name(tmp_path: Path) -> None:
    split = pictures(200, 32)
    np.save(tmp_path / "images.npy", split.images)
    mapped = ImageSplit(np.load(tmp_path / "images.npy", mmap_mode="r"), split.labels)
    sent = pickle.dumps(mapped.subset(range(10, 20)))
    assert len(sent) < 2000
    received = pickle.loads(sent)
    assert isinstance(received.images, np.memmap)
    assert np.array_equal(received.take([0, 9]).numpy(), split.images[[10, 19]])
    part = ImageSplit(mapped.images[5:8], split.labels[:3])  # a slice knows its file, but not its place in it
    assert np.array_equal(pickle.loads(pickle.dumps(part)).images, split.images[5:8])
    assert np.array_equal(pickle.loads(pickle.dumps(split)).images, split.images)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"images": np.zeros((2, 3, 4, 4), np.float32)}, "uint8 of shape M x 3 x H x W, not float32"),
        ({"images": np.zeros((2, 4, 4, 3), np.uint8)}, "M x 3 x H x W"),
        ({"images": np.zeros((2, 4, 4), np.uint8)}, "M x 3 x H x W"),
        ({"labels": np.zeros(3, np.int64)}, "2 images but 3 labels"),
        ({"labels": np.zeros(2)}, "labels must be one row of integers"),
        ({"labels": np.zeros((2, 1), np.int64)}, "labels must be one row of integers"),
        ({"paths": ("a",)}, "2 images but 1 paths"),
        ({"rows": np.array([0, 2])}, "rows must lie between 0 and 1"),
        ({"rows": np.array([-1, 0])}, "rows must lie between 0 and 1"),
        ({"rows": np.array([0.0, 1.0])}, "rows must be one row of integers"),
    ],
)
def test_bad_pictures(bad: dict[str, object], message: str) -> None:
    good = {"images": np.zeros((2, 3, 4, 4), np.uint8), "labels": np.zeros(2, np.int64)}
    with pytest.raises(DataError, match=message):
        ImageSplit(**{**good, **bad})


def test_labels_of_any_integer_type() -> None:
    split = ImageSplit(np.zeros((2, 3, 4, 4), np.uint8), np.array([0, 1], np.uint8))
    assert split.labels.dtype == np.int64


def test_labels_out_of_range_are_named_with_their_row() -> None:
    labels = np.array([0, 1, 2, 3, 9])
    bad = ImageSplit(np.zeros((5, 3, 4, 4), np.uint8), labels)
    with pytest.raises(DataError, match="train labels of mine must lie between 0 and 2: found 3 in row 3"):
        dataset(train=bad)
    with pytest.raises(DataError, match=r"test labels .* found -1 in row 0"):
        dataset(test=ImageSplit(bad.images, labels - 1))


def test_other_bad_datasets() -> None:
    with pytest.raises(DataError, match="at least two"):
        dataset(classes=("a",))
    with pytest.raises(DataError, match="two classes named 'a'"):
        dataset(classes=("a", "b", "a"))
    with pytest.raises(DataError, match="one size"):
        dataset(test=pictures(4, side=5))
    with pytest.raises(DataError, match="no training images"):
        dataset(train=pictures().subset([]))
    assert len(dataset(test=pictures().subset([])).test) == 0


def test_fingerprint_tells_every_label_and_pixel() -> None:
    original = dataset()
    assert original.fingerprint() == dataset().fingerprint()
    assert len(original.fingerprint()) == 16
    images = original.train.images.copy()
    images[-1, -1, -1, -1] ^= 1
    labels = original.test.labels.copy()
    labels[-1] = (labels[-1] + 1) % 3
    changed = [
        dataset(train=ImageSplit(images, original.train.labels)),
        dataset(test=ImageSplit(original.test.images, labels)),
        dataset(train=original.train.subset(range(9))),
        dataset(train=original.train.subset([1, 0, *range(2, 10)])),
    ]
    assert len({original.fingerprint(), *(one.fingerprint() for one in changed)}) == 5
    assert dataset(train=original.train.subset(range(10))).fingerprint() == original.fingerprint()


def test_old_names_are_accepted_with_a_warning() -> None:
    with pytest.warns(DeprecationWarning, match="Pictures is now ImageSplit"):
        assert kedge.datasets.Pictures is ImageSplit
    with pytest.raises(AttributeError, match="Photos"):
        kedge.datasets.Photos  # noqa: B018
