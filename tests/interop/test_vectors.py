from __future__ import annotations

import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import faiss
import faiss.contrib.torch_utils  # changes what methods of FAISS return; pytorch-metric-learning imports it, too
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from kedge.encoders import build_encoder
from kedge.errors import ConfigError, DataError, GalleryError, KedgeError
from kedge.gallery import Gallery
from kedge.images import Preprocessing
from kedge.interop import export_gallery, exporter, import_gallery, rows
from kedge.model import Model

DIM = 6
CLASSES = ["a", "b", "c", "d"]
ENDINGS = ["parquet", "npz", "faiss"]


def vectors(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, DIM)).astype(np.float32)


def metadata(count: int) -> dict[str, list[Any]]:
    """One column of each kind that people have, with gaps."""
    return {
        "price": [None if row % 7 == 0 else row for row in range(count)],
        "weight": [row / 3 for row in range(count)],
        "sold": [None if row % 5 == 0 else row % 2 == 0 for row in range(count)],
        "shop": [None if row % 4 == 0 else f"Laden №{row % 3}\0" for row in range(count)],
        "day": [datetime.date(2024, 1, 1) + datetime.timedelta(days=row) for row in range(count)],
        "tags": [None if row % 6 == 0 else ["x"] * (row % 3) for row in range(count)],
    }


def lived_in(folder: Path, **made: Any) -> Gallery:
    """A gallery with everything: labels known, unknown and none, metadata, lists and a tail, removed items."""
    gallery = Gallery.create(folder, **made)
    chance = np.random.default_rng(1)
    for step in range(3):
        added = vectors(60, seed=step + 20)
        # The last label comes when the lists are written: items without one stay where they are, however near it is.
        labels = chance.choice(np.array([None, "a", "b", "e", "f"][: 3 + step], dtype=object), 60).tolist()
        paths = [None if row % 9 == 0 else f"{'long/' * (90 * (row == 5))}{step}/{row} é.jpg" for row in range(60)]
        ids = gallery.add_embeddings(added, labels=labels, paths=paths, metadata=metadata(60))
        gallery.remove(ids[step::11])
        if step == 1:
            gallery.optimize()
    gallery.remove(gallery.ids()[-1])
    return gallery


WHERES = [None, "label = 'a'", "price > 20 AND shop LIKE 'Laden%'", "day > date '2024-01-20'", "label IS NULL"]


def everything(gallery: Gallery) -> list[Any]:
    """What all kinds of searches find, to the last digit, and every column."""
    found: list[Any] = []
    for where in WHERES:
        for how in ({}, {"probes": 3}, {"at_least": 30}, {"method": "brute_force"}):
            # One query goes another way than several.
            for queries in (vectors(12, seed=77), vectors(1, seed=78)) if where is None else (vectors(12, seed=77),):
                results = gallery.search_embeddings(queries, k=15, where=where, **how)  # type: ignore[arg-type]
                found += [(result.hits, result.anchors, result.unknown) for result in results]
    columns = ["id", "path", "label", "embedding", *metadata(0)]
    rows = [row for batch in gallery.batches(columns) for row in batch.to_pylist()]
    return found + sorted(rows, key=lambda row: row["id"])


@pytest.mark.parametrize(
    ("ending", "lists", "kind"),
    [
        ("parquet", "label", "anchors"),
        ("parquet", "label", "dim"),
        ("parquet", "anchor", "dim"),
        ("npz", "label", "dim"),
        ("npz", "anchor", "anchors"),
        ("faiss", "label", "dim"),
        ("faiss", "anchor", "anchors"),
    ],
)
def test_a_gallery_comes_back_with_the_same_hits(ending: str, lists: str, kind: str, tmp_path: Path) -> None:
    made: dict[str, Any] = {"anchors": vectors(4, seed=9), "classes": CLASSES} if kind == "anchors" else {"dim": DIM}
    gallery = lived_in(tmp_path / "g", lists=lists, **made)
    gallery.calibrate(vectors(200, seed=5))
    file = export_gallery(gallery, tmp_path / f"out.{ending}")
    back = import_gallery(tmp_path / "back", file)
    assert len(back) == len(gallery) > 100
    assert everything(back) == everything(gallery)
    assert (back.classes, back.lists, back.calibration) == (gallery.classes, gallery.lists, gallery.calibration)
    # Ids of the past are not given again, and life goes on as it would have there.
    assert back.add_embeddings(vectors(2)) == gallery.add_embeddings(vectors(2))
    for one in (gallery, back):
        one.optimize()
    assert everything(Gallery.open(back.path)) == everything(gallery)


@pytest.mark.parametrize("ending", ENDINGS)
def test_centres_of_vectors_without_labels_stay(ending: str, tmp_path: Path) -> None:
    gallery = Gallery.create(tmp_path / "g", dim=DIM)
    gallery.add_embeddings(vectors(200))
    gallery.optimize()
    gallery.add_embeddings(vectors(50, seed=3) + 2)  # k-means of all would come to other centres
    back = import_gallery(tmp_path / "back", export_gallery(gallery.path, tmp_path / f"out.{ending}"))
    queries = vectors(40, seed=4) + 1
    assert [one.hits for one in back.search_embeddings(queries, k=9)] == [
        one.hits for one in gallery.search_embeddings(queries, k=9)
    ]


@pytest.mark.parametrize("ending", ENDINGS)
def test_an_empty_gallery_and_thumbnails(ending: str, tmp_path: Path) -> None:
    gallery = Gallery.create(tmp_path / "g", anchors=vectors(4, seed=9), thumbnails=32)
    back = import_gallery(tmp_path / "b", export_gallery(gallery, tmp_path / f"out.{ending}"))
    assert (len(back), back.thumbnails, back.classes) == (0, 32, ("0", "1", "2", "3"))
    gallery.add_embeddings(vectors(300))
    back = import_gallery(tmp_path / "c", export_gallery(gallery, tmp_path / f"out.{ending}", overwrite=True))
    assert back.search(vectors(1, seed=3)[0], k=9).hits == gallery.search(vectors(1, seed=3)[0], k=9).hits


def tiny_model() -> Model:
    encoder = build_encoder("resnet10", dim=DIM, stem="imagenet")
    anchors = torch.from_numpy(vectors(2))
    return Model(encoder, anchors=anchors, classes=["x", "y"], preprocessing=Preprocessing(size=32))


def test_a_model_comes_back_only_with_itself(tmp_path: Path) -> None:
    model = tiny_model()
    for row, name in enumerate("xyxy"):
        (tmp_path / "photos" / name).mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((40, 40, 3), 60 * row, np.uint8)).save(tmp_path / "photos" / name / f"{row}.png")
    gallery = Gallery.create(tmp_path / "g", model, thumbnails=16)
    gallery.add(tmp_path / "photos")
    file = export_gallery(gallery, tmp_path / "out.npz")
    picture = tmp_path / "photos" / "x" / "0.png"
    back = import_gallery(tmp_path / "back", file, model=model)
    assert back.search(picture, k=4).hits == gallery.search(picture, k=4).hits
    assert back.thumbnail(0) == gallery.thumbnail(0) is not None
    assert back.add(tmp_path / "photos").present == 4  # their content is known
    bare = import_gallery(tmp_path / "bare", file)
    assert bare.model is None
    assert bare.search(model.embed(picture).numpy()[0], k=4).hits == gallery.search(picture, k=4, rank="class").hits
    other = tiny_model()
    with pytest.raises(ConfigError, match=rf"{model.fingerprint}; this model is {other.fingerprint}"):
        import_gallery(tmp_path / "no", file, model=other)
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("ending", ENDINGS)
def test_features_come_back(ending: str, tmp_path: Path) -> None:
    model = tiny_model()
    gallery = Gallery.create(tmp_path / "g", model)
    features = np.random.default_rng(0).normal(size=(60, model.width)).astype(np.float32)
    gallery.add_embeddings(vectors(60), ["x", "y", "new"] * 20, features=features)
    gallery.add_embeddings(vectors(5), ["x"] * 5)
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 40, 3), dtype=np.uint8)).save(tmp_path / "one.png")
    (last,) = gallery.add([tmp_path / "one.png"], ["y"])
    back = import_gallery(tmp_path / "back", export_gallery(gallery, tmp_path / f"out.{ending}"), model=model)
    for id in (0, 59, 60, last):
        for mine, theirs in zip(back.item_vectors(id), gallery.item_vectors(id), strict=True):
            np.testing.assert_array_equal(mine, theirs)
    for how in ({"rank": "looks"}, {}, {"rank": "class", "probes": 3}):
        found = [g.search_embeddings(vectors(9, seed=4), features=features[:9] + 1, **how) for g in (back, gallery)]
        assert [(one.rank, one.hits) for one in found[0]] == [(one.rank, one.hits) for one in found[1]]
    # Without the model, they are metadata like any other.
    bare = import_gallery(tmp_path / "bare", tmp_path / f"out.{ending}")
    assert bare.features == 0
    assert bare.item(60).metadata == {"features": None}


def test_faiss_searches_the_same_lists(tmp_path: Path) -> None:
    for lists in ("label", "anchor"):
        gallery = lived_in(tmp_path / lists, anchors=vectors(4, seed=9), classes=CLASSES, lists=lists)
        index = faiss.read_index(str(export_gallery(gallery, tmp_path / f"{lists}.faiss")))
        assert isinstance(index, faiss.IndexIVFFlat)
        assert index.ntotal == len(gallery)
        queries = vectors(50, seed=3)
        for probes in (1, 3):
            index.nprobe = probes
            squares, ids = index.search(queries, 10)
            for result, near, found in zip(
                gallery.search_embeddings(queries, k=10, probes=probes), squares, ids, strict=True
            ):
                assert result.ids == [one for one in found.tolist() if one >= 0]
                np.testing.assert_allclose(np.square(result.distances), near[found >= 0], rtol=1e-4, atol=1e-5)


def test_other_tools_read_what_is_written(tmp_path: Path) -> None:
    gallery = lived_in(tmp_path / "g", anchors=vectors(4, seed=9), classes=CLASSES)
    items = {one: gallery.item(one) for one in gallery.ids()[::5]}
    table = pq.read_table(export_gallery(gallery, tmp_path / "out.parquet"))
    assert table.schema.field("embedding").type == pa.list_(pa.float32(), DIM)
    for row in table.to_pylist()[::5]:
        item = items[row["id"]]
        assert (row["label"], row["path"]) == (item.label, item.path)
        assert {name: row[name] for name in item.metadata} == item.metadata
        np.testing.assert_array_equal(np.float32(row["embedding"]), gallery.vector(item.id))
    with np.load(export_gallery(gallery, tmp_path / "out.npz"), allow_pickle=False) as arrays:
        assert arrays["ids"].tolist() == table.column("id").to_pylist()
        np.testing.assert_array_equal(arrays["anchors"][:4], vectors(4, seed=9))
        for spot, one in list(enumerate(arrays["ids"].tolist()))[::5]:
            np.testing.assert_array_equal(arrays["vectors"][spot], gallery.vector(one))
            label, price = items[one].label, items[one].metadata["price"]
            assert (arrays["labels"][spot], arrays["labels.missing"][spot]) == (label or "", label is None)
            assert (arrays["metadata.price"][spot], arrays["metadata.price.missing"][spot]) == (
                price or 0,
                price is None,
            )


def test_parquet_goes_out_a_part_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gallery = Gallery.create(tmp_path / "g", dim=DIM)
    for step in range(5):
        gallery.add_embeddings(vectors(3000, seed=step))
    monkeypatch.setattr(rows, "_BATCH_BYTES", 3000 * DIM * 4)
    file = export_gallery(gallery, tmp_path / "out.parquet")
    assert pq.ParquetFile(file).num_row_groups >= 4
    back = import_gallery(tmp_path / "back", file)
    assert [one.ids for one in back.search_embeddings(vectors(5, seed=9))] == [
        one.ids for one in gallery.search_embeddings(vectors(5, seed=9))
    ]


def test_what_is_exported_is_one_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gallery = Gallery.create(tmp_path / "g", dim=DIM)
    gallery.add_embeddings(vectors(100))
    items = exporter.Items

    def meanwhile(snapshot: Any) -> Any:
        other = Gallery.open(gallery.path)
        other.add_embeddings(vectors(10, seed=1))
        other.remove([0, 1])
        return items(snapshot)

    monkeypatch.setattr(exporter, "Items", meanwhile)
    assert pq.read_table(export_gallery(gallery, tmp_path / "out.parquet")).column("id").to_pylist() == list(range(100))


def nearest(items: np.ndarray, query: np.ndarray, k: int) -> list[int]:
    return np.argsort(((items.astype(np.float64) - query) ** 2).sum(1), kind="stable")[:k].tolist()


@pytest.mark.parametrize("kind", [pa.list_(pa.float32()), pa.list_(pa.float64(), DIM), pa.large_list(pa.float16())])
def test_anyones_parquet(kind: pa.DataType, tmp_path: Path) -> None:
    items = vectors(90).astype(np.float16).astype(np.float32)
    table = pa.table(
        {
            "id": [f"item-{row}" for row in range(90)],
            "embedding_v2": pa.array(items.tolist(), pa.list_(pa.float64())).cast(kind),
            "kind": pa.array([None if row % 10 == 0 else row % 3 for row in range(90)], pa.float64()),
            "file": pa.array([f"{row % 5}.jpg" for row in range(90)]).dictionary_encode(),
            "price": range(90),
            "nothing": pa.nulls(90),
        }
    )
    pq.write_table(table, tmp_path / "theirs.parquet", row_group_size=40)
    gallery = import_gallery(tmp_path / "g", tmp_path / "theirs.parquet", labels="kind", paths="file")
    assert gallery.item(4) == (4, "4.jpg", "1", {"source_id": "item-4", "price": 4})
    assert gallery.item(10).label is None
    anchors = gallery.snapshot().anchors
    assert sorted(map(str, anchors.names)) == ["0", "1", "2"]
    for name, mean in zip(anchors.names, anchors.vectors, strict=True):
        own = [row for row in range(90) if row % 10 and row % 3 == int(name or 0)]
        np.testing.assert_allclose(mean, items[own].mean(0), atol=1e-5)
    for query in vectors(5, seed=2):
        assert gallery.search(query, k=7, method="brute_force").ids == nearest(items, query, 7)
    with pytest.raises(ConfigError, match="has labels; leave anchors out"):
        import_gallery(tmp_path / "h", tmp_path / "theirs.parquet", labels="kind", anchors=3)


def test_a_folder_of_parquet_and_bare_arrays(tmp_path: Path) -> None:
    items = vectors(120)
    (tmp_path / "shards").mkdir()
    for part in range(3):
        rows = items[part * 40 : part * 40 + 40]
        pq.write_table(pa.table({"vector": rows.tolist()}), tmp_path / "shards" / f"{part}.parquet")
    np.save(tmp_path / "bare.npy", items.astype(np.float64))
    np.savez(tmp_path / "named.npz", features=items, y=np.arange(120) % 2, other=np.zeros(3), price=np.arange(120))
    query = vectors(1, seed=5)[0]
    for name in ("shards", "bare.npy", "named.npz"):
        gallery = import_gallery(tmp_path / f"g-{name}", tmp_path / name)
        assert gallery.search(query, k=9, method="brute_force").ids == nearest(items, query, 9)
    assert gallery.item(3) == (3, None, "1", {"price": 3})
    routed = import_gallery(tmp_path / "routed", tmp_path / "bare.npy", anchors=7)
    assert len(routed.snapshot().anchors) == 7
    routed.optimize()
    assert len(routed.snapshot().anchors) == 7
    own = import_gallery(tmp_path / "own", tmp_path / "bare.npy", anchors=items[:2], classes=["p", "q"])
    assert own.search(items[1], k=1).anchors == ["q"]


def foreign_indexes() -> Iterator[tuple[str, Any]]:
    items = vectors(300)
    flat = faiss.IndexFlatL2(DIM)
    flat.add(items)
    yield "flat", flat
    for recipe in ("IVF8,Flat", "HNSW8,Flat", "IDMap,Flat", "PCA6,IVF4,Flat"):
        index = faiss.index_factory(DIM, recipe)
        index.train(items)
        index.add_with_ids(items, np.arange(300) * 2) if recipe.startswith("IDMap") else index.add(items)
        yield recipe, index
    cosine = faiss.index_factory(DIM, "IVF8,Flat", faiss.METRIC_INNER_PRODUCT)
    unit = items / np.linalg.norm(items, axis=1, keepdims=True)
    cosine.train(unit)
    cosine.add(unit)
    yield "cosine", cosine


def test_anyones_faiss_index(tmp_path: Path) -> None:
    queries = vectors(20, seed=6)
    for number, (name, index) in enumerate(foreign_indexes()):
        file = tmp_path / f"{number}.index"
        faiss.write_index(index, str(file))
        gallery = import_gallery(tmp_path / f"g{number}", file)
        assert len(gallery) == 300
        asked = queries / np.linalg.norm(queries, axis=1, keepdims=True) if name == "cosine" else queries
        items = index_vectors(index) if name == "cosine" else vectors(300)
        for query, result in zip(asked, gallery.search_embeddings(asked, k=1, method="brute_force"), strict=True):
            assert result.ids == nearest(items, query, 1), name
        if name in ("IVF8,Flat", "cosine"):
            # Its centroids became the anchors, so that a look into one list finds what FAISS finds.
            _, ids = index.search(asked, 5)
            for result, found in zip(gallery.search_embeddings(asked, k=5), ids.tolist(), strict=True):
                assert result.ids == [one for one in found if one >= 0]
        if name.startswith("IDMap"):
            assert gallery.item(3).metadata == {"source_id": 6}


def index_vectors(index: Any) -> np.ndarray:
    index.make_direct_map()
    found = np.empty((index.ntotal, DIM), np.float32)
    index.reconstruct_n(0, index.ntotal, found)
    return found


def test_inner_products_of_any_length_are_refused(tmp_path: Path) -> None:
    index = faiss.IndexFlatIP(DIM)
    index.add(vectors(10))
    faiss.write_index(index, str(tmp_path / "ip.faiss"))
    with pytest.raises(DataError, match="compares by inner product"):
        import_gallery(tmp_path / "g", tmp_path / "ip.faiss")


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ours")
    gallery = Gallery.create(folder / "g", anchors=vectors(4, seed=9), classes=CLASSES)
    gallery.add_embeddings(vectors(50), labels=["a"] * 50)
    for ending in ENDINGS:
        export_gallery(gallery, folder / f"out.{ending}")
    return folder


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
def test_a_damaged_file_is_one_sentence_and_leaves_nothing(
    ending: str, share: float, ours: Path, tmp_path: Path
) -> None:
    content = (ours / f"out.{ending}").read_bytes()
    file = tmp_path / f"cut.{ending}"
    file.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(KedgeError) as caught:
        import_gallery(tmp_path / "g", file)
    assert "\n" not in str(caught.value)
    assert [one.name for one in tmp_path.iterdir()] == [file.name]


@pytest.mark.parametrize("ending", ["parquet", "npz"])
def test_a_changed_byte_of_a_vector_is_noticed(ending: str, tmp_path: Path) -> None:
    gallery = Gallery.create(tmp_path / "g", dim=DIM)
    gallery.add_embeddings(vectors(3000))
    file = export_gallery(gallery, tmp_path / f"out.{ending}")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)
    with pytest.raises(DataError, match="cannot be read"):
        import_gallery(tmp_path / "h", file)
    assert not (tmp_path / "h").exists()


def test_parts_of_two_exports_do_not_make_one(ours: Path, tmp_path: Path) -> None:
    other = Gallery.create(tmp_path / "g", anchors=vectors(4, seed=9), classes=CLASSES)
    other.add_embeddings(vectors(50))
    other.remove(3)
    file = export_gallery(other, tmp_path / "other.faiss")
    (tmp_path / "mixed.faiss").write_bytes(file.read_bytes())
    (tmp_path / "mixed.faiss.parquet").write_bytes((ours / "out.faiss.parquet").read_bytes())
    with pytest.raises(DataError, match="do not belong together"):
        import_gallery(tmp_path / "h", tmp_path / "mixed.faiss")
    assert not (tmp_path / "h").exists()


def test_what_cannot_be_imported(ours: Path, tmp_path: Path) -> None:
    def refused(table: dict[str, Any], match: str, **options: Any) -> None:
        pq.write_table(pa.table(table), tmp_path / "x.parquet")
        with pytest.raises(KedgeError, match=match):
            import_gallery(tmp_path / "g", tmp_path / "x.parquet", **options)
        assert not (tmp_path / "g").exists()

    items = vectors(5).tolist()
    refused({"price": [1, 2]}, "has no column of vectors")
    refused({"p": items, "q": items}, "has p, q; choose one with vectors=")
    refused({"p": items}, "vectors='z' is not a column of vectors in .*; choose one of p", vectors="z")
    refused({"p": items, "q": [1] * 5}, "vectors='q' is not a column of vectors in .*; choose one of p", vectors="q")
    refused({"p": items}, "labels='z' is not a column of labels in .*; choose one of p", labels="z")
    refused({"p": [*items[:3], [1.0], items[4]]}, "row 3 of .* has 1 numbers instead of 6")
    refused({"p": [*items[:2], None, *items[3:]]}, "row 2 of .* has 0 numbers instead of 6")
    refused({"p": [*items[:4], [np.nan] * DIM]}, "row 4 of .* holds NaN")
    refused({"p": pa.array([], pa.list_(pa.float32()))}, "holds no vectors")
    refused({"p": items}, "anchors must be at least 1 and at most 5, found 9", anchors=9)
    refused({"p": items, "path": ["a\0b"] * 5}, "NUL")
    with pytest.raises(ConfigError, match="already describes its gallery; leave labels out"):
        import_gallery(tmp_path / "g", ours / "out.npz", labels="labels")
    with pytest.raises(GalleryError, match="already exists"):
        import_gallery(ours / "g", ours / "out.npz")
    with pytest.raises(DataError, match="does not exist"):
        import_gallery(tmp_path / "g", tmp_path / "none.npz")
    with pytest.raises(ConfigError, match=r"must be a \.parquet"):
        import_gallery(tmp_path / "g", tmp_path / "x.csv")
    np.savez(tmp_path / "object.npz", vectors=np.array([[1], "x"], dtype=object))
    with pytest.raises(DataError, match="cannot be read"):
        import_gallery(tmp_path / "g", tmp_path / "object.npz")


def test_what_cannot_be_exported(ours: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"path must end in one of \.parquet, \.npz, \.faiss, found x\.csv"):
        export_gallery(ours / "g", tmp_path / "x.csv")
    before = (ours / "out.npz").read_bytes()
    with pytest.raises(ConfigError, match="already exists; choose another path, or pass overwrite=True"):
        export_gallery(ours / "g", ours / "out.npz")
    assert (ours / "out.npz").read_bytes() == before
    with pytest.raises(ConfigError, match="on this machine"):
        export_gallery(ours / "g", "s3://bucket/x.parquet")
