from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kedge.encoders import build_encoder
from kedge.errors import ConfigError, GalleryError, ImageError
from kedge.gallery import Gallery, ingest, results_to_pandas
from kedge.gallery import anchors as anchors_module
from kedge.images import Preprocessing
from kedge.model import Model

DIM = 6


def vectors(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, DIM)).astype(np.float32)


@pytest.fixture
def gallery(tmp_path: Path) -> Gallery:
    return Gallery.create(tmp_path / "g", anchors=vectors(4, seed=9), classes=["a", "b", "c", "d"])


def exhaustive(items: dict[int, np.ndarray], query: np.ndarray, k: int) -> list[int]:
    order = sorted(items, key=lambda one: (float(((items[one] - query).astype(np.float64) ** 2).sum()), one))
    return order[:k]


def test_first_the_nearest_anchor_then_only_its_list(gallery: Gallery) -> None:
    items = vectors(200)
    labels = [("a", "b", "c", "d")[row % 4] for row in range(200)]
    ids = gallery.add_embeddings(items, labels=labels, paths=[f"p{row}.jpg" for row in range(200)])
    assert ids == list(range(200))
    anchors = vectors(4, seed=9)
    for query in vectors(20, seed=3):
        nearest = int(((anchors - query) ** 2).sum(1).argmin())
        result = gallery.search(query, k=10)
        assert result.anchors == [("a", "b", "c", "d")[nearest]]
        inside = {row: items[row] for row in range(200) if row % 4 == nearest}
        assert [hit.id for hit in result] == exhaustive(inside, query, 10)
        first = result.hits[0]
        assert first.path == f"p{first.id}.jpg"
        assert first.label == first.anchor == result.anchors[0]
        assert first.distance == pytest.approx(float(np.linalg.norm(items[first.id] - query)), abs=1e-5)


def test_similarity_is_the_cosine_of_vectors_of_length_one_and_falls_with_the_distance(gallery: Gallery) -> None:
    items = vectors(50)
    units = items / np.linalg.norm(items, axis=1, keepdims=True)
    gallery.add_embeddings(units)
    result = gallery.search(units[3], k=50, method="brute_force")
    cosines = [max(0.0, float(units[id] @ units[3])) for id in result.ids]
    assert result.similarities == pytest.approx(cosines, abs=1e-5)
    assert (result.similarities[0], min(result.similarities)) == (pytest.approx(1), 0)
    # Plain vectors: the scale of the space does not matter, and the order is that of the distances.
    scaled = [Gallery.create(gallery.path.with_name(f"x{scale}"), dim=DIM) for scale in (1, 20)]
    for space, scale in zip(scaled, (1, 20), strict=True):
        space.add_embeddings(scale * items)
    small, large = (
        space.search(scale * items[0], k=50, method="brute_force") for space, scale in zip(scaled, (1, 20), strict=True)
    )
    assert small.similarities == pytest.approx(large.similarities, abs=1e-5)
    assert small.similarities == sorted(small.similarities, reverse=True)
    zero = gallery.search(np.zeros(DIM, np.float32), k=3, method="brute_force")
    assert zero.similarities == [0, 0, 0]


def test_distances_to_the_nearest_neighbour(gallery: Gallery) -> None:
    items = vectors(60)
    assert len(gallery.neighbour_distances("embedding")) == 0
    distances = np.linalg.norm(items[:, None] - items[None], axis=2)
    np.fill_diagonal(distances, np.inf)
    everything = Gallery.create(gallery.path.with_name("one list"), anchors=vectors(1), classes=["a"])
    everything.add_embeddings(items, labels=["a"] * 60)
    np.testing.assert_allclose(everything.neighbour_distances("embedding"), np.sort(distances.min(axis=1)), rtol=1e-4)


@pytest.mark.parametrize("lists", ["label", "anchor"])
@pytest.mark.parametrize("folded", [False, True])
def test_all_probes_equal_brute_force_and_an_exhaustive_search(lists: str, folded: bool, tmp_path: Path) -> None:
    gallery = Gallery.create(tmp_path / "g", anchors=vectors(4, seed=9), classes=["a", "b", "c", "d"], lists=lists)
    chance = np.random.default_rng(1)
    items: dict[int, np.ndarray] = {}
    for step in range(6):
        added = vectors(30, seed=step + 20)
        # "e" is a label that no anchor was learned for; None is an item without a label.
        labels = [chance.choice(np.array(["a", "b", "e", None], dtype=object)) for _ in added]
        items |= dict(zip(gallery.add_embeddings(added, labels=labels), added, strict=True))
        gone = [int(one) for one in chance.choice(sorted(items), 7, replace=False)]
        assert gallery.remove(gone) == 7
        for one in gone:
            del items[one]
        if folded and step % 2:
            gallery.optimize()
        assert len(gallery) == len(items)
        for query in vectors(3, seed=step + 50):
            expected = exhaustive(items, query, 12)
            assert [hit.id for hit in gallery.search(query, k=12, method="brute_force")] == expected
            assert [hit.id for hit in gallery.search(query, k=12, probes=99)] == expected
            reopened = Gallery.open(gallery.path)
            assert [hit.id for hit in reopened.search(query, k=12, min_candidates=len(items))] == expected


def test_a_label_the_model_never_saw_gets_its_own_anchor(gallery: Gallery) -> None:
    far = vectors(20) * 0.1 + 30
    gallery.add_embeddings(vectors(40), labels=["a"] * 40)
    gallery.add_embeddings(far, labels=["new"] * 20)
    for _ in range(2):
        result = gallery.search(far[0], k=5)
        assert result.anchors == ["new"]
        assert {hit.label for hit in result} == {"new"}
        gallery.optimize()


def test_vectors_without_labels_or_anchors_are_routed_by_centres(tmp_path: Path) -> None:
    gallery = Gallery.create(tmp_path / "g", dim=DIM)
    items = np.concatenate([vectors(50, seed=1) + 10, vectors(50, seed=2) - 10])
    gallery.add_embeddings(items)
    gallery.optimize()
    result = gallery.search(items[3], k=5, min_candidates=5)
    assert result.hits[0].id == 3
    assert all(hit.id < 50 for hit in result)


def test_filters_are_applied_before_ranking(gallery: Gallery) -> None:
    items = vectors(100)
    metadata = {"price": list(range(100)), "shop": ["x" if row % 2 else "y" for row in range(100)]}
    gallery.add_embeddings(items, labels=["a"] * 100, metadata=metadata)
    gallery.optimize()
    gallery.add_embeddings(items[:10] + 0.01, labels=["a"] * 10)
    result = gallery.search(items[0], k=20, probes=4, where="price >= 50 AND shop = 'x'")
    expected = {row: items[row] for row in range(50, 100) if row % 2}
    assert [hit.id for hit in result] == exhaustive(expected, items[0], 20)
    with pytest.raises(ConfigError, match="where='prize > 3' is not valid"):
        gallery.search(items[0], where="prize > 3")


def test_by_id_leaves_the_item_itself_out(gallery: Gallery) -> None:
    items = vectors(30)
    gallery.add_embeddings(np.concatenate([items, items[:1]]))
    found = [hit.id for hit in gallery.search(0, k=5, probes=4)]
    assert 0 not in found
    assert found[0] == 30  # its twin stays: identity counts, not distance zero
    with pytest.raises(ConfigError, match="no item 99"):
        gallery.search(99)


def test_removing_what_is_not_there_says_so(gallery: Gallery) -> None:
    ids = gallery.add_embeddings(vectors(4))
    assert gallery.remove([ids[0], 99]) == 1
    with pytest.raises(ConfigError, match=r"There is no item 99 in .*nothing was removed"):
        gallery.remove(99)
    assert gallery.remove(np.int64(ids[1])) == 1
    assert gallery.remove([]) == 0
    assert gallery.ids() == ids[2:]


def test_results_are_tables_too(gallery: Gallery) -> None:
    items = vectors(8)
    gallery.add_embeddings(items, labels=["a", "b"] * 4, paths=[f"p{row}.jpg" for row in range(8)])
    results = gallery.search_embeddings(items[:3], k=2)
    table = results[0].to_pandas()
    assert list(table.index) == [1, 2]
    assert list(table.itertuples(index=False, name=None)) == [tuple(hit) for hit in results[0]]
    several = results_to_pandas(results, ["x.jpg", "y.jpg", "x.jpg"])
    assert list(several["query"]) == ["x.jpg"] * 2 + ["y.jpg"] * 2 + ["x.jpg"] * 2
    assert list(several["rank"]) == [1, 2] * 3
    assert list(several["id"]) == [hit.id for result in results for hit in result]
    assert list(results_to_pandas(results)["query"]) == [0, 0, 1, 1, 2, 2]
    assert list(results_to_pandas([]).columns) == list(several.columns)
    with pytest.raises(ConfigError, match="3 results but 1 queries"):
        results_to_pandas(results, ["x.jpg"])
    first = results[0].hits[0]
    expected = f"Result(2 hits by class, nearest: {first.path} ({first.label}, {first.distance:.4g}), "
    assert repr(results[0]).startswith(expected)
    [everything] = gallery.search_embeddings(items[:1], k=3, method="brute_force")
    assert len(repr(everything)) < 120
    [nothing] = gallery.search_embeddings(items[:1], where="label = 'z'")
    assert repr(nothing).startswith("Result(0 hits by class, ")
    assert "8 items, no model, dim=" in repr(gallery)


def test_ids_are_never_used_twice(gallery: Gallery) -> None:
    assert gallery.add_embeddings(vectors(3)) == [0, 1, 2]
    gallery.remove([1, 2])
    assert Gallery.open(gallery.path).add_embeddings(vectors(2)) == [3, 4]


def test_old_versions_can_be_restored(gallery: Gallery) -> None:
    gallery.add_embeddings(vectors(5))
    before = gallery.versions()[-1].number
    gallery.remove([0, 1])
    gallery.optimize()
    assert len(gallery) == 3
    gallery.restore(before)
    assert len(gallery) == 5
    assert {hit.id for hit in gallery.search(vectors(1)[0], k=9, probes=4)} == {0, 1, 2, 3, 4}
    with pytest.raises(ConfigError, match="There is no version"):
        gallery.restore(999)


def test_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingest, "_BATCH", 4)
    model = Model(
        build_encoder("resnet10", dim=DIM, stem="imagenet"),
        anchors=None,
        classes=[],
        preprocessing=Preprocessing(size=32),
    )
    generator = np.random.default_rng(0)
    photos = tmp_path / "my photos"
    for name in ("cats", "größe"):
        (photos / name).mkdir(parents=True)
        for index in range(5):
            pixels = generator.integers(0, 255, (40, 30, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(photos / name / f"{index}.png")
    (photos / "cats" / "broken.jpg").write_bytes(b"no picture")
    gallery = Gallery.create(tmp_path / "g", model)
    added = gallery.add(photos)
    assert len(added) == len(gallery) == 10
    assert [Path(path).name for path, _ in added.skipped] == ["broken.jpg"]
    query = photos / "größe" / "3.png"
    for form in (query, query.read_bytes(), Image.open(query)):
        hit = gallery.search(form, k=1, probes=9).hits[0]
        assert (hit.path, hit.label) == (str(query.absolute()), "größe")
        assert hit.distance == pytest.approx(0, abs=1e-4)
    with pytest.raises(ConfigError, match=r"http://127\.0\.0\.1/x\.png is a URL; pass allow_url=True"):
        gallery.search("http://127.0.0.1/x.png")
    with pytest.raises(ImageError, match="cannot be fetched"):
        gallery.search("http://127.0.0.1:1/x.png", allow_url=True)
    again = Gallery.open(gallery.path).add(photos)
    assert (list(again), again.present) == ([], 10)
    Image.fromarray(pixels).save(photos / "cats" / "0.png")
    assert len(gallery.add(photos)) == 1
    assert len(gallery) == 10


def test_bad_input(gallery: Gallery, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="vectors must be N × 6, as this gallery holds, found 2 × 5"):
        gallery.add_embeddings(np.zeros((2, 5)))
    with pytest.raises(ConfigError, match="NaN or infinity in row 1"):
        gallery.add_embeddings(np.array([[0.0] * 6, [np.nan] * 6]))
    with pytest.raises(ConfigError, match="labels must have 2 entries"):
        gallery.add_embeddings(vectors(2), labels=["a"])
    with pytest.raises(ConfigError, match="k must be at least 1, found 0"):
        gallery.search(vectors(1)[0], k=0)
    with pytest.raises(ConfigError, match="has no model"):
        gallery.add(tmp_path)
    assert gallery.search(vectors(1)[0], k=5).hits == []
    with pytest.raises(GalleryError, match="already exists"):
        Gallery.create(gallery.path, dim=3)
    with pytest.raises(GalleryError, match="does not exist"):
        Gallery.open(tmp_path / "nowhere")
    (tmp_path / "foreign").mkdir()
    with pytest.raises(GalleryError, match=r"it has no gallery\.json"):
        Gallery.open(tmp_path / "foreign")
    about = (gallery.path / "gallery.json").read_text()
    (gallery.path / "gallery.json").write_text(about.replace('"format": 3', '"format": 7'))
    with pytest.raises(GalleryError, match="has format 7, and this Kedge reads up to 3"):
        Gallery.open(gallery.path)


def test_anchors_in_any_memory_order(tmp_path: Path) -> None:
    anchors = np.asfortranarray(vectors(4, seed=9))
    gallery = Gallery.create(tmp_path / "g", anchors=anchors, lists="anchor")
    gallery.add_embeddings(vectors(20))
    for opened in (gallery, Gallery.open(gallery.path)):
        assert opened.search(vectors(20)[3], k=1).hits[0].id == 3


def test_no_queries(gallery: Gallery) -> None:
    gallery.add_embeddings(vectors(5))
    assert gallery.search_embeddings(np.empty((0, DIM))) == []
    assert gallery.search_embeddings(np.empty((0, DIM)), method="brute_force") == []


def test_vectors_too_large_for_their_squares(gallery: Gallery) -> None:
    with pytest.raises(ConfigError, match=r"vectors must be below 1.7e\+17, found 1.0e\+30: scale them"):
        gallery.add_embeddings(np.full((1, DIM), 1e30))
    gallery.add_embeddings(np.full((1, DIM), 1e17))
    assert gallery.search(np.full(DIM, 1e17), k=1, probes=4).distances == [0]


def test_metadata_of_no_one_type(gallery: Gallery) -> None:
    with pytest.raises(ConfigError, match="metadata 'price' cannot be stored"):
        gallery.add_embeddings(np.ones((2, DIM)), metadata={"price": [1, "cheap"]})


def test_metadata_that_someone_else_added(gallery: Gallery) -> None:
    gallery.add_embeddings(vectors(2))
    before = gallery.versions()[-1].number
    Gallery.open(gallery.path).add_embeddings(vectors(1), metadata={"price": [3]})
    assert gallery.item(2).metadata == {"price": 3}
    assert gallery.item(0).metadata == {"price": None}
    Gallery.open(gallery.path).restore(before)
    assert gallery.item(0).metadata == {}


def test_old_states_are_forgotten_when_asked(tmp_path) -> None:
    gallery = Gallery.create(tmp_path / "gallery", anchors=np.eye(2, dtype=np.float32))
    for _ in range(5):
        gallery.add_embeddings(np.ones((50, 2), np.float32))
    gallery.remove([0])
    gallery.optimize(forget=1)
    kept, files = len(gallery.versions()), len(list(tmp_path.rglob("*.lance")))
    assert kept > 5
    gallery.optimize(forget=0)
    assert len(gallery.versions()) == 1
    assert len(list(tmp_path.rglob("*.lance"))) < files
    assert len(gallery.search(np.ones(2, np.float32), k=300, method="brute_force")) == 249
    with pytest.raises(ConfigError, match="forget must be a number of days"):
        gallery.optimize(forget=-1)


def test_a_filter_is_one_expression_and_nothing_behind_it(gallery: Gallery) -> None:
    gallery.add_embeddings(vectors(20), labels=["a", "b"] * 10)
    for behind in ("; DROP TABLE items", ";", " garbage", ") x", " ORDER BY id", "; label = 'b'", " LIMIT 1"):
        where = f"label = 'a'{behind}"
        with pytest.raises(ConfigError, match="is not valid"):
            gallery.search(vectors(1)[0], where=where)
        with pytest.raises(ConfigError, match="is not valid"):
            gallery.ids(where)
    with pytest.raises(ConfigError, match="is not valid"):  # which is one, once it stands in parentheses
        gallery.ids("(label = 'a') OR (id = 3")
    for where in ("id = 5) OR (id = 3", "id BETWEEN 3", "label ="):
        with pytest.raises(ConfigError, match="is not valid"):
            gallery.ids(where)
    for where, ids in {"id = 5": [5], "id = 5 OR label = 'none'": [5], "id BETWEEN 3 AND 4": [3, 4]}.items():
        assert gallery.ids(where) == ids


def test_filters_may_hold_what_ends_a_statement(gallery: Gallery) -> None:
    ids = gallery.add_embeddings(vectors(3), labels=["a;b", "x) y", "plain"])
    for id, where in zip(ids, ["label = 'a;b'", "label = 'x) y' -- so", "(label = 'plain')"], strict=True):
        assert gallery.ids(where) == [id]
        assert gallery.search(vectors(1)[0], method="brute_force", where=where).ids == [id]


def test_blank_labels(gallery: Gallery) -> None:
    for label in ("", " ", "\t\n", "\u00a0", "\u200b", "\u3000 "):
        with pytest.raises(ConfigError, match="labels must not be blank"):
            gallery.add_embeddings(vectors(1), labels=[label])
        with pytest.raises(ConfigError, match="labels must not be blank"):
            gallery._table.write({"id": [9], "label": [label], "embedding": vectors(1)})


def test_labels_that_look_like_others(gallery: Gallery, tmp_path: Path) -> None:
    for control in "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069":
        with pytest.raises(ConfigError, match="bidirectional control characters"):
            gallery.add_embeddings(vectors(1), labels=[f"dog{control}tac"])
        with pytest.raises(ConfigError, match="bidirectional control characters"):
            Gallery.create(tmp_path / "other", anchors=vectors(1), classes=[f"dog{control}"])


def test_one_spelling_for_what_looks_the_same(tmp_path: Path) -> None:
    composed, decomposed = "gr\u00f6\u00dfe", "gro\u0308\u00dfe"
    gallery = Gallery.create(tmp_path / "g", anchors=vectors(2, seed=9), classes=[decomposed, "b"])
    gallery.add_embeddings(vectors(4), labels=[composed, decomposed, "new", "new"])
    for _ in range(2):
        assert [gallery.item(id).label for id in range(4)] == [composed, composed, "new", "new"]
        names = gallery.snapshot().anchors.names
        assert names == (composed, "b", "new")
        found = gallery.search(vectors(2, seed=9)[0], k=4)
        assert (found.anchors, sorted(found.ids)) == ([composed], [0, 1])
        gallery.optimize()


def test_classes_of_an_earlier_release_keep_their_items(tmp_path: Path) -> None:
    """Which were stored as they were spelt."""
    from kedge.gallery.anchors import Anchors

    composed, decomposed = "gr\u00f6\u00dfe", "gro\u0308\u00dfe"
    anchors = Anchors(vectors(2), (decomposed, "b"), 2)
    homes = anchors.assign(anchors.vectors[[1, 1]], [composed, decomposed], by_label=True)
    assert homes.tolist() == [0, 0]


def test_behind_an_empty_list_comes_the_next(gallery: Gallery) -> None:
    anchors = vectors(4, seed=9)
    near = anchors[0] + 0.01
    order = np.argsort(((anchors - near) ** 2).sum(1)).tolist()
    names = [("a", "b", "c", "d")[place] for place in order]
    assert gallery.search(near, k=3).ids == []
    ids = gallery.add_embeddings(
        vectors(4), labels=[names[2], names[2], names[3], names[3]], metadata={"n": [1, 2, 3, 4]}
    )
    for _ in range(2):
        result = gallery.search(near, k=9)
        assert sorted(result.ids) == ids[:2]
        assert result.anchors == names[:3]
        together = gallery.search_embeddings(np.stack([near, anchors[order[3]]]), k=9)
        assert [sorted(one.ids) for one in together] == [ids[:2], ids[2:]]
        assert gallery.search(near, k=9, where="n > 3").ids == [ids[3]]
        assert gallery.search(near, k=9, where="n > 4").ids == []
        gallery.optimize()
    gallery.remove(ids[0])
    # The item itself does not count.
    assert sorted(gallery.search(ids[1], k=9).ids) in ([], ids[2:])
    gallery.remove(ids[1])
    assert sorted(gallery.search(near, k=9).ids) == ids[2:]


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("many", [False, True], ids=["all items", "k-means"])
def test_without_training_labels_are_kept_and_do_not_route(
    tmp_path: Path, folded: bool, many: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if many:
        monkeypatch.setattr(anchors_module, "EXACT_ITEMS", 0)
    rng = np.random.default_rng(0)
    encoder = build_encoder("resnet10", stem="imagenet", head="none").eval()
    model = Model(encoder, anchors=None, classes=(), preprocessing=Preprocessing(32), normalize=True)
    for number in range(24):
        file = tmp_path / "photos" / f"label {number % 3}" / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(file)
    Gallery.create(tmp_path / "g", model).add(tmp_path / "photos")
    gallery = Gallery.open(tmp_path / "g")
    if folded:
        gallery.optimize()
    for id in gallery.ids():
        assert gallery.item(id).label == Path(str(gallery.item(id).path)).parent.name
    anchors = gallery.snapshot().anchors
    assert set(anchors.names) == {None}
    assert (len(anchors) > 1) == many
    items = np.stack([gallery.vector(id) for id in gallery.ids()])
    nearest = ((items[:, None] - anchors.vectors[None]) ** 2).sum(2).argmin(1)
    for id in gallery.ids()[:5]:
        found = [hit.id for hit in gallery.search(gallery.vector(id), k=24)]
        assert found[0] == id
        assert sorted(found) == np.flatnonzero(nearest == nearest[id]).tolist()
