from __future__ import annotations

import csv
import json
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from kedge.audit import Audit, Finding, apply_fixes, audit, audit_page
from kedge.audit.items import Items, find_neighbours
from kedge.audit.labels import RIDGE, Classifier
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


def mislabelled() -> tuple[np.ndarray, list[str], dict[int, str]]:
    """Items of which one in fifty has the label of another class, and which."""
    vectors, labels = clusters()
    wrong = {row: CLASSES[(CLASSES.index(labels[row]) + 1 + row % 3) % 4] for row in range(5, len(labels), 50)}
    return vectors, [wrong.get(row, label) for row, label in enumerate(labels)], wrong


def left_out_scores(vectors: np.ndarray, codes: np.ndarray, ridge: float) -> np.ndarray:
    """The oracle: for each item, the classifier is fitted to all others."""
    count, scores = codes.max() + 1, []
    weights = 1 / (np.bincount(codes) * count)
    spread = vectors - (weights[codes, None] * vectors).sum(axis=0)
    penalty = ridge * (weights[codes, None] * spread**2).sum() / vectors.shape[1]
    for row in range(len(vectors)):
        others = np.arange(len(vectors)) != row
        share, points = weights[codes[others]], vectors[others].astype(np.float64)
        mean = share @ points / share.sum()
        targets = np.eye(count)[codes[others]]
        level = share @ targets / share.sum()
        centred = points - mean
        covariance = (centred * share[:, None]).T @ centred + penalty * np.eye(vectors.shape[1])
        solved = np.linalg.solve(covariance, (centred * share[:, None]).T @ (targets - level))
        scores.append(level + (vectors[row] - mean) @ solved)
    return np.array(scores)


def test_scores_are_those_of_a_classifier_without_the_item(tmp_path: Path) -> None:
    vectors, labels = clusters()
    keep = np.sort(np.random.default_rng(0).permutation(len(vectors))[:60])
    codes = np.array([CLASSES.index(labels[row]) for row in keep])
    items = Items(gallery_of(tmp_path / "g", vectors[keep], [labels[row] for row in keep]), looks=False)
    order = np.argsort(items.ids)
    classifier = Classifier.fit(items, order, codes)
    expected = left_out_scores(vectors[keep], codes, RIDGE)
    assert classifier.scores(vectors[keep], codes) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("lists", ["label", "anchor"])
@pytest.mark.parametrize("folded", [False, True])
def test_the_headline_counts_wrong_labels(lists: str, folded: bool, tmp_path: Path) -> None:
    vectors, labels, wrong = mislabelled()
    truth = {row: clusters()[1][row] for row in wrong}
    gallery = gallery_of(tmp_path / "g", vectors, labels, lists)
    if folded:
        gallery.optimize()
    report = audit(gallery)
    likely = [finding for finding in report.by_kind("wrong label") if finding.likely]
    assert {finding.id: finding.suggestion for finding in likely} == truth
    assert {finding.id: (finding.label, finding.path) for finding in likely} == {
        row: (label, f"p{row}.jpg") for row, label in wrong.items()
    }
    assert report.counts()["wrong label"] == 12
    assert report.summary().startswith("600 items: 12 wrong labels.")


def test_what_is_hard_to_tell_is_not_likely_wrong(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(400, DIM)).astype(np.float32)
    report = audit(gallery_of(tmp_path / "g", vectors, [CLASSES[row % 4] for row in range(400)]))
    assert len(report.by_kind("wrong label")) > 200  # no label can be told from another
    assert report.counts()["wrong label"] <= 4


def test_labels_of_few_items_are_not_judged(tmp_path: Path) -> None:
    vectors, labels = clusters()
    labels[0] = labels[200] = labels[400] = "rare"
    report = audit(gallery_of(tmp_path / "g", vectors, labels))
    assert not {0, 200, 400} & {finding.id for finding in report.by_kind("wrong label")}


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
    assert found.by_kind("duplicate", "near duplicate") == []


def test_many_equal_vectors_are_one_group(tmp_path: Path) -> None:
    vectors, labels = clusters()
    vectors[10:30] = vectors[10]
    found = audit(gallery_of(tmp_path / "g", vectors, labels))
    assert [(one.id, one.other_id) for one in found.by_kind("duplicate")] == [(row, 10) for row in range(11, 30)]


def test_outliers_are_far_from_all_others(tmp_path: Path) -> None:
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
    with pytest.raises(ConfigError, match="against has embeddings of 3 dimensions"):
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
    vectors, labels, _ = mislabelled()
    found = audit(gallery_of(tmp_path / "g", np.concatenate([vectors, vectors[:1]]), [*labels, "a"]))
    scores = [one.score for one in found.findings]
    assert scores == sorted(scores, reverse=True)
    assert {one.kind for one in found.findings if one.likely} >= {"duplicate", "wrong label"}
    with pytest.raises(ConfigError, match="kind must be one of"):
        found.by_kind("typo")  # type: ignore[arg-type]


def test_the_table_and_json_show_what_was_found() -> None:
    one = Finding("wrong label", 4, "[red]x\x1b\udcff.jpg", "a", 0.9, 1.5, suggestion="b")
    found = Audit("g", 10, [one])
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


def test_neighbours_are_the_nearest_of_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    vectors, labels = clusters()
    items = Items(gallery_of(tmp_path / "g", vectors, labels), looks=False)
    rows = np.arange(0, len(items), 2)
    points = items.vectors(rows).astype(np.float64)
    distances = np.linalg.norm(points[:, None] - points, axis=2)
    np.fill_diagonal(distances, np.inf)
    near = find_neighbours(items, rows, items, rows, 5)
    assert near.distances[rows] == pytest.approx(np.sort(distances, axis=1)[:, :5], abs=1e-5)
    assert (near.rows[rows] == rows[np.argsort(distances, axis=1)[:, :5]]).mean() > 0.999  # but for ties
    # In a large gallery, among those of the nearest lists: all of them, where the clusters are far apart.
    monkeypatch.setattr("kedge.audit.items.EXACT_ITEMS", 10)
    by_lists = find_neighbours(items, rows, items, rows, 5)
    assert by_lists.distances[rows] == pytest.approx(near.distances[rows], abs=1e-5)


def test_memory_does_not_grow_with_items_times_labels(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    means = rng.normal(size=(2000, 4)).astype(np.float32)
    names = [f"{number:04}" for number in range(2000)]
    gallery = Gallery.create(tmp_path / "many", anchors=means, classes=names)
    gallery.add_embeddings(
        np.repeat(means, 8, axis=0) + rng.normal(size=(16000, 4)).astype(np.float32) / 9,
        labels=np.repeat(names, 8).tolist(),
    )
    gallery.optimize()
    tracemalloc.start()
    audit(gallery)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16000 * 2000 * 8


# ---------------------------------------------------------------------- photos


def photo(rng: np.random.Generator) -> Image.Image:
    """Something with shapes of all sizes, as photos have."""
    pixels = np.zeros((96, 128, 3))
    for size in (3, 6, 12, 24, 48):
        waves = Image.fromarray(rng.integers(0, 255, (size, size, 3), dtype=np.uint8)).resize(
            (128, 96), Image.Resampling.BICUBIC
        )
        pixels += np.asarray(waves) / size
    return Image.fromarray((pixels * (255 / pixels.max())).astype(np.uint8))


COPIES = {
    "small.jpg": lambda image: image.resize((40, 30)),
    "large.jpg": lambda image: image.resize((256, 192)),
    "poor.jpg": lambda image: image,
    "cropped.jpg": lambda image: image.crop((2, 1, 127, 94)),
}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 photos of two classes and copies of four; both classes have a copy of the other's first."""
    rng, folder = np.random.default_rng(0), tmp_path_factory.mktemp("photos")
    for name in "ab":
        (folder / name).mkdir()
    for number in range(60):
        path = folder / "ab"[number % 2] / f"{number:02}.png"
        image = photo(rng)
        image.save(path)
        if number < 4:
            name = list(COPIES)[number]
            COPIES[name](image).save(
                folder / "ba"[number % 2] / f"{number:02} {name}", quality=30 if number == 2 else 90
            )
    return folder


def pretrained() -> Model:
    encoder = build_encoder("resnet10", image_size=32, head="none")
    return Model(encoder, anchors=None, classes=(), preprocessing=Preprocessing(size=32), normalize=True)


def trained() -> Model:
    encoder = build_encoder("resnet10", dim=2, image_size=32)
    return Model(encoder, anchors=torch.eye(2), classes=("a", "b"), preprocessing=Preprocessing(size=32))


@pytest.mark.parametrize("make", [pretrained, trained])
def test_copies_of_another_size_quality_or_crop_are_found_and_nothing_else(
    make: Callable[[], Model], photos: Path, tmp_path: Path
) -> None:
    gallery = Gallery.create(tmp_path / "g", make())
    gallery.add(photos)
    report = audit(gallery)
    pairs = {tuple(sorted((str(one.path), str(one.other_path)))) for one in report.by_kind("near duplicate")}
    originals = {path.name[:2]: path for path in photos.rglob("*.png")}
    expected = {tuple(sorted((str(originals[path.name[:2]]), str(path)))) for path in photos.rglob("*.jpg")}
    assert len(expected) == len(COPIES)
    assert pairs == expected
    assert all(one.suggestion not in (None, one.label) for one in report.by_kind("near duplicate"))
    assert report.by_kind("duplicate") == []


def test_copies_of_test_photos_are_leaks(photos: Path, tmp_path: Path) -> None:
    model = pretrained()
    gallery, tests = Gallery.create(tmp_path / "g", model), Gallery.create(tmp_path / "t", model)
    gallery.add(sorted(photos.rglob("*.png")))
    tests.add(sorted(photos.rglob("*.jpg")))
    leaks = audit(gallery, against=tests).by_kind("leak")
    assert {Path(str(one.path)).name[:2] for one in leaks} == {"00", "01", "02", "03"}
    assert all(Path(str(one.path)).name[:2] == Path(str(one.other_path)).name[:2] for one in leaks)


# ---------------------------------------------------------------------- fixes


@pytest.fixture
def faulty(tmp_path: Path) -> Gallery:
    """600 items, of which twelve have a wrong label and one is there twice."""
    vectors, labels, _ = mislabelled()
    gallery = Gallery.create(tmp_path / "g", anchors=ANCHORS, classes=CLASSES)
    paths = [f"p{row}.jpg" for row in range(len(vectors) + 1)]
    marks = {"mark": list(range(len(paths)))}
    gallery.add_embeddings(np.concatenate([vectors, vectors[7:8]]), [*labels, "a"], paths, marks)
    gallery.optimize()
    return gallery


def accept(path: Path, ids: set[int]) -> Path:
    rows = list(csv.reader(path.open(encoding="utf-8", newline="")))
    for row in rows[1:]:
        row[0] = "yes" if int(row[3]) in ids else row[0]
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(rows)
    return path


def contents(gallery: Gallery) -> dict[str, tuple[Any, ...]]:
    rows = {}
    for batch in gallery.batches(["path", "label", "mark", "embedding"]):
        for row in batch.to_pylist():
            rows[row["path"]] = row["label"], row["mark"], tuple(row["embedding"])
    return rows


def test_accepted_fixes_are_written_back_in_one_commit(faulty: Gallery, tmp_path: Path) -> None:
    before, version = contents(faulty), faulty.versions()[-1].number
    report = audit(faulty)
    report.to_csv(tmp_path / "findings.csv")
    assert str(apply_fixes(faulty, tmp_path / "findings.csv")) == "nothing is accepted, nothing was changed"
    fixes = apply_fixes(faulty, accept(tmp_path / "findings.csv", {5, 600}))
    assert fixes == (1, 1, version)
    assert [one.number for one in faulty.versions()][-2:] == [version, version + 1]
    expected = {path: row for path, row in before.items() if path != "p600.jpg"}
    expected["p5.jpg"] = ("a", *before["p5.jpg"][1:])
    for gallery in (faulty, Gallery.open(faulty.path)):
        assert contents(gallery) == expected
        after = audit(gallery)
        likely = {one.path for one in after.by_kind("wrong label", "duplicate") if one.likely}
        assert likely == {f"p{row}.jpg" for row in range(55, 600, 50)}
        found = gallery.search_embeddings(np.array([before["p5.jpg"][2]], np.float32), k=1)[0].hits[0]
        assert (found.path, found.label, found.distance) == ("p5.jpg", "a", 0)
    assert "as it was written" in faulty.check()
    faulty.optimize()
    assert contents(faulty) == expected
    faulty.restore(version)
    assert contents(faulty) == before
    assert {one.id for one in audit(faulty).by_kind("wrong label", "duplicate") if one.likely} == {
        *range(5, 600, 50),
        600,
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "has no column 'accept'"),
        ("", "has no column 'accept'"),
        ("HEAD\nmaybe,wrong label,1,5,d,a,p5.jpg\n", "line 2: accept must be yes or no, found 'maybe'"),
        ("HEAD\nyes,typo,1,5,b,a,p5.jpg\n", "line 2: kind must be one of"),
        ("HEAD\nyes,wrong label,1,five,b,a,p5.jpg\n", "line 2: id must be a whole number, found 'five'"),
        ("HEAD\nyes,wrong label,1,5,d,,p5.jpg\n", "line 2: suggestion cannot be a label"),
        (
            "HEAD\nyes,wrong label,1,5,d,a,p5.jpg\nyes,wrong label,1,5,d,c,p5.jpg\n",
            "item 5 has two accepted labels",
        ),
        ("HEAD\nyes,wrong label,1,5,d,a,p5.jpg\nyes,duplicate,1,4000,b,,x\n", " has no item 4000"),
        ("HEAD\nyes,wrong label,1,5,c,a,p5.jpg\n", "line 2: item 5 has changed since the audit; audit again"),
        ('HEAD\nyes,"wrong', "is not a CSV file in UTF-8"),
        ("HEAD\nyes,wrong label\n", "line 2: id must be"),
    ],
)
def test_a_file_that_does_not_fit_changes_nothing(faulty: Gallery, tmp_path: Path, text: str, message: str) -> None:
    before, path = faulty.versions(), tmp_path / "bad.csv"
    path.write_text(text.replace("HEAD", "accept,kind,score,id,label,suggestion,path"), encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        apply_fixes(faulty, path)
    assert faulty.versions() == before
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not a CSV file in UTF-8"):
        apply_fixes(faulty, path)
    with pytest.raises(ConfigError, match="cannot be read"):
        apply_fixes(faulty, tmp_path / "missing.csv")


def test_a_spreadsheet_may_write_semicolons(faulty: Gallery, tmp_path: Path) -> None:
    text = "\ufeffaccept;kind;score;id;label;suggestion;path\r\nYES;wrong label;1;5;d;a;p5.jpg\r\n"
    (tmp_path / "sheet.csv").write_text(text, encoding="utf-8")
    assert apply_fixes(faulty, tmp_path / "sheet.csv")[:2] == (1, 0)


def test_fixes_of_photos_keep_all_columns(photos: Path, tmp_path: Path) -> None:
    gallery = Gallery.create(tmp_path / "g", trained(), thumbnails=16)
    gallery.add(photos)
    row = next(batch.to_pylist()[0] for batch in gallery.batches(gallery.columns))
    text = f"accept,kind,score,id,label,suggestion,path\nyes,wrong label,1,{row['id']},a,new,{row['path']}\n"
    (tmp_path / "f.csv").write_text(text, encoding="utf-8")
    apply_fixes(gallery, tmp_path / "f.csv")
    (new,) = gallery.ids("label = 'new'")
    after = {one["id"]: one for batch in gallery.batches(gallery.columns) for one in batch.to_pylist()}
    changed = {name for name in row if after[new][name] != row[name]}
    assert changed == {"id", "label", "checksum"}
    assert row["id"] not in after
    assert gallery.search(new, k=1, rank="looks").hits
    assert "as it was written" in gallery.check()


def test_a_small_copy_that_the_encoder_sees_otherwise_is_found_by_its_hash(photos: Path, tmp_path: Path) -> None:
    gallery = Gallery.create(tmp_path / "g", pretrained())
    gallery.add(sorted(photos.rglob("*.png")))
    nearest = [hit.id for hit in gallery.search(0, k=20, method="brute_force")]
    (copy,) = photos.rglob("*small.jpg")
    (id,) = gallery.add_embeddings(gallery.vector(nearest[11])[None], paths=[str(copy)])
    assert [(one.id, one.other_id) for one in audit(gallery).by_kind("near duplicate")] == [(id, 0)]
