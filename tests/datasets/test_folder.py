from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from kedge.datasets import cache, folder
from kedge.datasets.folder import FileSource
from kedge.errors import ConfigError, DataError
from kedge.images import Preprocessing

COLOURS = ("red", "lime", "blue", "white")


def fill(base: Path, counts: dict[str, int], size: tuple[int, int] = (40, 30)) -> Path:
    for colour, (name, count) in zip(COLOURS, counts.items(), strict=False):
        (base / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            Image.new("RGB", size, colour).save(base / name / f"{number:03} ж.png")
    return base


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return tmp_path / "my photos"


def test_class_folders(photos: Path) -> None:
    fill(photos, {"cat": 20, "собака": 10, "eel": 3})
    dataset = folder(photos, size=16)
    assert dataset.name == "my photos"
    assert dataset.classes == ("cat", "eel", "собака")
    assert np.bincount(dataset.train.labels).tolist() == [18, 2, 9]
    assert np.bincount(dataset.test.labels).tolist() == [2, 1, 1]
    assert dataset.train.size == (16, 16)
    assert dataset.skipped == ()
    for split in (dataset.train, dataset.test):
        means = split.take(range(len(split))).float().mean((2, 3)).tolist()
        colours = {0: [255, 0, 0], 1: [0, 0, 255], 2: [0, 255, 0]}
        assert means == [colours[label] for label in split.labels.tolist()]
        assert split.paths is not None
        names = [dataset.classes[label] for label in split.labels]
        assert [Path(path).parent.name for path in split.paths] == names
    assert dataset.train.paths is not None
    assert dataset.test.paths is not None
    assert not set(dataset.train.paths) & set(dataset.test.paths)
    other = folder(str(photos), size=16, test_fraction=0.5, seed=1)
    assert len(other.test) == 10 + 5 + 2


@pytest.mark.parametrize("held_out", ["test", "val"])
def test_given_splits(photos: Path, held_out: str) -> None:
    fill(photos / "train", {"b": 3, "a": 2})
    fill(photos / held_out, {"b": 1})
    dataset = folder(photos, size=8)
    assert dataset.classes == ("a", "b")
    assert dataset.train.labels.tolist() == [0, 0, 1, 1, 1]
    assert dataset.test.labels.tolist() == [1]
    assert dataset.test.take([0]).float().mean((2, 3)).tolist() == [[255, 0, 0]]


def test_classes_that_are_called_train_and_test(photos: Path) -> None:
    fill(photos, {"train": 4, "test": 4})
    assert folder(photos, size=8).classes == ("test", "train")


def test_unknown_class_in_test(photos: Path) -> None:
    fill(photos / "train", {"a": 2, "b": 2})
    fill(photos / "test", {"a": 1, "z": 1})
    with pytest.raises(DataError, match="class 'z' but no training images"):
        folder(photos, size=8)


def test_unreadable_and_loose_pictures_are_listed(photos: Path) -> None:
    fill(photos, {"a": 5, "b": 5})
    (photos / "a" / "empty.jpg").touch()
    (photos / "b" / "text.jpg").write_text("not a picture")
    (photos / "b" / "cut.png").write_bytes((photos / "b" / "000 ж.png").read_bytes()[:40])
    (photos / "c").mkdir()
    (photos / "c" / "only.gif").touch()
    (photos / "b" / "lost.jpg").symlink_to("nowhere.jpg")
    Image.new("RGB", (9, 9)).save(photos / "loose.png")
    for _ in range(2):  # decoded, then opened
        dataset = folder(photos, size=8)
        assert dataset.classes == ("a", "b")
        reasons = {Path(path).relative_to(photos).as_posix(): reason for path, reason in dataset.skipped}
        assert set(reasons) == {
            "a/empty.jpg",
            "b/text.jpg",
            "b/cut.png",
            "c/only.gif",
            "b/lost.jpg",
            "loose.png",
        }
        assert "empty" in reasons["a/empty.jpg"]
        assert "outside the class folders" in reasons["loose.png"]
        assert len(dataset.train) + len(dataset.test) == 10


def test_bad_folders(photos: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        folder(photos)
    photos.mkdir()
    with pytest.raises(DataError, match="has no images"):
        folder(photos)
    Image.new("RGB", (9, 9)).save(photos / "loose.png")
    with pytest.raises(DataError, match="images but no class folders"):
        folder(photos)
    with pytest.raises(DataError, match="is a file"):
        folder(photos / "loose.png")
    fill(photos, {"a": 4})
    with pytest.raises(DataError, match=r"one class only \('a'\)"):
        folder(photos)
    with pytest.raises(ConfigError, match="size"):
        folder(photos, size=0)
    fill(photos, {"a": 4, "b": 4})
    with pytest.raises(ConfigError, match="fraction"):
        folder(photos, test_fraction=1.5)


def test_mostly_unreadable(photos: Path) -> None:
    fill(photos, {"a": 2, "b": 2})
    for number in range(5):
        (photos / "a" / f"bad {number}.jpg").touch()
    with pytest.raises(DataError, match=r"5 of 9 images .* cannot be used; the first: .*bad 0\.jpg"):
        folder(photos)


def test_classes_with_one_picture(photos: Path) -> None:
    fill(photos, {"a": 4, "b": 1, "c": 1})
    with pytest.warns(UserWarning, match="single image keep it for training and are not tested: b, c"):
        dataset = folder(photos, size=8)
    assert np.bincount(dataset.train.labels).tolist() == [3, 1, 1]
    assert dataset.test.labels.tolist() == [0]


def test_only_single_pictures(photos: Path) -> None:
    fill(photos, {"a": 1, "b": 1})
    with pytest.raises(DataError, match="none is left to test on"):
        folder(photos, size=8)
    assert len(folder(photos, size=8, test_fraction=0).test) == 0


def test_link_loops(photos: Path) -> None:
    fill(photos, {"a": 2, "b": 2})
    (photos / "a" / "loop").symlink_to(photos / "a")
    assert len(folder(photos, size=8).train) == 2


def test_decoded_once(photos: Path, root: Path, monkeypatch: pytest.MonkeyPatch, leftovers) -> None:
    fill(photos, {"a": 3, "b": 3})
    first = folder(photos, size=8)
    assert isinstance(first.train.images.array, np.memmap)
    assert leftovers() == []
    assert len(list((root / "decoded").iterdir())) == 2
    with monkeypatch.context() as patch:
        patch.setattr(FileSource, "read", lambda *_: pytest.fail("decoded again"))
        assert folder(photos, size=8).fingerprint() == first.fingerprint()


def test_changes_are_noticed_and_the_old_array_goes(photos: Path, root: Path) -> None:
    fill(photos, {"a": 3, "b": 3})
    changing = photos / "b" / "changing.bmp"
    Image.new("RGB", (9, 9), "white").save(changing)
    first, length = folder(photos, size=8).fingerprint(), changing.stat().st_size
    Image.new("RGB", (9, 9), "black").save(changing)
    assert changing.stat().st_size == length
    os.utime(changing, ns=(1, 1))
    second = folder(photos, size=8)
    assert second.fingerprint() != first
    assert len(list((root / "decoded").iterdir())) == 2
    folder(photos, size=9)
    assert len(list((root / "decoded").iterdir())) == 4


@pytest.mark.parametrize("damage", ["notes", "array", "cut"])
def test_damaged_cache_is_made_again(photos: Path, root: Path, damage: str) -> None:
    fill(photos, {"a": 3, "b": 3})
    expected = np.array(folder(photos, size=8).train.images.array)
    array = next((root / "decoded").glob("*.npy"))
    if damage == "notes":
        array.with_suffix(".json").write_text("{")
    elif damage == "array":
        array.unlink()
    else:
        array.write_bytes(array.read_bytes()[:200])
    assert np.array_equal(folder(photos, size=8).train.images.array, expected)


def test_scanned_files_are_decoded_when_pixels_are_asked_for(photos: Path, root: Path) -> None:
    fill(photos, {"a": 30, "b": 20})
    (photos / "a" / "bad.png").touch()
    eager = folder(photos, size=8)
    expected = eager.train.take(range(len(eager.train)))
    for file in (root / "decoded").iterdir():
        file.unlink()

    scanned: list[str] = []

    def scan(files: Sequence[str]) -> dict[int, str]:
        scanned.extend(files)
        return {files.index(str(photos / "a" / "bad.png")): "cannot be read: it is empty (0 bytes)."}

    for _ in range(2):  # scanned, then opened
        lazy = folder(photos, size=8, scan=scan)
        assert lazy.skipped == eager.skipped
        assert lazy.train.paths == lazy.train.files == eager.train.paths
        assert lazy.train.labels.tolist() == eager.train.labels.tolist()
        assert lazy.fingerprint() == eager.fingerprint()
    assert len(scanned) == 51
    lazy = folder(photos, size=8)  # later, without an encoder at hand
    assert torch.equal(lazy.train.take([3, 1]), expected[[3, 1]])
    assert [file.suffix for file in (root / "decoded").iterdir()] == [".json"]
    copy = pickle.loads(pickle.dumps(lazy.train))
    assert torch.equal(copy.take(range(len(copy))), expected)
    assert torch.equal(lazy.train.take(range(len(lazy.train))), expected)


def test_the_work_of_scanning_grows_with_the_files_alone(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = []
    labels = FileSource.labels
    monkeypatch.setattr(FileSource, "labels", lambda self: listed.append(1) or labels(self))
    fill(photos, {"a": 30, "b": 20})
    folder(photos, size=8, scan=lambda _: {})
    assert len(listed) < 5  # not once for each file


def test_files_that_change_before_they_are_decoded(photos: Path) -> None:
    fill(photos, {"a": 3, "b": 3})
    dataset = folder(photos, size=8, scan=lambda _: {})
    Image.new("RGB", (9, 9), "black").save(next((photos / "a").iterdir()))
    with pytest.raises(DataError, match="has changed since it was listed"):
        _ = dataset.train.images.array


def test_interrupted_decoding_leaves_nothing(photos: Path, root: Path, monkeypatch, leftovers) -> None:
    fill(photos, {"a": 3, "b": 3})

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(FileSource, "read", interrupt)
        with pytest.raises(KeyboardInterrupt):
            folder(photos, size=8)
    assert list((root / "decoded").iterdir()) == []
    assert leftovers() == []
    assert len(folder(photos, size=8).train) == 4


def test_no_room(photos: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(photos, {"a": 3, "b": 3})
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
    with pytest.raises(DataError, match=r"GiB are free.* KEDGE_DATA"):
        folder(photos, size=8)


def test_a_root_that_cannot_be_written(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(photos, {"a": 3, "b": 3})
    (tmp_path / "file").touch()
    monkeypatch.setenv("KEDGE_DATA", str(tmp_path / "file"))
    with pytest.raises(DataError, match=r"cannot be stored in .*KEDGE_DATA"):
        folder(photos, size=8)


def test_crop_and_interpolation(photos: Path) -> None:
    """Decoded as a model's Preprocessing decodes; each way has an array of its own."""
    rng = np.random.default_rng(0)
    fill(photos, {"a": 2, "b": 2})
    for file in photos.rglob("*.png"):
        Image.fromarray(rng.integers(0, 256, (30, 40, 3), dtype=np.uint8)).save(file)
    for options in (
        {},
        {"crop_pct": 0.8},
        {"interpolation": "bicubic"},
        {"crop_pct": 0.8, "interpolation": "bicubic"},
        {},
    ):
        dataset = folder(photos, size=16, **options)
        preprocessing = Preprocessing(size=16, **options)
        assert (dataset.crop_pct, dataset.interpolation) == (preprocessing.crop_pct, preprocessing.interpolation)
        assert dataset.train.paths is not None
        for row, path in enumerate(dataset.train.paths):
            with Image.open(path) as image:
                assert np.array_equal(dataset.train.take([row])[0].numpy(), preprocessing.to_pixels(image))
