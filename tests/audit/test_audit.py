from __future__ import annotations

import json
import re
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from kedge.audit import Audit, Finding, audit, audit_page
from kedge.audit.items import Items
from kedge.audit.labels import measure
from kedge.cli import app
from kedge.encoders import build_encoder
from kedge.errors import ConfigError
from kedge.gallery import Gallery
from kedge.images import Preprocessing
from kedge.model import Model

DIM = 8
CLASSES = ["a", "b", "c", "d"]
ANCHORS = np.eye(4, DIM, dtype=np.float32) * 6
PER_CLASS = 150


def clusters(seed: int = 0) -> tuple[np.ndarray, list[str]]:
    """Items around each anchor, class after class."""
    chance = np.random.default_rng(seed)
    vectors = np.repeat(ANCHORS, PER_CLASS, axis=0) + chance.normal(size=(4 * PER_CLASS, DIM)) * 0.6
    return vectors.astype(np.float32), [name for name in CLASSES for _ in range(PER_CLASS)]


def gallery_of(path: Path, vectors: np.ndarray, labels: list[str], lists: str = "label") -> Gallery:
    gallery = Gallery.create(path, anchors=ANCHORS, classes=CLASSES, lists=lists)
    gallery.add_embeddings(vectors, labels=labels, paths=[f"p{row}.jpg" for row in range(len(vectors))])
    return gallery


@pytest.mark.parametrize("lists", ["label", "anchor"])
@pytest.mark.parametrize("folded", [False, True])
def test_wrong_labels_are_those_nearer_to_another_anchor(lists: str, folded: bool, tmp_path: Path) -> None:
    vectors, labels = clusters()
    wrong = {5: "b", 200: "d", 420: "a"}
    for row, label in wrong.items():
        labels[row] = label
    gallery = gallery_of(tmp_path / "g", vectors, labels, lists)
    if folded:
        gallery.optimize()
    found = {one.id: one for one in audit(gallery).by_kind("wrong label")}
    for row in range(len(vectors)):
        distances = [float(np.linalg.norm(vectors[row].astype(np.float64) - anchor)) for anchor in ANCHORS]
        own, nearest = CLASSES.index(labels[row]), int(np.argmin(distances))
        assert (row in found) == (own != nearest)
        if row in found:
            one = found[row]
            gap = float(np.linalg.norm(ANCHORS[own] - ANCHORS[nearest]))
            assert one.suggestion == CLASSES[nearest]
            assert (one.label, one.path) == (labels[row], f"p{row}.jpg")
            assert one.score == pytest.approx((distances[own] - distances[nearest]) / gap, abs=1e-5)
            assert one.distance == pytest.approx(distances[own], abs=1e-5)
    assert set(wrong) <= set(found)


def test_duplicates_are_found_whatever_their_labels_and_lists(tmp_path: Path) -> None:
    vectors, labels = clusters()
    chance = np.random.default_rng(7)
    exact, near = [3, 170, 310], [40, 222, 499]
    copies = np.concatenate([vectors[exact], vectors[near] + chance.normal(size=(3, DIM)).astype(np.float32) * 0.01])
    gallery = gallery_of(tmp_path / "g", vectors, labels)
    gallery.optimize()
    first = len(vectors)
    gallery.add_embeddings(copies, labels=["d", "b", "c", "a", "b", "a"])
    found = audit(gallery)
    assert [(one.id, one.other_id, one.score) for one in found.by_kind("duplicate")] == [
        (first, 3, 1.0),
        (first + 1, 170, 1.0),
        (first + 2, 310, 1.0),
    ]
    pairs = {(one.id, one.other_id): one for one in found.by_kind("near duplicate")}
    planted = {(first + 3 + place, row) for place, row in enumerate(near)}
    assert planted <= set(pairs)
    assert len(pairs) <= 3 + 0.02 * first  # few others
    for later, earlier in planted:
        true = float(np.linalg.norm(copies[later - first].astype(np.float64) - vectors[earlier]))
        assert pairs[later, earlier].distance == pytest.approx(true, abs=1e-5)
    assert pairs[first + 5, 499].suggestion == "d"
    assert pairs[first + 3, 40].suggestion is None


def test_no_near_duplicates_among_very_few_items(tmp_path: Path) -> None:
    vectors, labels = clusters()
    found = audit(gallery_of(tmp_path / "g", vectors[::PER_CLASS], labels[::PER_CLASS]))
    assert found.limit is None
    assert found.by_kind("duplicate", "near duplicate") == []


def test_many_equal_vectors_are_one_group(tmp_path: Path) -> None:
    vectors, labels = clusters()
    vectors[10:30] = vectors[10]
    found = audit(gallery_of(tmp_path / "g", vectors, labels))
    assert [(one.id, one.other_id) for one in found.by_kind("duplicate")] == [(row, 10) for row in range(11, 30)]


def test_outliers_are_far_from_their_own_anchor_and_from_the_others(tmp_path: Path) -> None:
    vectors, labels = clusters()
    vectors[100, 7] += 40
    found = audit(gallery_of(tmp_path / "g", vectors, labels)).by_kind("outlier")
    assert [one.id for one in found][:1] == [100]
    assert len(found) <= 3
    assert 0 < found[0].score <= 0.5


def test_removed_items_are_not_reported(tmp_path: Path) -> None:
    vectors, labels = clusters()
    labels[5] = "b"
    gallery = gallery_of(tmp_path / "g", np.concatenate([vectors, vectors[:1]]), [*labels, "a"])
    gallery.optimize()
    gallery.remove([0, 5])
    found = audit(gallery)
    assert found.items == len(vectors) - 1
    assert not {0, 5} & {one.id for one in found.findings}
    assert found.by_kind("duplicate") == []


def test_leaks_are_items_of_the_other_gallery_that_stand_in_this_one(tmp_path: Path) -> None:
    vectors, labels = clusters()
    fresh, fresh_labels = clusters(seed=1)
    noise = np.random.default_rng(2).normal(size=DIM).astype(np.float32) * 0.005
    fresh[7], fresh[300] = vectors[20], vectors[333] + noise
    gallery = gallery_of(tmp_path / "g", vectors, labels)
    found = audit(gallery, against=gallery_of(tmp_path / "t", fresh, fresh_labels)).by_kind("leak")
    assert [(one.id, one.other_id, one.other_path) for one in found][:2] == [(20, 7, "p7.jpg"), (333, 300, "p300.jpg")]
    assert found[0].score == 1
    assert len(found) <= 2 + 0.02 * len(fresh)


def test_the_other_gallery_must_fit(tmp_path: Path) -> None:
    vectors, labels = clusters()
    gallery = gallery_of(tmp_path / "g", vectors, labels)
    other = Gallery.create(tmp_path / "t", dim=3)
    with pytest.raises(ConfigError, match="against has vectors of 3 numbers"):
        audit(gallery, against=other)
    with pytest.raises(ConfigError, match="is empty"):
        audit(other)


def test_unlabelled_galleries_have_no_wrong_labels(tmp_path: Path) -> None:
    vectors, _ = clusters()
    gallery = Gallery.create(tmp_path / "g", dim=DIM)
    gallery.add_embeddings(np.concatenate([vectors, vectors[9:10]]))
    found = audit(gallery)
    assert found.by_kind("wrong label") == []
    assert [(one.id, one.other_id) for one in found.by_kind("duplicate")] == [(len(vectors), 9)]


def test_the_surest_of_all_kinds_come_first(tmp_path: Path) -> None:
    vectors, labels = clusters()
    labels[5] = "b"
    found = audit(gallery_of(tmp_path / "g", np.concatenate([vectors, vectors[:1]]), [*labels, "a"]))
    scores = [one.score for one in found.findings]
    assert scores == sorted(scores, reverse=True)
    assert {one.kind for one in found.findings[:2]} == {"duplicate", "wrong label"}
    with pytest.raises(ConfigError, match="kind must be one of"):
        found.by_kind("typo")  # type: ignore[arg-type]


def test_the_table_and_json_show_what_was_found() -> None:
    one = Finding("wrong label", 4, "[red]x\x1b\udcff.jpg", "a", 0.9, 1.5, suggestion="b")
    found = Audit("g", 10, [one], 0.2)
    console = Console(width=200)
    with console.capture() as printed:
        console.print(found)
    text = printed.get()
    assert r"[red]x\x1b\udcff.jpg" in text
    assert "10 items: 1 wrong label." in text
    assert json.loads(found.to_json())["findings"][0]["suggestion"] == "b"


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two classes, a copy under another name, and names that would break a careless page."""
    chance, tmp_path = np.random.default_rng(0), tmp_path_factory.mktemp("pictures")
    for name in ("a", "b<i>&"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for row in range(8):
            pixels = chance.integers(0, 255, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f'{row}"<script>.png')
    copy = tmp_path / "photos" / "a" / "copy.png"
    copy.write_bytes((tmp_path / "photos" / "b<i>&" / '0"<script>.png').read_bytes())
    return tmp_path / "photos"


@pytest.fixture(scope="module")
def indexed(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    encoder = build_encoder("resnet10", dim=8, image_size=16)
    model = Model(encoder, anchors=None, classes=(), preprocessing=Preprocessing(size=16))
    gallery = Gallery.create(tmp_path_factory.mktemp("indexed") / "gallery", model)
    gallery.add(pictures)
    return gallery.path


def test_the_page_holds_the_pictures_and_asks_nobody_for_anything(indexed: Path, tmp_path: Path) -> None:
    found = audit(Gallery.open(indexed))
    assert [(Path(str(one.path)).name, one.label) for one in found.by_kind("duplicate")]
    audit_page(found, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "data:image/jpeg;base64," in page
    assert "<script" not in page
    assert "<i>" not in page
    assert "&lt;script&gt;" in page
    assert not re.search(r"(src|href)=\"(?!data:)", page)
    assert "://" not in page
    with pytest.raises(ConfigError, match="cannot be written"):
        audit_page(found, tmp_path / "missing" / "page.html")


def test_the_verb_prints_a_table_or_json_and_takes_a_folder_to_compare(
    indexed: Path, pictures: Path, tmp_path: Path
) -> None:
    shown = CliRunner().invoke(app, ["audit", str(indexed), "-n", "1", "--html", str(tmp_path / "page.html")])
    assert shown.exit_code == 0, shown.output
    assert "duplicate" in shown.output
    assert (tmp_path / "page.html").exists()
    result = CliRunner().invoke(app, ["audit", str(indexed), "--json", "--against", str(pictures / "a")])
    assert result.exit_code == 0, result.output
    leaks = [one for one in json.loads(result.stdout)["findings"] if one["kind"] == "leak"]
    assert {Path(one["other_path"]).name for one in leaks} >= {path.name for path in (pictures / "a").iterdir()}


def test_memory_does_not_grow_with_items_times_anchors(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    anchors = rng.normal(size=(2000, 4)).astype(np.float32)
    gallery = Gallery.create(tmp_path / "many", anchors=anchors)
    gallery.add_embeddings(np.repeat(anchors, 2, axis=0) + rng.normal(size=(4000, 4)).astype(np.float32))
    gallery.optimize()
    audit(gallery)
    tracemalloc.start()
    measure(Items(gallery))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4000 * 2000 * 8
