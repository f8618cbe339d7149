from __future__ import annotations

import io
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kedge.encoders import build_encoder
from kedge.errors import ConfigError, DataError, GalleryError
from kedge.gallery import Added, Gallery, ingest
from kedge.gallery.ingest import index_folder
from kedge.images import Preprocessing
from kedge.model import Model

ODD = 'it\'s "50%" \\ [bold] größe.png'


def draw(file: Path, seed: int) -> None:
    pixels = np.random.default_rng(seed).integers(0, 255, (40, 30, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Nine pictures and three broken ones."""
    root = tmp_path / "photos"
    for place, name in enumerate(("cats", "dogs")):
        (root / name).mkdir(parents=True)
        for index in range(4):
            draw(root / name / f"{index}.png", seed=10 * place + index)
    draw(root / ODD, seed=99)
    (root / "cats" / "empty.jpg").touch()
    (root / "cats" / "text.jpg").write_text("no picture")
    whole = (root / "dogs" / "0.png").read_bytes()
    (root / "dogs" / "cut.png").write_bytes(whole[: len(whole) // 2])
    return root


def make_model() -> Model:
    encoder = build_encoder("resnet10", dim=8, stem="imagenet")
    return Model(encoder, anchors=None, classes=[], preprocessing=Preprocessing(size=32))


@pytest.fixture(scope="module")
def model() -> Model:
    return make_model()


@pytest.fixture
def gallery(tmp_path: Path, model: Model, monkeypatch: pytest.MonkeyPatch) -> Gallery:
    monkeypatch.setattr(ingest, "_COMMIT_EVERY", 5)
    monkeypatch.setattr(ingest, "_BATCH", 5)
    return Gallery.create(tmp_path / "g", model)


def rows(gallery: Gallery) -> dict[str, str | None]:
    table = Gallery.open(gallery.path, gallery.model)._table.columns(["path", "label"])
    found = dict(zip(table.column("path").to_pylist(), table.column("label").to_pylist(), strict=True))
    assert len(found) == table.num_rows
    return found


def test_a_folder_in_chunks(gallery: Gallery, photos: Path) -> None:
    seen: list[tuple[int, int]] = []
    summary = index_folder(gallery, photos, progress=lambda one: seen.append((one.done, one.total)))
    assert (len(summary), summary.present, len(summary.skipped)) == (9, 0, 3)
    assert seen == [(0, 12), (5, 12), (10, 12), (12, 12)]
    expected: dict[str, str | None] = {
        str(photos / name / f"{index}.png"): name for name in ("cats", "dogs") for index in range(4)
    }
    assert rows(gallery) == expected | {str(photos / ODD): None}
    lines = (gallery.path / "unreadable.txt").read_text().splitlines()
    assert [Path(line.split("\t")[0]).name for line in lines] == ["empty.jpg", "text.jpg", "cut.png"]
    assert all(line.split("\t")[1] for line in lines)


def test_again_only_what_is_new_or_changed(gallery: Gallery, photos: Path) -> None:
    index_folder(gallery, photos)
    again = index_folder(gallery, photos)
    assert (len(again), again.present, len(again.skipped)) == (0, 9, 3)
    draw(photos / "cats" / "0.png", seed=50)
    draw(photos / ODD, seed=51)
    draw(photos / "dogs" / "new.png", seed=52)
    for name in ("cats/empty.jpg", "cats/text.jpg", "dogs/cut.png"):
        (photos / name).unlink()
    third = index_folder(gallery, photos)
    assert (len(third), third.present, third.skipped) == (3, 7, [])
    assert len(rows(gallery)) == 10
    assert not (gallery.path / "unreadable.txt").exists()
    hit = gallery.search(photos / ODD, k=1, method="brute_force").hits[0]
    assert (hit.path, hit.distance) == (str(photos / ODD), pytest.approx(0, abs=1e-4))


def test_an_interrupted_run_continues(gallery: Gallery, photos: Path) -> None:
    def stop(added: Added) -> None:
        if added.done == 10:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        index_folder(gallery, photos, progress=stop)
    kept = len(rows(gallery))
    assert 0 < kept < 9
    assert (gallery.path / "unreadable.txt").exists()
    rest = index_folder(gallery, photos)
    assert (len(rest), rest.present) == (9 - kept, kept)
    assert len(rows(gallery)) == 9


def test_what_a_kill_between_commit_and_delete_leaves_is_cleaned(
    gallery: Gallery, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index_folder(gallery, photos)
    draw(photos / "cats" / "0.png", seed=50)

    def killed(*_: object) -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(gallery._table), "delete", killed)
        with pytest.raises(KeyboardInterrupt):
            index_folder(gallery, photos)
    assert len(gallery) == 10
    again = index_folder(gallery, photos)
    assert (len(again), again.present) == (0, 9)
    assert len(rows(gallery)) == 9


def test_links_to_one_picture_all_stay(gallery: Gallery, photos: Path, tmp_path: Path) -> None:
    links = tmp_path / "links"
    links.mkdir()
    for name in ("a.png", "b.png", "c.png"):
        (links / name).symlink_to(photos / "cats" / "0.png")
    assert len(index_folder(gallery, links)) == 3
    assert index_folder(gallery, links).present == 3
    assert len(gallery) == 3


def test_a_name_that_is_no_text(gallery: Gallery, photos: Path) -> None:
    try:
        (photos / "cats" / "0.png").rename(os.fsdecode(os.fsencode(photos) + b"/cats/\xff.png"))
    except OSError:
        pytest.skip("this file system takes only text")
    summary = index_folder(gallery, photos)
    assert len(summary) == 8
    assert b"/cats/\xff.png\tIts name is not valid UTF-8" in (gallery.path / "unreadable.txt").read_bytes()


def test_a_full_disk_is_one_sentence(gallery: Gallery, photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(gallery._table), "write", full)
    with pytest.raises(GalleryError, match=r"\(No space left on device\); what it held before is kept"):
        index_folder(gallery, photos)


def test_bad_folders(gallery: Gallery, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere does not exist"):
        index_folder(gallery, tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="is a file"):
        index_folder(gallery, tmp_path / "file")
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match="has no images"):
        index_folder(gallery, tmp_path / "none")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_disk_that_fills_up_while_adding(photos: Path, gallery: Gallery, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], check=True)
    try:
        small = Gallery.create(disk / "g", dim=512)
        kept = small.add_embeddings(np.ones((20, 512)), labels=["a"] * 20)

        def fill() -> None:
            while True:
                kept.extend(small.add_embeddings(np.ones((20, 512))))

        with pytest.raises(
            GalleryError, match=r"could not be written \(.*[Nn]o space left.*what it held before is kept"
        ):
            fill()
        for opened in (small, Gallery.open(disk / "g")):
            assert {hit.id for hit in opened.search(np.ones(512), k=10_000, method="brute_force")} == set(kept)
        with pytest.raises(GalleryError, match="could not be written"):
            small.optimize()
        assert len(Gallery.open(disk / "g")) == len(kept)
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        small.optimize()
        assert len(small.add_embeddings(np.ones((20, 512)))) == 20
        assert len(Gallery.open(disk / "g")) == len(kept) + 20
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_steps_are_committed_and_small_copies_kept(photos: Path, model: Model, tmp_path: Path) -> None:
    gallery = Gallery.create(tmp_path / "small", model, thumbnails=16)
    seen: list[int] = []
    before = len(gallery.versions())
    added = gallery.add(
        photos, metadata={"size": list(range(12))}, commit_every=1, progress=lambda one: seen.append(one.done)
    )
    assert str(added) == "9 added, 0 already there, 3 unreadable"
    assert seen[0] == 0
    assert seen[-1] == added.total == 12
    assert len(gallery.versions()) > before
    item = Gallery.open(gallery.path, model).item(added[0])
    assert (item.id, item.label, Path(item.path or "").parent.name) == (added[0], "cats", "cats")
    assert item.metadata == {"size": 0}
    kept = gallery.thumbnail(added[0])
    assert kept is not None
    with Image.open(io.BytesIO(kept)) as small:
        assert (small.format, max(small.size)) == ("JPEG", 16)
    plain = gallery.add_embeddings(np.zeros((1, 8)))
    assert gallery.thumbnail(plain[0]) is None
    with pytest.raises(ConfigError, match="There is no item 999"):
        gallery.thumbnail(999)
    with pytest.raises(ConfigError, match="thumbnails must lie between 0 and 1024"):
        Gallery.create(tmp_path / "x", dim=3, thumbnails=5000)
    with pytest.raises(ConfigError, match="size must have 12 entries"):
        gallery.add(photos, metadata={"size": [1]})
    with pytest.raises(ConfigError, match="commit_every must be at least 1"):
        gallery.add(photos, commit_every=0)


def test_another_model_is_named(gallery: Gallery) -> None:
    own, other = gallery.model, make_model()
    assert own is not None
    with pytest.raises(ConfigError, match=f"created with model {own.fingerprint}, found {other.fingerprint}"):
        Gallery.open(gallery.path, other)
    assert Gallery.open(gallery.path, own).model is own


def test_an_interrupted_commit_is_not_repeated(gallery: Gallery, photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = type(gallery._table).commit

    def interrupted(*arguments: object) -> None:
        commit(*arguments)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(gallery._table), "commit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            index_folder(gallery, photos)
    kept = len(rows(gallery))
    assert 0 < kept < 9
    assert len(index_folder(gallery, photos)) == 9 - kept
    assert len(rows(gallery)) == 9


def test_the_crop_is_made_once(photos: Path, tmp_path: Path) -> None:
    """What was decoded for the encoder is not an image to decode."""
    preprocessing = Preprocessing(size=32, crop_pct=0.7, interpolation="bicubic")
    encoder = build_encoder("resnet10", dim=8, stem="imagenet")
    model = Model(encoder, anchors=None, classes=[], preprocessing=preprocessing)
    gallery = Gallery.create(tmp_path / "cropped", model)
    for id in gallery.add(photos):
        path = str(gallery.item(id).path)
        np.testing.assert_allclose(gallery.vector(id), model.embed(path).numpy()[0], rtol=1e-4, atol=1e-5)
