"""The four datasets of the paper, the whole road: tiny archives of the real layout from a local server."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kedge.datasets import cifar100, food101, svhn, tiny_imagenet
from kedge.datasets.download import Source
from kedge.errors import ConfigError, DataError, DownloadError


def jpeg(colour: str, size: tuple[int, int] = (64, 64), mode: str = "RGB") -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", size, colour).convert(mode).save(stream, "JPEG", quality=95)
    return stream.getvalue()


def offline(source: Source) -> Source:
    return Source(f"http://127.0.0.1:9/{source.filename}", source.checksum)


def cifar_archive(pack) -> tuple[bytes, np.ndarray]:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 3, 32, 32), np.uint8)
    records = [bytes([19, label]) + image.tobytes() for label, image in zip([2, 0, 1, 1, 2], pixels, strict=True)]
    members = {
        "cifar-100-binary/train.bin": b"".join(records[:3]),
        "cifar-100-binary/test.bin": b"".join(records[3:]),
        "cifar-100-binary/fine_label_names.txt": b"apple\naquarium_fish\nbaby\n\n",
        "cifar-100-binary/coarse_label_names.txt": b"fruit\n",
    }
    return pack(members), pixels


def test_cifar100(server, pack, root: Path) -> None:
    content, pixels = cifar_archive(pack)
    source = server.source("cifar-100-binary.tar.gz", content)
    dataset = cifar100(source=source)
    assert dataset.classes == ("apple", "aquarium_fish", "baby")
    assert dataset.train.labels.tolist() == [2, 0, 1]
    assert dataset.test.labels.tolist() == [1, 2]
    assert np.array_equal(dataset.train.images, pixels[:3])
    assert np.array_equal(dataset.test.images, pixels[3:])
    assert dataset.flip
    again = cifar100(root, source=offline(source))
    assert again.fingerprint() == dataset.fingerprint()
    assert len(server.requests) == 1


def test_cifar100_cut_short(server, pack, root: Path) -> None:
    source = server.source("cifar-100-binary.tar.gz", cifar_archive(pack)[0])
    cifar100(source=source)
    file = root / "cifar-100-binary" / "test.bin"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"test\.bin is missing or cut short"):
        cifar100(source=source)
    file.unlink()
    with pytest.raises(DataError, match=r"test\.bin is missing"):
        cifar100(source=source)


def test_cifar100_without_a_network_says_what_to_do(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kedge.datasets.download.PAUSE", 0.0)
    with pytest.raises(DownloadError, match=r"save the file as .*cifar-100-binary\.tar\.gz"):
        cifar100(source=Source("http://127.0.0.1:9/cifar-100-binary.tar.gz", "md5:0"))
    assert [path.name for path in root.iterdir()] == []


def svhn_sources(server) -> tuple[dict[str, Source], dict[str, np.ndarray]]:
    scipy_io = pytest.importorskip("scipy.io")
    generator = np.random.default_rng(0)
    sources, pixels = {}, {}
    for split, labels in {"train": [1, 10, 9], "test": [10, 5]}.items():
        pixels[split] = generator.integers(0, 256, (32, 32, 3, len(labels)), np.uint8)
        stream = io.BytesIO()
        scipy_io.savemat(stream, {"X": pixels[split], "y": np.array(labels, np.uint8)[:, None]})
        sources[split] = server.source(f"{split}_32x32.mat", stream.getvalue())
    return sources, pixels


def test_svhn(server, root: Path) -> None:
    sources, pixels = svhn_sources(server)
    dataset = svhn(sources=sources)
    assert dataset.classes == tuple("0123456789")
    assert dataset.train.labels.tolist() == [1, 0, 9]
    assert dataset.test.labels.tolist() == [0, 5]
    assert not dataset.flip
    for row in range(3):
        assert np.array_equal(dataset.train.images[row].transpose(1, 2, 0), pixels["train"][..., row])
    again = svhn(sources={split: offline(source) for split, source in sources.items()})
    assert again.fingerprint() == dataset.fingerprint()


def test_svhn_with_a_foreign_file(server) -> None:
    sources = {split: server.source(f"{split}_32x32.mat", b"not from Matlab" * 50) for split in ("train", "test")}
    with pytest.raises(DataError, match=r"train_32x32\.mat is not SVHN's"):
        svhn(sources=sources)


def test_svhn_without_scipy(server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.io", None)
    with pytest.raises(ConfigError, match=r"kedge\[svhn\]"):
        svhn()


def food_members() -> dict[str, bytes]:
    return {
        "food-101/meta/classes.txt": b"apple_pie\nwaffles\n",
        "food-101/meta/train.txt": b"apple_pie/10\nwaffles/30\napple_pie/broken\n",
        "food-101/meta/test.txt": b"waffles/40\napple_pie/20\n",
        "food-101/images/apple_pie/10.jpg": jpeg("red", (100, 60)),
        "food-101/images/apple_pie/20.jpg": jpeg("white", (60, 100), "L"),
        "food-101/images/apple_pie/broken.jpg": jpeg("red")[:300],
        "food-101/images/waffles/30.jpg": jpeg("lime"),
        "food-101/images/waffles/40.jpg": jpeg("blue"),
    }


def test_food101(server, pack, root: Path) -> None:
    source = server.source("food-101.tar.gz", pack(food_members()))
    dataset = food101(size=48, source=source)
    assert dataset.classes == ("apple pie", "waffles")
    assert dataset.train.labels.tolist() == [0, 1]
    assert dataset.test.labels.tolist() == [1, 0]
    assert dataset.train.size == (48, 48)
    colours = [image.float().mean((1, 2)).round().int().tolist() for image in dataset.train.take([0, 1])]
    assert np.allclose(colours, [[254, 0, 0], [0, 255, 1]], atol=3)
    assert dataset.train.paths is not None
    assert Path(dataset.train.paths[1]).relative_to(root).as_posix() == "food-101/images/waffles/30.jpg"
    assert [Path(path).name for path, _ in dataset.skipped] == ["broken.jpg"]
    assert "cannot be read" in dataset.skipped[0][1]
    again = food101(size=48, source=offline(source))
    assert again.fingerprint() == dataset.fingerprint()
    assert again.skipped == dataset.skipped


def test_food101_with_a_class_too_many(server, pack) -> None:
    members = food_members() | {"food-101/meta/test.txt": b"soup/1\n", "food-101/images/soup/1.jpg": jpeg("red")}
    with pytest.raises(DataError, match=r"a class 'soup'"):
        food101(source=server.source("food-101.tar.gz", pack(members)))


def test_tiny_imagenet(server, pack, root: Path) -> None:
    top = "tiny-imagenet-200"
    words = b"n01\tcrane, Grus\nn02\tgoldfish, Carassius auratus\nn03\tcrane\nn09\tnot used\n"
    source = server.source(
        "tiny-imagenet-200.zip",
        pack(
            {
                f"{top}/wnids.txt": b"n02\nn01\nn03\n",
                f"{top}/words.txt": words,
                f"{top}/train/n01/images/n01_0.JPEG": jpeg("red"),
                f"{top}/train/n01/images/n01_1.JPEG": jpeg("red", mode="L"),
                f"{top}/train/n01/n01_boxes.txt": b"n01_0.JPEG\t0\t0\t62\t62\n",
                f"{top}/train/n02/images/n02_0.JPEG": jpeg("lime"),
                f"{top}/train/n03/images/n03_0.JPEG": jpeg("blue"),
                f"{top}/val/val_annotations.txt": b"val_0.JPEG\tn03\t0\t0\t1\t1\nval_1.JPEG\tn01\t0\t0\t1\t1",
                f"{top}/val/images/val_0.JPEG": jpeg("blue"),
                f"{top}/val/images/val_1.JPEG": jpeg("red"),
                f"{top}/test/images/test_0.JPEG": jpeg("black"),
            },
            "zip",
        ),
    )
    dataset = tiny_imagenet(source=source)
    assert dataset.classes == ("crane (n01)", "goldfish", "crane (n03)")
    assert dataset.train.labels.tolist() == [0, 0, 1, 2]
    assert dataset.test.labels.tolist() == [2, 0]
    assert dataset.train.size == (64, 64)
    assert dataset.train.take([3])[0].float().mean((1, 2)).argmax() == 2
    assert tiny_imagenet(root, source=offline(source)).fingerprint() == dataset.fingerprint()
