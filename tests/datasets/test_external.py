"""Datasets of PyTorch and Hugging Face as Kedge's: the same pictures, labels and classes, each decoded once."""

from __future__ import annotations

import io
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, IterableDataset, Subset
from torch.utils.data import Dataset as TorchDataset
from torchvision.datasets import FakeData, ImageFolder
from torchvision.transforms import PILToTensor, ToTensor

from kedge.config.compose import build_dataset, compose
from kedge.datasets import as_dataset, folder, huggingface, is_external, stored
from kedge.datasets.cache import keep
from kedge.datasets.download import data_root
from kedge.datasets.external import HuggingFaceSource, train_and_test
from kedge.errors import ConfigError, DataError, DownloadError
from kedge.images import Preprocessing

datasets = pytest.importorskip("datasets")


class Own(TorchDataset):  # type: ignore[type-arg]
    """A dataset as people write them; counts how often each item is read."""

    def __init__(self, items: list[tuple[Any, Any]], classes: list[str] | None = None) -> None:
        self.items, self.read = items, Counter[int]()
        if classes:
            self.classes = classes

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, row: int) -> tuple[Any, Any]:
        self.read[row] += 1
        return self.items[row]


def arrays(count: int, side: int = 8) -> list[np.ndarray]:
    return list(np.random.default_rng(0).integers(256, size=(count, side, side, 3), dtype=np.uint8))


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEDGE_DATA", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "huggingface")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Class folders with pictures of several shapes."""
    generator = np.random.default_rng(0)
    for name in ("apple", "pear"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for index in range(10):
            pixels = generator.integers(256, size=(30 + index, 40, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{index}.png")
    return tmp_path / "photos"


def everything(dataset: Any) -> dict[bytes, str]:
    """Each picture's pixels, and the name of its class."""
    found = {}
    for split in (dataset.train, dataset.test):
        for pixels, label in zip(split.take(range(len(split))).numpy(), split.labels, strict=True):
            found[pixels.tobytes()] = dataset.classes[label]
    return found


def test_kinds_of_pictures_and_labels_are_one() -> None:
    pictures = arrays(20)
    wanted = {picture.transpose(2, 0, 1).tobytes(): "ab"[row % 2] for row, picture in enumerate(pictures)}
    kinds = (
        [(Image.fromarray(picture), row % 2) for row, picture in enumerate(pictures)],
        [(picture, np.int64(row % 2)) for row, picture in enumerate(pictures)],
        [(torch.from_numpy(picture).permute(2, 0, 1), torch.tensor(row % 2)) for row, picture in enumerate(pictures)],
        [(Image.fromarray(picture), "ab"[row % 2]) for row, picture in enumerate(pictures)],
    )
    for items in kinds:
        dataset = as_dataset(Own(items, None if isinstance(items[0][1], str) else ["a", "b"]))
        assert dataset.classes == ("a", "b")
        assert (len(dataset.train), len(dataset.test)) == (18, 2)
        assert everything(dataset) == wanted
    # The same content is kept once, whatever gave it.
    assert len(list(keep(*train_and_test(Own(kinds[0], ["a", "b"]))).parent.glob("*.npy"))) == 1


def test_each_picture_is_read_once_but_for_a_few_looks_at_their_size() -> None:
    source = Own([(picture, row % 2) for row, picture in enumerate(arrays(60))])
    path = keep(*train_and_test(source), size=8)
    assert set(source.read.values()) == {1}
    before = path.stat().st_mtime_ns
    opened = stored(path)
    assert isinstance(opened.train.images, np.memmap)
    assert path.stat().st_mtime_ns == before
    source.read.clear()
    keep(*train_and_test(source))
    assert sum(source.read.values()) == 60 + 16


def test_torchvision_s_folders_are_ours(photos: Path) -> None:
    theirs, ours = as_dataset(ImageFolder(photos), size=24), folder(photos, size=24)
    assert theirs.classes == ours.classes
    assert everything(theirs) == everything(ours)
    assert theirs.train.labels.tolist() == ours.train.labels.tolist()


def test_subsets_chains_and_splits_by_name(photos: Path) -> None:
    whole = ImageFolder(photos)
    train, test = Subset(whole, [0, 1, 2, 10, 11, 12]), Subset(whole, [13, 3])
    dataset = as_dataset({"train": train, "test": test}, size=24)
    assert dataset.classes == ("apple", "pear")
    assert (dataset.train.labels.tolist(), dataset.test.labels.tolist()) == ([0, 0, 0, 1, 1, 1], [1, 0])
    joined = as_dataset(ConcatDataset([train, test]), size=24)
    assert joined.classes == ("0", "1")
    assert len(joined.train) + len(joined.test) == 8
    with pytest.raises(DataError, match="train and optionally test"):
        as_dataset({"training": train})


def test_fake_data_and_sizes() -> None:
    fake = FakeData(size=30, image_size=(3, 20, 20), num_classes=3)
    dataset = as_dataset(fake)
    assert (dataset.name, dataset.train.size, dataset.classes) == ("FakeData", (20, 20), ("0", "1", "2"))
    assert as_dataset(fake, size=12).train.size == (12, 12)
    assert as_dataset(fake, most=16).train.size == (16, 16)
    mixed = Own([(Image.new("RGB", (20 + row, 20)), row % 2) for row in range(20)])
    assert as_dataset(mixed, most=64).train.size == (64, 64)
    with pytest.raises(DataError, match=r"item \d+ of FakeData must .* found .* of float32: leave ToTensor"):
        as_dataset(FakeData(size=4, image_size=(3, 8, 8), transform=ToTensor()))
    assert everything(as_dataset(FakeData(size=20, image_size=(3, 8, 8), num_classes=2, transform=PILToTensor())))


def test_classes_in_the_order_of_a_model(photos: Path) -> None:
    dataset = as_dataset(ImageFolder(photos), size=24, classes=("plum", "pear", "apple"))
    assert dataset.classes == ("plum", "pear", "apple")
    assert everything(dataset) == everything(folder(photos, size=24))
    with pytest.raises(DataError, match="'pear'"):
        as_dataset(ImageFolder(photos), size=24, classes=("apple", "plum"))


def test_unreadable_pictures_are_skipped_and_listed(photos: Path) -> None:
    (photos / "pear" / "3.png").write_bytes(b"no picture")
    dataset = as_dataset(ImageFolder(photos), size=24)
    assert len(dataset.train) + len(dataset.test) == 19
    ((path, reason),) = dataset.skipped
    assert path == str(photos / "pear" / "3.png")
    assert "cannot be read" in reason


@pytest.mark.parametrize(
    ("items", "words"),
    [
        ([(np.zeros((8, 8, 3), np.float64), 0)], "float64: leave ToTensor"),
        ([(np.zeros((3, 8, 8), np.uint8), 0)], "H x W x 3"),
        ([(np.zeros((0, 8, 3), np.uint8), 0)], "found 0 x 8 x 3"),
        ([("photo.png", 0)], "found a str"),
        ([np.zeros((8, 8, 3), np.uint8)], "an image and its label"),
        ([(np.zeros((8, 8, 3), np.uint8), [0, 1])], "label"),
        ([(np.zeros((8, 8, 3), np.uint8), 0)], "one class only"),
        ([(np.zeros((8, 8, 3), np.uint8), label) for label in (0, 9)], "number the classes from 0"),
        ([], "no images"),
    ],
)
def test_what_cannot_be_used_is_one_sentence(items: list[Any], words: str) -> None:
    with pytest.raises(DataError, match=words) as caught:
        as_dataset(Own(items))
    assert "\n" not in str(caught.value)
    assert not list(data_root().rglob("*.npy"))


def test_a_stream_has_no_numbers() -> None:
    class Stream(IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            yield 0

    assert is_external(Stream())
    with pytest.raises(DataError, match="map-style"):
        as_dataset(Stream())
    assert not any(map(is_external, ("photos", Path("photos"), ["a.png"], {}, {"train": "photos"}, 3)))


def test_what_was_kept_and_is_gone(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="pass the dataset again"):
        stored(tmp_path / "nothing.npy")


def test_decoding_in_threads_reads_one_at_a_time() -> None:
    inside = threading.Lock()

    class Single(Own):
        def __getitem__(self, row: int) -> tuple[Any, Any]:
            assert inside.acquire(blocking=False)
            try:
                return super().__getitem__(row)
            finally:
                inside.release()

    assert len(as_dataset(Single([(picture, row % 2) for row, picture in enumerate(arrays(40))])).train) == 36


# ---------------------------------------------------------------------- Hugging Face


def encoded(pixels: np.ndarray) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def table(count: int = 20, **more: Any) -> Any:
    """A dataset with PNGs inside, a ClassLabel and a column that is beside the point."""
    values = {
        "id": [f"no. {row}" for row in range(count)],
        "photo": [{"bytes": encoded(pixels), "path": None} for pixels in arrays(count)],
        "kind": [row % 2 for row in range(count)],
    }
    kinds = {
        "id": datasets.Value("string"),
        "photo": datasets.Image(),
        "kind": datasets.ClassLabel(names=["wet", "dry"]),
    }
    return datasets.Dataset.from_dict(values | more, features=datasets.Features(kinds))


WANTED = {picture.transpose(2, 0, 1).tobytes(): ("wet", "dry")[row % 2] for row, picture in enumerate(arrays(20))}


def test_columns_are_found_by_type() -> None:
    dataset = as_dataset(table())
    assert dataset.classes == ("wet", "dry")
    assert everything(dataset) == WANTED
    source = HuggingFaceSource(table())
    assert (source.image, source.label) == ("photo", "kind")
    assert source.content(3) == encoded(arrays(20)[3])


def test_saved_to_disk_and_read_from_the_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    split = datasets.DatasetDict(train=table().select(range(14)), test=table().select(range(14, 20)))
    split.save_to_disk(tmp_path / "saved")
    node = compose(["dataset=huggingface", f"dataset.path={tmp_path / 'saved'}"]).dataset
    dataset = build_dataset(node)
    assert dataset.name == "saved"
    assert (len(dataset.train), len(dataset.test)) == (14, 6)
    assert everything(dataset) == WANTED
    # A second time nothing is decoded but what tells the size.
    monkeypatch.setattr(Preprocessing, "to_pixels", lambda *_: pytest.fail("decoded again"))
    assert build_dataset(node).fingerprint() == dataset.fingerprint()


def test_folders_of_pictures_and_of_parquet(photos: Path, tmp_path: Path) -> None:
    theirs, ours = huggingface(photos, size=24), folder(photos, size=24)
    assert theirs.classes == ours.classes
    assert everything(theirs) == everything(ours)
    (photos / "pear" / "0.png").write_bytes((photos / "apple" / "5.png").read_bytes())
    assert everything(huggingface(photos, size=24)) != everything(ours)
    (tmp_path / "parquet").mkdir()
    table().to_parquet(tmp_path / "parquet" / "train.parquet")
    assert everything(huggingface(tmp_path / "parquet")) == WANTED


def test_files_that_a_dataset_refers_to_may_change(photos: Path) -> None:
    def refer() -> Any:
        files = sorted(photos.rglob("*.png"))
        values = {"image": [str(file) for file in files], "label": [file.parent.name for file in files]}
        return datasets.Dataset.from_dict(values).cast_column("image", datasets.Image())

    assert everything(as_dataset(refer(), size=24)) == everything(folder(photos, size=24))
    Image.new("RGB", (40, 40), "white").save(photos / "apple" / "0.png")
    assert everything(as_dataset(refer(), size=24)) == everything(folder(photos, size=24))
    assert HuggingFaceSource(refer()).path(0) == str(photos / "apple" / "0.png")


def test_hidden_labels_and_other_splits() -> None:
    hidden = table().map(lambda _: {"kind": -1}, features=table().features)
    split = {"train": table().select(range(10)), "validation": table().select(range(10, 20)), "test": hidden}
    dataset = as_dataset(datasets.DatasetDict(split))
    assert (len(dataset.train), len(dataset.test)) == (10, 10)
    assert everything(dataset) == WANTED
    alone = as_dataset(datasets.DatasetDict(train=table()))
    assert (len(alone.train), len(alone.test)) == (18, 2)
    with pytest.raises(DataError, match="named train"):
        as_dataset(datasets.DatasetDict(a=table(), b=table()))


def test_which_columns_is_asked_where_it_is_not_clear() -> None:
    two = table().add_column("fine", list(range(20))).cast_column("fine", datasets.ClassLabel(num_classes=20))
    with pytest.raises(DataError, match=r"several label columns: choose one with dataset\.label=…, of kind, fine"):
        as_dataset(two)
    assert as_dataset(two, label="kind").classes == ("wet", "dry")
    with pytest.raises(DataError, match="no column 'colour'"):
        as_dataset(two, label="colour")
    with pytest.raises(DataError, match="no image column"):
        as_dataset(table().remove_columns("photo"))
    with pytest.raises(DataError, match="without streaming"):
        as_dataset(table().to_iterable_dataset())


def test_neither_a_folder_nor_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DownloadError, match=r"save_to_disk and pass that folder as dataset\.path"):
        huggingface("nobody/nothing")
    with pytest.raises(DataError, match="does not exist"):
        huggingface(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="cannot be read as a Hugging Face dataset"):
        huggingface(tmp_path / "empty")
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"kedge\[huggingface\]"):
        huggingface("nobody/nothing")
