"""Two spaces: what is ranked by class, what by looks, and what a label that came later takes from others."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from kedge.encoders import build_encoder
from kedge.errors import ConfigError, GalleryError
from kedge.gallery import Gallery, Result, anchors, ranking
from kedge.gallery.gallery import Method
from kedge.gallery.inverted_lists import InvertedLists
from kedge.gallery.schema import seal_json, unseal_json
from kedge.images import Preprocessing
from kedge.model import Model

DIM, WIDTH = 8, 512
CLASSES = ["a", "b", "c"]
ANCHORS = 4 * np.eye(3, DIM, dtype=np.float32)
LABELS = ["a", "b", "c", "new", "newer"]


@pytest.fixture(scope="module")
def model() -> Model:
    torch.manual_seed(0)
    encoder = build_encoder("resnet10", dim=DIM, stem="imagenet")
    return Model(encoder, anchors=torch.from_numpy(ANCHORS), classes=CLASSES, preprocessing=Preprocessing(size=32))


class Vectors:
    """Items and queries in both spaces: labels that the model never saw are embedded between the anchors."""

    def __init__(self, labels: list[str], seed: int, spread: float = 1.1) -> None:
        chance = np.random.default_rng(seed)
        centres = np.random.default_rng(99).normal(size=(len(LABELS), WIDTH)) / np.sqrt(WIDTH)
        numbers = np.array([LABELS.index(label) for label in labels])
        self.labels = labels
        places = np.concatenate([ANCHORS, np.full((2, DIM), 1.2)])
        self.embeddings = (places[numbers] + chance.normal(0, 0.8, (len(labels), DIM))).astype(np.float32)
        noise = chance.normal(size=(len(labels), WIDTH)) / np.sqrt(WIDTH)
        raw = centres[numbers] + spread * noise
        self.raw = (3 * raw).astype(np.float32)
        self.features = (raw / np.linalg.norm(raw, axis=1, keepdims=True)).astype(np.float32)


def log_cosine(embedding: np.ndarray, label: str) -> float:
    """Of an embedding and the anchor of a class."""
    anchor = ANCHORS[CLASSES.index(label)].astype(float)
    cosine = anchor @ embedding / np.linalg.norm(anchor) / np.linalg.norm(embedding)
    return float(np.log(max(cosine, 1e-4)))


class Filled:
    """A gallery with lists, a tail and removed items of either, and what it holds, by id."""

    def __init__(self, path: Path, model: Model, *, lists: str = "label", fold: bool = True) -> None:
        self.gallery = Gallery.create(path, model, lists=lists)  # type: ignore[arg-type]
        self.items: dict[int, tuple[str, np.ndarray, np.ndarray]] = {}
        for step in range(2):
            more = Vectors([LABELS[row % 5 if step else row % 4] for row in range(60)], seed=step)
            ids = self.gallery.add_embeddings(
                more.embeddings, more.labels, metadata={"price": list(range(60))}, features=more.raw
            )
            for row, id in enumerate(ids):
                self.items[id] = more.labels[row], more.embeddings[row], more.features[row]
            self.gallery.remove(ids[5:60:13])
            for id in ids[5:60:13]:
                del self.items[id]
            if step == 0 and fold:
                self.gallery.optimize()

    def by(self, which: int, query: np.ndarray, among: list[int], k: int) -> list[int]:
        """The k nearest of some items by embeddings (1) or features (2), by plain differences."""
        distances = {id: float(np.linalg.norm(self.items[id][which].astype(float) - query)) for id in among}
        return sorted(among, key=lambda id: (distances[id], id))[:k]

    def mean_cosine(self, label: str, features: np.ndarray, exclude_id: int = -1) -> float:
        """To the three nearest items of a label."""
        own = [
            item[2].astype(float) @ features for id, item in self.items.items() if item[0] == label and id != exclude_id
        ]
        return float(np.mean(sorted(own)[-3:]))

    def home(self, embedding: np.ndarray, features: np.ndarray, exclude_id: int = -1) -> str:
        """The label whose list the rule chooses; a plain loop over all items."""

        def score(label: str) -> float:
            alike = 30 * self.mean_cosine(label, features, exclude_id)
            return alike + log_cosine(embedding, label) if label in CLASSES else alike

        return max(LABELS, key=score)

    def expected(self, which: int, query: np.ndarray, home: str, among: list[int], k: int) -> list[int]:
        """The items of a list first, then the others."""
        own = [id for id in among if self.items[id][0] == home]
        return [*self.by(which, query, own, k), *self.by(which, query, [id for id in among if id not in own], k)][:k]


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory, model: Model) -> Filled:
    return Filled(tmp_path_factory.mktemp("filled") / "g", model)


QUERIES = Vectors([LABELS[row % 5] for row in range(40)], seed=7)


def ask(gallery: Gallery, rows: slice = slice(None), **how: Any) -> list[Result]:
    return gallery.search_embeddings(QUERIES.embeddings[rows], features=QUERIES.raw[rows], **how)


@pytest.mark.parametrize("alone", [False, True])
def test_auto_is_by_class_where_the_predicted_one_was_trained(filled: Filled, alone: bool) -> None:
    rows = [slice(row, row + 1) for row in range(40)] if alone else [slice(None)]
    results = [result for some in rows for result in ask(filled.gallery, some, k=30)]
    ranks = []
    for row, result in enumerate(results):
        home = filled.home(QUERIES.embeddings[row], QUERIES.features[row])
        by_class = home in CLASSES
        assert (result.rank, result.anchors) == ("class" if by_class else "looks", [home])
        among = [id for id, item in filled.items.items() if item[0] == home or not by_class]
        assert result.ids == filled.expected(2, QUERIES.features[row], home, among, 30)
        for hit in result:
            label, _, features = filled.items[hit.id]
            assert hit.label == hit.anchor == label
            assert hit.distance == pytest.approx(np.linalg.norm(features - QUERIES.features[row]), abs=1e-5)
        ranks.append(result.rank)
        assert result.unknown is None
    # Otherwise nothing was tried here: every label that came later is found by looks, classes by class.
    assert {rank for row, rank in enumerate(ranks) if QUERIES.labels[row] not in CLASSES} == {"looks"}
    assert sum(rank == "class" for rank in ranks) >= 20


def test_brute_force_ranks_known_queries_by_embedding(filled: Filled) -> None:
    for row, result in enumerate(ask(filled.gallery, k=60, method="brute_force")):
        home = filled.home(QUERIES.embeddings[row], QUERIES.features[row])
        assert result.rank == ("class" if home in CLASSES else "looks")
        query = QUERIES.embeddings[row] if home in CLASSES else QUERIES.features[row]
        assert result.ids == filled.expected(1 if home in CLASSES else 2, query, home, list(filled.items), 60)


def test_looks_and_class_when_asked_for(filled: Filled) -> None:
    for row, result in enumerate(ask(filled.gallery, k=9, rank="looks")):
        assert result.rank == "looks"
        assert result.ids == filled.by(2, QUERIES.features[row], list(filled.items), 9)
    by_class, vectors_alone = ask(filled.gallery, k=9, rank="class"), filled.gallery.search_embeddings
    for row, (result, alone) in enumerate(zip(by_class, vectors_alone(QUERIES.embeddings, k=9), strict=True)):
        nearest = CLASSES[int(np.linalg.norm(ANCHORS - QUERIES.embeddings[row], axis=1).argmin())]
        assert (result.rank, result.anchors) == ("class", [nearest])
        assert result.hits == alone.hits
        among = [id for id, item in filled.items.items() if item[0] == nearest]
        assert result.ids == filled.by(1, QUERIES.embeddings[row], among, 9)


def test_an_item_as_the_query_is_not_its_own_neighbour(filled: Filled) -> None:
    for id in list(filled.items)[::9]:
        _, embedding, features = filled.items[id]
        result = filled.gallery.search(id, k=7)
        home = filled.home(embedding, features, exclude_id=id)
        assert result.rank == ("class" if home in CLASSES else "looks")
        others = [other for other in filled.items if other != id]
        assert result.ids == filled.expected(2, features, home, others, 7)


@pytest.mark.parametrize("method", ["two_stage", "brute_force"])
def test_each_query_of_a_batch_may_exclude_an_item(filled: Filled, method: Method) -> None:
    ids = list(filled.items)[::9]
    _, embeddings, features = zip(*(filled.items[id] for id in ids), strict=True)
    search = partial(filled.gallery.search_embeddings, k=7, method=method)
    together = search(np.stack(embeddings), features=np.stack(features), exclude_id=ids)
    for id, embedding, own, result in zip(ids, embeddings, features, together, strict=True):
        [alone] = search(embedding[None], features=own[None], exclude_id=id)
        assert id not in result.ids
        assert (result.ids, result.rank, result.anchors) == (alone.ids, alone.rank, alone.anchors)


def test_filters_hold_in_both_spaces(filled: Filled) -> None:
    prices = {id: filled.gallery.item(id).metadata["price"] for id in filled.items}
    for row, result in enumerate(ask(filled.gallery, k=5, where="price < 30")):
        cheap = [id for id in filled.items if prices[id] < 30]
        home = filled.home(QUERIES.embeddings[row], QUERIES.features[row])
        assert result.ids == filled.expected(2, QUERIES.features[row], home, cheap, 5)


@pytest.mark.parametrize("share", [1, 4])
def test_a_large_gallery_searches_a_share_of_its_looks_lists(
    share: int, tmp_path: Path, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (ranking, anchors):
        monkeypatch.setattr(module, "EXACT_ITEMS", 20)
    monkeypatch.setattr(ranking, "_SHARE", share)
    filled = Filled(tmp_path / "g", model)
    centroids = filled.gallery.verified_snapshot(looks=True).anchors.vectors
    assert len(centroids) == 7  # about the square root of what was there
    for rows in (slice(None), slice(0, 1)):
        for row, result in enumerate(ask(filled.gallery, rows, k=9, rank="looks")):
            near = np.linalg.norm(centroids - QUERIES.features[row], axis=1).argsort()[: -(-7 // share)]
            lists = {id: int(np.linalg.norm(centroids - item[2], axis=1).argmin()) for id, item in filled.items.items()}
            among = [id for id in filled.items if lists[id] in near]
            assert result.ids == filled.by(2, QUERIES.features[row], among, 9)
    # A known query has the whole list of its class, whichever looks lists that lies in.
    by_class = [result for result in ask(filled.gallery, k=99) if result.rank == "class"]
    assert len(by_class) >= 15
    for result in by_class:
        assert set(result.ids) == {id for id, item in filled.items.items() if item[0] == result.anchors[0]}


def test_a_class_search_touches_no_features(filled: Filled) -> None:
    opened = Gallery.open(filled.gallery.path, filled.gallery.model)
    ask(opened, rank="class")
    opened.search_embeddings(QUERIES.embeddings)
    assert opened._looks is not None
    assert opened._looks._stored is None
    ask(opened)
    assert opened._looks._stored is not None


def test_items_without_features(tmp_path: Path, model: Model) -> None:
    gallery = Gallery.create(tmp_path / "g", model)
    gallery.add_embeddings(QUERIES.embeddings, QUERIES.labels)
    assert {result.rank for result in ask(gallery)} == {"class"}  # there is nothing to compare looks with
    assert [len(result) for result in ask(gallery, rank="looks")] == [0] * 40
    ids = gallery.add_embeddings(QUERIES.embeddings, QUERIES.labels, features=QUERIES.raw)
    for _ in range(2):
        assert all(set(result.ids) == set(ids) for result in ask(gallery, k=99, rank="looks"))
        assert gallery.item_vectors(0)[1] is None
        np.testing.assert_allclose(gallery.item_vectors(ids[0])[1], QUERIES.features[0], atol=1e-6)
        gallery.optimize()
    for result in ask(gallery, k=99):
        if result.rank == "class":  # those without are found too
            in_list = {id for id in range(80) if QUERIES.labels[id % 40] == result.anchors[0]}
            assert set(result.ids) == in_list
            assert result.distances == sorted(result.distances)
    gallery.remove(ids[:3])
    assert all(set(result.ids) == set(ids[3:]) for result in ask(gallery, k=99, rank="looks"))
    assert gallery.search(0, k=3).rank == "class"


def test_bad_input(filled: Filled, tmp_path: Path) -> None:
    gallery, vectors = filled.gallery, QUERIES.embeddings
    external = Gallery.create(tmp_path / "g", dim=DIM)
    with pytest.raises(ConfigError, match="has no features beside its embeddings; leave rank='looks' out"):
        external.search(vectors[0], rank="looks")
    with pytest.raises(ConfigError, match="has no features beside its embeddings; leave features out"):
        external.add_embeddings(vectors, features=QUERIES.raw)
    external.add_embeddings(vectors)
    assert external.search_embeddings(vectors, features=QUERIES.raw)[0].rank == "class"
    with pytest.raises(ConfigError, match="rank must be one of auto, class, looks, found 'colour'"):
        gallery.search(0, rank="colour")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="rank='looks' needs the features of the queries"):
        gallery.search(vectors[0], rank="looks")
    with pytest.raises(ConfigError, match="features must be N × 512, as this gallery holds, found 40 × 8"):
        gallery.search_embeddings(vectors, features=vectors)
    with pytest.raises(ConfigError, match="features must have 40 rows, one for each vector, found 3"):
        gallery.search_embeddings(vectors, features=QUERIES.raw[:3])


def test_no_queries(filled: Filled) -> None:
    assert ask(filled.gallery, slice(0, 0)) == ask(filled.gallery, slice(0, 0), rank="looks") == []


# ---------------------------------------------------------------------- unknown


def familiarity(cosines: dict[str, list[float]], embedding: np.ndarray) -> float:
    """By the rule, from the cosines of a query's features with the items of each class."""
    anchor_cosines = {label: np.exp(log_cosine(embedding, label)) for label in CLASSES}
    predicted = CLASSES[int(np.linalg.norm(ANCHORS - embedding, axis=1).argmin())]
    own, nearest = np.mean(sorted(cosines[predicted])[-3:]), max(max(some) for some in cosines.values())
    return float((own + nearest) / 2 + 0.1 * np.log(max(anchor_cosines.values()) / sum(anchor_cosines.values())))


def by_class(items: np.ndarray, labels: list[str], query: np.ndarray) -> dict[str, list[float]]:
    """The cosines of a query's features with items of length 1."""
    return {
        label: [float(item @ query) for item, own in zip(items, labels, strict=True) if own == label]
        for label in CLASSES
    }


def test_the_models_calibration_and_the_gallerys(tmp_path: Path, model: Model) -> None:
    """A query is unknown if it is less familiar than the threshold says."""
    known = Vectors([CLASSES[row % 3] for row in range(60)], seed=3)
    gallery = Gallery.create(tmp_path / "g", model)
    gallery.add_embeddings(known.embeddings, known.labels, features=known.raw)
    values = []
    for embedding, features in zip(QUERIES.embeddings, QUERIES.features, strict=True):
        values.append(familiarity(by_class(known.features, known.labels, features), embedding))
    threshold = float(np.sort(values)[20]) + 1e-6
    opened = Gallery.open(gallery.path, model)
    opened.model = SimpleNamespace(calibration=SimpleNamespace(threshold=-threshold))  # type: ignore[assignment]
    for results in (ask(opened), [ask(opened, slice(row, row + 1))[0] for row in range(40)]):
        assert [result.unknown for result in results] == [value < threshold for value in values]
        assert {result.rank for result in results} == {"class"}  # there is no other label
    # By class, nothing is compared with items.
    assert {result.unknown for result in ask(opened, rank="class")} == {None}


def test_calibrating_with_images(tmp_path: Path, model: Model) -> None:
    chance = np.random.default_rng(0)
    for name in ("in", "held"):
        for label in CLASSES:
            (tmp_path / name / label).mkdir(parents=True)
            for row in range(10):
                pixels = chance.integers(0, 255, (32, 32, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / name / label / f"{row}.png")
    gallery = Gallery.create(tmp_path / "g", model)
    gallery.add(tmp_path / "in")
    calibration = gallery.calibrate(tmp_path / "held", accept=0.9)
    files = {name: sorted((tmp_path / name).rglob("*.png")) for name in ("in", "held")}
    features = {name: model.vectors(some).features.numpy() for name, some in files.items()}
    unit = {name: some / np.linalg.norm(some, axis=1, keepdims=True) for name, some in features.items()}
    labels, values = [file.parent.name for file in files["in"]], []
    for embedding, looks in zip(model.embed(files["held"]).numpy(), unit["held"], strict=True):
        values.append(familiarity(by_class(unit["in"], labels, looks), embedding))
    # 28 of 30 must be accepted (split conformal prediction), so the third-smallest is the threshold.
    assert calibration.familiarity == pytest.approx(np.sort(values)[2], abs=1e-5)
    opened = Gallery.open(gallery.path, model)
    assert opened.calibration == calibration
    assert opened.calibration is not None
    assert sum(opened.search(file).unknown is True for file in files["held"]) in (2, 3)


# ---------------------------------------------------------------------- labels that came later


def test_known_queries_keep_their_route(tmp_path: Path, model: Model) -> None:
    gallery = Gallery.create(tmp_path / "g", model)
    known = Vectors([CLASSES[row % 3] for row in range(60)], seed=3)
    gallery.add_embeddings(known.embeddings, known.labels, features=known.raw)
    before = [result.anchors for result in gallery.search_embeddings(known.embeddings)]
    # Right where the items of "a" are, which is the worst place.
    gallery.add_embeddings(known.embeddings[::3], ["new"] * 20, features=-known.raw[::3])
    for _ in range(2):
        snapshot = gallery.snapshot()
        assert snapshot.anchors.names == (*CLASSES, "new")
        assert [result.anchors for result in gallery.search_embeddings(known.embeddings)] == before
        assert all("new" not in result.anchors for result in gallery.search_embeddings(known.embeddings, probes=3))
        everything = gallery.search_embeddings(known.embeddings, k=80, probes=4)
        assert all(result.anchors[-1] == "new" and len(result) == 80 for result in everything)
        # They are found by looks, and by a filter.
        found = gallery.search_embeddings(known.embeddings[::3], k=1, features=-known.raw[::3])
        assert {(result.rank, result.hits[0].label) for result in found} == {("looks", "new")}
        assert len(gallery.search(known.embeddings[0], k=99, where="label = 'new'")) == 20
        gallery.optimize()


@pytest.mark.parametrize("lists", ["label", "anchor"])
def test_items_without_a_label_sit_where_a_class_search_finds_them(tmp_path: Path, model: Model, lists: Any) -> None:
    gallery = Gallery.create(tmp_path / "g", model, lists=lists)
    gallery.add_embeddings(np.full((5, DIM), 0.5), ["new"] * 5)
    (id,) = gallery.add_embeddings(np.full((1, DIM), 0.5) + ANCHORS[1] / 9)
    for _ in range(2):
        assert gallery.search(np.full(DIM, 0.5) + ANCHORS[1] / 9, k=3).ids == [id]
        gallery.optimize()


def test_the_mean_of_a_later_label_is_as_long_as_the_learned_anchors(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    learned = np.diag([1.0, 2.0, 4.0, 4.0]).astype(np.float32)
    gallery = Gallery.create(tmp_path / "g", anchors=learned, classes=["a", "b", "c", "d"])
    gallery.add_embeddings(np.repeat(learned, 10, axis=0), [label for label in "abcd" for _ in range(10)])
    scattered = np.array([[0, 0, 0.3, 0.4], [0, 0, -0.1, 0.2]], np.float32)
    gallery.add_embeddings(scattered, ["new", "new"])
    for _ in range(2):
        mean = scattered.mean(axis=0)
        np.testing.assert_allclose(gallery.snapshot().anchors.vectors[4], 3 * mean / np.linalg.norm(mean), rtol=1e-6)
        gallery.optimize()
    assert caplog.text == ""  # it lies between "c" and "d", and takes no item of either


def test_a_later_label_that_takes_items_of_others_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gallery = Gallery.create(tmp_path / "g", anchors=ANCHORS, classes=CLASSES)
    known = Vectors([CLASSES[row % 3] for row in range(60)], seed=3)
    gallery.add_embeddings(known.embeddings, known.labels)
    gallery.add_embeddings(known.embeddings[:1] - 50, ["far"])
    assert caplog.text == ""
    near = known.embeddings[::3] + np.float32(0.1)
    gallery.add_embeddings(near, ["new"] * 20)
    (record,) = caplog.records
    direction = near.mean(axis=0, dtype=float)
    moved = np.concatenate([ANCHORS, [4 * direction / np.linalg.norm(direction)]])
    nearest = np.linalg.norm(known.embeddings[:, None] - moved, axis=2).argmin(axis=1)
    right = np.linalg.norm(known.embeddings[:, None] - ANCHORS, axis=2).argmin(axis=1) == np.arange(60) % 3
    share = 100 * np.mean((nearest == 3) & right)
    assert share > 2
    assert f"the new label 'new' takes {share:.0f} % of the items of other labels from their lists" in record.message
    caplog.clear()
    gallery.add_embeddings(near, ["new"] * 20)
    Gallery.open(gallery.path).add_embeddings(near, ["new"] * 20)
    assert caplog.text == ""


# ---------------------------------------------------------------------- filters


def test_a_filter_chooses_the_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = np.random.default_rng(0)
    gallery = Gallery.create(tmp_path / "g", anchors=chance.normal(size=(9, DIM)), classes=list("abcdefghi"))
    items = chance.normal(size=(90, DIM)).astype(np.float32)
    labels = [("abcdefghi")[row % 9] for row in range(90)]
    gallery.add_embeddings(items, labels, metadata={"price": list(range(90))})
    gallery.optimize()
    gallery.add_embeddings(items[:9] + 0.01, list("abcdefghi"), metadata={"price": [100] * 9})
    read: list[int] = []
    prefetch = InvertedLists.prefetch

    def recorded(self: InvertedLists, numbers: Any) -> None:
        read.extend(numbers := list(numbers))
        prefetch(self, numbers)

    monkeypatch.setattr(InvertedLists, "prefetch", recorded)
    rows = np.concatenate([items, items[:9] + 0.01])
    for query in chance.normal(size=(5, DIM)).astype(np.float32):
        read.clear()
        result = gallery.search(query, k=20, where="label IN ('c', 'h') AND price < 90")
        assert sorted(set(read)) == [2, 7]
        matching = [row for row in range(90) if row % 9 in (2, 7)]
        assert result.ids == sorted(matching, key=lambda row: np.linalg.norm(rows[row] - query))
        # One list is enough for ten, and it is the nearer one.
        nearer = min((2, 7), key=lambda number: np.linalg.norm(gallery.snapshot().anchors.vectors[number] - query))
        result = gallery.search(query, k=10, where="label IN ('c', 'h') AND price < 90")
        assert result.anchors == ["abcdefghi"[nearer]]
        assert {hit.label for hit in result} == {"abcdefghi"[nearer]}
        assert len(gallery.search(query, k=10, probes=2, where="label IN ('c', 'h') AND price < 90").anchors) == 2
        # An item that is left out must not count as one of the ten.
        assert len(gallery.search(11, k=10, where="label IN ('c', 'h') AND price < 90")) == 10
        assert len(gallery.search(query, k=99, where="price >= 88")) == 11
        nothing = gallery.search(query, where="price > 1000")
        assert (nothing.hits, nothing.anchors) == ([], [])


# ---------------------------------------------------------------------- what is kept


def test_images_come_with_features(tmp_path: Path, model: Model) -> None:
    chance = np.random.default_rng(0)
    files = [tmp_path / f"{row}.png" for row in range(3)]
    for file in files:
        Image.fromarray(chance.integers(0, 255, (40, 30, 3), dtype=np.uint8)).save(file)
    gallery = Gallery.create(tmp_path / "g", model)
    ids = gallery.add(files, ["a", "b", "new"])
    assert gallery.features == WIDTH
    raw = model.vectors(files).features.numpy()
    rows = {row["id"]: row for batch in gallery.batches(["id", "features"]) for row in batch.to_pylist()}
    for id, file, features in zip(ids, files, raw, strict=True):
        np.testing.assert_allclose(rows[id]["features"], features / np.linalg.norm(features), atol=1e-6)
        hit = gallery.search(file, k=1, rank="looks").hits[0]
        assert (hit.id, hit.distance) == (id, pytest.approx(0, abs=1e-3))


def flip(file: Path, share: float) -> None:
    content = bytearray(file.read_bytes())
    head = 128 if file.suffix == ".npy" else 0
    content[head + int(share * (len(content) - head))] ^= 64
    file.write_bytes(content)


@pytest.mark.parametrize("folder", ["looks", "lists"])
@pytest.mark.parametrize("name", ["vectors.npy", "ids.npy", "labels.npy", "offsets.npy", "lists.json"])
def test_damaged_lists_of_either_space_are_rebuilt(filled: Filled, tmp_path: Path, folder: str, name: str) -> None:
    path = Path(shutil.copytree(filled.gallery.path, tmp_path / "copy"))
    (file,) = path.glob(f"{folder}/*/{name}")
    flip(file, 0.6)
    for how in ({}, {"rank": "looks"}, {"method": "brute_force"}, {"where": "price < 30"}):
        expected = [result.hits for result in ask(filled.gallery, **how)]
        assert [result.hits for result in ask(Gallery.open(path), **how)] == expected
    assert not file.exists()
    assert Gallery.open(path).check().endswith("as they were written")
    (file,) = path.glob(f"{folder}/*/{name}")
    flip(file, 0.6)
    Gallery.open(path).check()
    assert not file.exists()


def test_damaged_features_in_the_table(filled: Filled, tmp_path: Path) -> None:
    path = Path(shutil.copytree(filled.gallery.path, tmp_path / "copy"))
    id = next(iter(filled.items))
    features = filled.gallery.item_vectors(id)[1]
    assert features is not None
    content = features.tobytes()[:200]
    for file in (path / "record.lance" / "data").iterdir():
        file.write_bytes(file.read_bytes().replace(content, bytes(len(content))))
    with pytest.raises(GalleryError, match=f"item {id} differs from its checksum"):
        Gallery.open(path).item_vectors(id)
    (path / "checksums.json").unlink()
    with pytest.raises(GalleryError, match=f"damaged items: {id};"):
        Gallery.open(path).check()


def test_restored_versions(filled: Filled, tmp_path: Path) -> None:
    gallery = Gallery.open(shutil.copytree(filled.gallery.path, tmp_path / "copy"))
    before, expected = gallery.versions()[-1].number, [result.hits for result in ask(gallery, k=9)]
    more = Vectors(["a", "newer"] * 10, seed=5)
    gallery.add_embeddings(more.embeddings, more.labels, features=more.raw)
    gallery.optimize()
    assert [result.hits for result in ask(gallery, k=9)] != expected
    gallery.restore(before)
    assert [result.hits for result in ask(gallery, k=9)] == expected


def test_a_snapshot_is_searched_as_it_was(filled: Filled, tmp_path: Path) -> None:
    gallery = Gallery.open(shutil.copytree(filled.gallery.path, tmp_path / "copy"))
    snapshot, expected = gallery.snapshot(), [result.hits for result in ask(gallery, k=9)]
    more = Vectors(["a", "newer"] * 10, seed=5)
    gallery.add_embeddings(more.embeddings, more.labels, features=more.raw)
    newest = [result.hits for result in ask(gallery, k=9)]
    assert newest != expected
    assert [result.hits for result in ask(gallery, k=9, snapshot=snapshot)] == expected
    assert [result.hits for result in ask(gallery, k=9)] == newest


def test_a_gallery_of_format_2(tmp_path: Path, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """No features; metadata may have their name."""
    with monkeypatch.context() as earlier:
        earlier.setattr(Model, "has_features", False)
        Gallery.create(tmp_path / "g", model)
    file = tmp_path / "g" / "gallery.json"
    about = {name: value for name, value in unseal_json(file.read_bytes()).items() if name != "features"}
    file.write_bytes(seal_json({**about, "format": 2}))
    gallery = Gallery.open(tmp_path / "g", model)
    assert gallery.features == 0
    metadata = {"features": [1, 2]}
    gallery.add_embeddings(QUERIES.embeddings[:2], ["a", "new"], metadata=metadata)
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 30, 3), dtype=np.uint8)).save(tmp_path / "x.png")
    gallery.add(tmp_path / "x.png", ["b"])
    gallery.optimize()
    opened = Gallery.open(tmp_path / "g", model)
    assert opened.item(1).metadata == {"features": 2}
    assert opened.item(2).metadata == {"features": None}
    result = opened.search(tmp_path / "x.png", k=1, probes=9)
    assert (result.ids, result.rank) == ([2], "class")
    with pytest.raises(ConfigError, match="has no features"):
        opened.search(tmp_path / "x.png", rank="looks")
    assert opened.search(QUERIES.embeddings[1], probes=9, where="features = 2").ids == [1]
    assert opened.check().endswith("as they were written")
    assert not (tmp_path / "g" / "looks").exists()
