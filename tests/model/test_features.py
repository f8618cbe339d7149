from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import sqlite3
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from kedge.encoders import build_encoder
from kedge.images import Preprocessing
from kedge.model import Model, features
from kedge.model.features import FeatureCache, file_features, vectors_of


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KEDGE_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


def make(seed: int = 0, **options: Any) -> Model:
    torch.manual_seed(seed)
    encoder = build_encoder("timm:test_resnet", dim=8)
    options = {"preprocessing": Preprocessing(size=32), "anchors": None, "classes": (), **options}
    return Model(encoder.eval(), **options)


@pytest.fixture(scope="module")
def model() -> Model:
    return make()


@pytest.fixture
def photos(tmp_path: Path) -> list[Path]:
    """Five images of last year."""
    files = [tmp_path / f"{number}.png" for number in range(5)]
    for number, file in enumerate(files):
        pixels = np.random.default_rng(number).integers(0, 255, (40, 50, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(file)
        os.utime(file, (1e9, 1e9))
    return files


def expected(model: Model, files: list[Path]) -> torch.Tensor:
    """Without the cache, and without the folded network."""
    pixels = torch.stack([torch.from_numpy(model.preprocessing.to_pixels(Image.open(file))) for file in files])
    with torch.no_grad():
        return model.encoder.features(model.preprocessing.to_input(pixels))


def rows(count: int, width: int, seed: int = 0) -> tuple[list[str], torch.Tensor]:
    names = [hashlib.sha256(f"{seed} {number}".encode()).hexdigest() for number in range(count)]
    return names, torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def count(model: Model) -> int:
    with FeatureCache.of(model) as cache:
        assert cache.file is not None
    with contextlib.closing(sqlite3.connect(cache.file)) as database:
        return int(database.execute("SELECT count(*) FROM features").fetchone()[0])


def test_what_was_put_is_found_bit_for_bit(model: Model) -> None:
    names, values = rows(10, model.width)
    with FeatureCache.of(model) as cache:
        cache.put(names[:7], values[:7])
        assert torch.equal(cache.get(names[:7])[0], values[:7])  # before it is written
    with FeatureCache.of(model) as cache:
        found, missing = cache.get([*names, None])
    assert torch.equal(found[:7], values[:7])
    assert missing == [7, 8, 9, 10]


def test_features_are_kept_by_encoder_and_not_by_head(model: Model) -> None:
    names, values = rows(3, model.width)
    with FeatureCache.of(model) as cache:
        cache.put(names, values)
    other_head = make(anchors=torch.zeros(2, 8), classes=("a", "b"))
    with torch.no_grad():
        other_head.encoder.head.weight += 1
    assert count(other_head) == 3
    changed = make()
    with torch.no_grad():
        next(changed.encoder.backbone.parameters()).view(-1)[0] += 1e-6
    mean = Preprocessing(size=32, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
    for other in (changed, make(1), make(preprocessing=Preprocessing(size=40)), make(preprocessing=mean)):
        assert count(other) == 0


@pytest.mark.parametrize("place", ["digest", "feature", "checksum", "cut", "empty", "header", "text"])
def test_damaged_features_are_computed_anew(
    place: str, model: Model, photos: list[Path], root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clean, _ = file_features(model, photos)
    torch.testing.assert_close(clean, expected(model, photos), rtol=1e-4, atol=1e-4)
    (file,) = root.glob("features/*")
    content = file.read_bytes()
    with contextlib.closing(sqlite3.connect(file)) as database, database:
        digest, features, crc = database.execute("SELECT * FROM features").fetchone()
        changed = {"digest": digest, "feature": features, "checksum": crc.to_bytes(4)}.get(place)
        if changed is not None:
            changed = bytes([changed[0] ^ 0x10]) + changed[1:]
            column, value = {"digest": ("digest", changed), "feature": ("features", changed)}.get(
                place, ("crc", int.from_bytes(changed))
            )
            database.execute(f"UPDATE features SET {column} = ? WHERE digest = ?", (value, digest))
    whole = {
        "cut": content[:5000],
        "empty": b"",
        "header": content[:99] + b"?" * 999 + content[1098:],
        "text": b"?" * 9999,
    }
    if place in whole:
        file.write_bytes(whole[place])
    with caplog.at_level(logging.WARNING):
        found, unreadable = file_features(model, photos)
    assert torch.equal(found, clean)
    assert not unreadable
    # A damaged digest is that of no image.
    assert bool(caplog.records) == (place not in ("digest", "empty"))
    for _ in range(2):
        caplog.clear()
        found, _ = file_features(model, photos)
        assert torch.equal(found, clean)
    assert not caplog.records


def test_known_files_are_neither_read_nor_decoded(
    model: Model, photos: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = file_features(model, photos)

    def fail(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(features, "read_image", fail)
    moved = photos[0].with_name("moved.png")
    shutil.copy2(photos[0], moved)
    second, unreadable = file_features(model, [moved, *photos[1:]])  # by content, not by name
    assert torch.equal(second, first)
    assert not unreadable
    monkeypatch.setattr(Path, "read_bytes", fail)
    assert torch.equal(file_features(model, photos)[0], first)


def test_a_changed_file_is_encoded_anew(model: Model, photos: list[Path]) -> None:
    before, _ = file_features(model, photos)
    shutil.copy(photos[3], photos[1])
    after, _ = file_features(model, photos)
    assert torch.equal(after[1], before[3])
    assert torch.equal(after[[0, 2, 3, 4]], before[[0, 2, 3, 4]])


def test_unreadable_files_are_told(model: Model, photos: list[Path], tmp_path: Path) -> None:
    (tmp_path / "empty.png").touch()
    (tmp_path / "cut.png").write_bytes(photos[0].read_bytes()[:100])
    files = [photos[0], tmp_path / "empty.png", photos[1], tmp_path / "cut.png", tmp_path / "nothing.png"]
    for _ in range(2):
        found, unreadable = file_features(model, files)
        assert unreadable.keys() == {1, 3, 4}
        assert unreadable[1] == "cannot be read: it is empty (0 bytes)."
        assert "No such file" in unreadable[4]
        torch.testing.assert_close(found[[0, 2]], expected(model, photos[:2]), rtol=1e-4, atol=1e-4)


def test_off_and_a_full_disk(
    model: Model,
    photos: list[Path],
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(features, "_TABLE", "PRAGMA max_page_count = 1")
        found, _ = file_features(model, photos)
        torch.testing.assert_close(found, expected(model, photos), rtol=1e-4, atol=1e-4)
    assert "not cached" in caplog.text
    shutil.rmtree(root / "features")
    monkeypatch.setenv("KEDGE_FEATURES", "off")
    assert torch.equal(file_features(model, photos)[0], found)
    assert not (root / "features").exists()


def test_writers_side_by_side(model: Model) -> None:
    def write(seed: int) -> None:
        names, values = rows(20, model.width, seed)
        for start in range(0, 20, 4):
            with FeatureCache.of(model) as cache:
                cache.put(names[start : start + 4], values[start : start + 4])

    threads = [threading.Thread(target=write, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    cache = FeatureCache.of(model)
    for seed in range(4):
        names, values = rows(20, model.width, seed)
        found, missing = cache.get(names)
        assert missing == []
        assert torch.equal(found, values)


def test_vectors_of_pixels_and_of_features(model: Model, photos: list[Path]) -> None:
    direct = model.vectors(photos)
    names = [hashlib.sha256(file.read_bytes()).hexdigest() for file in photos]
    pixels = [torch.from_numpy(model.preprocessing.to_pixels(Image.open(file))) for file in photos]
    mixed = [pixels[0], direct.features[1], pixels[2], *direct.features[3:]]
    with FeatureCache.of(model) as cache:
        vectors = vectors_of(model, names, mixed, cache)
        assert cache.get(names)[1] == [1, 3, 4]
    for got, wanted in zip(vectors, direct, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
