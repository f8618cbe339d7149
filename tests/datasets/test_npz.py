from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kedge.datasets import arrays
from kedge.errors import DataError


def save(folder: Path, **changes: object) -> Path:
    generator = np.random.default_rng(0)
    values = {
        "x_train": generator.integers(0, 256, (6, 5, 7, 3), np.uint8),
        "y_train": np.array([0, 1, 2, 0, 1, 2]),
        "x_test": generator.integers(0, 256, (2, 5, 7, 3), np.uint8),
        "y_test": np.array([2, 1], np.uint8),
        "classes": np.array(["cat", "Katze", "кот"]),
    } | changes
    path = folder / "mine.npz"
    np.savez(path, **{name: value for name, value in values.items() if value is not None})
    return path


def test_colour(tmp_path: Path) -> None:
    path = save(tmp_path)
    dataset = arrays(path)
    assert dataset.name == "mine"
    assert dataset.classes == ("cat", "Katze", "кот")
    assert dataset.train.size == (5, 7)
    assert np.array_equal(dataset.train.images.transpose(0, 2, 3, 1), np.load(path)["x_train"])
    assert dataset.test.labels.tolist() == [2, 1]
    assert dataset.flip
    assert not arrays(str(path), flip=False).flip


def test_grey_and_without_names(tmp_path: Path) -> None:
    grey = {"x_train": np.full((6, 5, 7), 9, np.uint8), "x_test": np.full((2, 5, 7), 3, np.uint8)}
    dataset = arrays(save(tmp_path, **grey, classes=None))
    assert dataset.classes == ("0", "1", "2")
    assert dataset.train.images.shape == (6, 3, 5, 7)
    assert (dataset.train.images == 9).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x_test": None}, "lacks x_test: it must hold x_train, y_train, x_test, y_test"),
        ({"x_train": np.zeros((6, 5, 7, 3))}, "x_train .* not float64"),
        ({"x_test": np.zeros((2, 3, 5, 7), np.uint8)}, "x_test .* N x H x W x 3"),
        ({"y_train": np.zeros(5, int)}, "y_train .* 6 images but 5 labels"),
        ({"y_test": np.zeros(2)}, "y_test .* one row of integers"),
        ({"y_train": np.array([0, 1, 2, 0, 1, 3])}, "found 3 in row 5"),
        ({"y_test": np.array([0, -1])}, "found -1 in row 1"),
        ({"y_train": np.zeros(6, int)}, "one class only"),
        ({"y_train": np.array([0, 1, 2, 0, 1, 10**9]), "classes": None}, "a label 1000000000 but 6 training"),
        ({"classes": np.array(["a", "b", "a"])}, "two classes named 'a'"),
        ({"classes": np.array(["a", "b", None], dtype=object)}, "plain arrays"),
        ({"x_test": np.zeros((2, 9, 9, 3), np.uint8)}, "one size"),
    ],
)
def test_bad_arrays(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        arrays(save(tmp_path, **changes))


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        arrays(tmp_path / "absent.npz")
    for content in (b"", b"text", save(tmp_path).read_bytes()[:400]):
        (tmp_path / "bad.npz").write_bytes(content)
        with pytest.raises(DataError, match=r"bad\.npz cannot be read"):
            arrays(tmp_path / "bad.npz")
    np.save(tmp_path / "one.npy", np.zeros(3))
    with pytest.raises(DataError, match="cannot be read"):
        arrays(tmp_path / "one.npy")
