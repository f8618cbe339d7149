from __future__ import annotations

import asyncio
import io
import json
import threading
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from PIL import Image

import kedge
from kedge.errors import ConfigError, ServiceError
from kedge.gallery import Gallery
from kedge.gallery.anchors import Anchors
from kedge.gallery.calibration import Calibration, CalibrationFile, save_calibration
from kedge.serving.app import create_app
from kedge.serving.catalogue import shown_name
from kedge.serving.projection import MAX_ANCHORS, Projection
from kedge.serving.service import _WORKERS, QueryVectors, Service
from kedge.serving.settings import Settings

Query = Callable[..., bytes]
CLASSES = ["checked", "level", "slanted", "upright"]
PNG = {"Content-Type": "image/png"}


def client_of(gallery: Path, settings: Settings | None = None) -> TestClient:
    return TestClient(create_app(gallery, settings), base_url="http://localhost/api/v1")


@pytest.fixture(scope="module")
def api(built: Path) -> Iterator[TestClient]:
    with client_of(built) as client:
        yield client


@pytest.fixture
def writable(own_gallery: Path, key: str, bearer: dict[str, str]) -> Iterator[TestClient]:
    with client_of(own_gallery, Settings(key=key, writable=True)) as client:
        client.headers.update(bearer)
        yield client


def service_of(client: TestClient) -> Any:
    assert isinstance(client.app, FastAPI)
    return client.app.state.service


def test_a_picture_finds_its_class(api: TestClient, built: Path, query: Query) -> None:
    for label in CLASSES:
        asked = {"k": 5, "rank": "class"}
        answer = api.post("/search", params=asked, content=query(label), headers=PNG).json()
        [search] = answer["searches"]
        assert [hit["label"] for hit in search["hits"]] == [label] * 5
        assert search["looked_at"] == [label]
        assert search["compared"] == 40
        assert answer["nearest"][0]["name"] == label
        assert answer["unknown"] in (True, False)
        expected = Gallery.open(built).search(query(label), k=5, rank="class")
        assert [hit["id"] for hit in search["hits"]] == expected.ids
        assert [hit["distance"] for hit in search["hits"]] == pytest.approx(expected.distances, abs=1e-4)


def test_hits_are_ranked_by_class_or_by_looks(api: TestClient, built: Path, query: Query, black_picture: bytes) -> None:
    gallery = Gallery.open(built)
    chosen = set()
    for picture, rank in product((query("level"), query("slanted"), black_picture, 7), ("auto", "class", "looks")):
        asked = {"k": 5, "rank": rank}
        if isinstance(picture, int):
            answer = api.get(f"/items/{picture}/similar", params=asked).json()
        else:
            answer = api.post("/search", params=asked, content=picture, headers=PNG).json()
        expected = gallery.search(picture, k=5, rank=rank)  # type: ignore[arg-type]
        [search] = answer["searches"]
        assert (answer["rank"], answer["unknown"]) == (expected.rank, expected.unknown)
        assert [hit["id"] for hit in search["hits"]] == expected.ids
        assert [hit["distance"] for hit in search["hits"]] == pytest.approx(expected.distances, abs=1e-4)
        assert search["looked_at"] == expected.anchors
        assert search["compared"] == (40 if expected.rank == "class" else 160)
        assert rank in ("auto", answer["rank"])
        chosen.add((rank, answer["rank"]))
    assert chosen == {("auto", "class"), ("class", "class"), ("looks", "looks")}


def test_a_label_that_came_later_is_ranked_by_looks(own_gallery: Path, black_picture: bytes) -> None:
    gallery = Gallery.open(own_gallery)
    later = [np.full((12, 12, 3), grey, np.uint8) for grey in (1, 2, 3)]
    vectors = gallery.model.vectors(later)  # type: ignore[union-attr]
    ids = gallery.add_embeddings(vectors.embeddings.numpy(), ["later"] * 3, features=vectors.features.numpy())
    with client_of(own_gallery) as api:
        answer = api.post("/search", params={"k": 5}, content=black_picture, headers=PNG).json()
    [search] = answer["searches"]
    assert (answer["rank"], search["looked_at"]) == ("looks", ["later"])
    assert sorted(hit["id"] for hit in search["hits"][:3]) == ids


def test_without_features_everything_is_ranked_by_class(tmp_path: Path, own_gallery: Path) -> None:
    plain = Gallery.create(tmp_path / "plain", dim=3)
    plain.add_embeddings(np.random.default_rng(0).normal(size=(9, 3)), labels=["a", "b", "c"] * 3)
    with client_of(plain.path) as api:
        assert api.get("/info").json()["features"] == 0
        assert api.get("/items/3/similar").json()["rank"] == "class"
        refused = api.get("/items/3/similar", params={"rank": "looks"})
        sentence = "This gallery has no features beside its embeddings; leave rank=looks out."
        assert (refused.status_code, refused.json()) == (400, {"error": sentence})
        assert api.post("/search", params={"rank": "looks"}, content=b"x", headers=PNG).status_code == 400
    both = Gallery.open(own_gallery)
    [id] = both.add_embeddings(both.vector(7)[None], labels=["level"])
    with client_of(own_gallery) as api:
        assert api.get("/info").json()["features"] == both.features > 0
        assert api.get(f"/items/{id}/similar").json()["rank"] == "class"
        refused = api.get(f"/items/{id}/similar", params={"rank": "looks"})
        sentence = f"Item {id} was added without features; leave rank=looks out."
        assert (refused.status_code, refused.json()) == (400, {"error": sentence})


def test_bytes_and_forms_are_the_same(api: TestClient, query: Query) -> None:
    picture = query("level")
    answers = [
        api.post("/search", content=picture, headers=PNG),
        api.post("/search", content=picture, headers={"Content-Type": "application/octet-stream"}),
        api.post("/search", files={"file": ("any name", picture, "image/png")}),
    ]
    hits = [answer.json()["searches"][0]["hits"] for answer in answers]
    assert hits[0] == hits[1] == hits[2]


def test_both_ways_side_by_side(api: TestClient, query: Query) -> None:
    answer = api.post("/search", params={"method": "both", "probes": 2}, content=query("level"), headers=PNG).json()
    two_stage, brute_force = answer["searches"]
    assert (two_stage["method"], brute_force["method"]) == ("two_stage", "brute_force")
    assert two_stage["compared"] == 80
    assert len(two_stage["looked_at"]) == 2
    assert brute_force["compared"] == 160
    # The same distances, although two-stage alone ranks the hits of a list by looks.
    distances = [{hit["id"]: hit["distance"] for hit in search["hits"]} for search in (two_stage, brute_force)]
    common = distances[0].keys() & distances[1].keys()
    assert common
    assert [distances[0][id] for id in common] == pytest.approx([distances[1][id] for id in common], abs=1e-4)


def test_a_label_filter_leaves_only_these(api: TestClient, query: Query) -> None:
    asked = {"method": "brute_force", "label": ["slanted", "checked"], "k": 50}
    answer = api.post("/search", params=asked, content=query("level"), headers=PNG).json()
    labels = {hit["label"] for hit in answer["searches"][0]["hits"]}
    assert labels == {"slanted", "checked"}
    nothing = api.get("/items/0/similar", params={"label": "it's", "method": "brute_force"}).json()
    assert nothing["searches"][0]["hits"] == []


def test_an_item_finds_others_but_not_itself(api: TestClient) -> None:
    answer = api.get("/items/7/similar", params={"k": 200, "method": "brute_force"}).json()
    ids = [hit["id"] for hit in answer["searches"][0]["hits"]]
    assert len(ids) == 159
    assert 7 not in ids
    assert answer["seconds"]["encoder"] is None


def test_a_search_looks_at_the_nearest_anchors_only_and_reads_no_file(
    built: Path, query: Query, monkeypatch: pytest.MonkeyPatch
) -> None:
    with client_of(built) as api:
        expected = api.post("/search", content=query("level"), headers=PNG).json()
        monkeypatch.setattr(Anchors, "distances", lambda *_: pytest.fail("Distances to all anchors were computed."))
        monkeypatch.setattr(Anchors, "nearest_squares", lambda *_: np.zeros(1))  # whether the query is unknown
        monkeypatch.setattr(CalibrationFile, "_read", lambda _: pytest.fail("A file was read."))
        monkeypatch.setattr(Gallery, "item_vectors", lambda *_: pytest.fail("The table was read."))
        answer = api.post("/search", content=query("level"), headers=PNG).json()
        assert answer["nearest"] == expected["nearest"]
        distances = [anchor["distance"] for anchor in answer["nearest"]]
        assert distances == sorted(distances)
        for rank in ("auto", "class", "looks"):
            [item] = api.get("/items/7/similar", params={"k": 1, "rank": rank}).json()["searches"]
            assert item["hits"][0]["id"] != 7


def test_items_page_by_page(api: TestClient, built: Path) -> None:
    found, after = [], -1
    while after is not None:
        page = api.get("/items", params={"after": after, "limit": 60}).json()
        found += page["items"]
        after = page["next"]
    assert [item["id"] for item in found] == list(range(160))
    gallery = Gallery.open(built)
    for item in found[::37]:
        known = gallery.item(item["id"])
        assert (item["label"], item["name"]) == (known.label, Path(str(known.path)).name)
        assert api.get(f"/items/{item['id']}").json() == item
    level = api.get("/items", params={"label": "level", "limit": 500}).json()
    assert {item["label"] for item in level["items"]} == {"level"}
    assert level["next"] is None
    assert api.get("/items", params={"label": "nobody"}).json() == {"items": [], "next": None}


def test_classes_anchors_and_typical_pictures(api: TestClient) -> None:
    assert api.get("/classes").json() == {
        "classes": [{"name": name, "items": 40} for name in CLASSES],
        "unlabelled": 0,
    }
    anchors = api.get("/anchors").json()["anchors"]
    assert sorted(anchor["name"] for anchor in anchors) == CLASSES
    one = api.get("/anchors/2", params={"k": 6}).json()
    assert one["name"] == anchors[2]["name"]
    assert {hit["label"] for hit in one["typical"]} == {one["name"]}
    distances = [hit["distance"] for hit in one["typical"]]
    assert distances == sorted(distances)
    assert len(distances) == 6


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("photos/cat/1.jpg", "1.jpg"),
        ("/home/me/1.jpg", "1.jpg"),
        ("1.jpg", "1.jpg"),
        ("photos//cat/", "cat"),
        ("uploads/4c1d.png", None),
        ("/g/uploads/4c1d.png", None),
        ("my uploads/1.jpg", "1.jpg"),
        (None, None),
    ],
)
def test_a_path_is_shown_by_its_last_part(path: str | None, name: str | None) -> None:
    assert shown_name(path) == name


def test_thumbnails(api: TestClient, own_gallery: Path) -> None:
    answer = api.get("/items/3/thumbnail")
    assert answer.headers["Content-Type"] == "image/jpeg"
    assert Image.open(io.BytesIO(answer.content)).size == (12, 12)


def test_thumbnails_are_made_where_none_are_kept(own_gallery: Path, stripe_files: Path, tmp_path: Path) -> None:
    gallery = Gallery.create(tmp_path / "plain", Gallery.open(own_gallery).model)
    gallery.add(stripe_files / "train" / "level")
    gone = gallery.add_embeddings(np.zeros((1, gallery.dim), np.float32), paths=["/nowhere/x.png"])
    with client_of(gallery.path, Settings(images=(stripe_files,))) as api:
        assert Image.open(io.BytesIO(api.get("/items/0/thumbnail").content)).format == "JPEG"
        assert api.get(f"/items/{gone[0]}/thumbnail").status_code == 404


def test_the_map_places_items_anchors_and_queries(api: TestClient, query: Query) -> None:
    drawn = api.get("/map").json()
    assert drawn["classes"] == CLASSES
    assert sorted(drawn["items"]["id"]) == list(range(160))
    assert drawn["total"] == 160
    assert [drawn["items"]["label"].count(row) for row in range(4)] == [40] * 4
    few = api.get("/map", params={"limit": 8}).json()["items"]["label"]
    assert [few.count(row) for row in range(4)] == [2] * 4
    for label in CLASSES:
        x, y = api.post("/search", content=query(label), headers=PNG).json()["place"]
        at = {one["name"]: (one["x"] - x) ** 2 + (one["y"] - y) ** 2 for one in drawn["anchors"]}
        assert min(at, key=lambda name: at[name]) == label


def test_the_map_is_drawn_when_it_is_asked_for(built: Path, query: Query, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    plain = Projection.__init__

    def counted(self: Projection, anchors: np.ndarray, *others: np.ndarray) -> None:
        drawn.append(len(anchors))
        plain(self, anchors, *others)

    monkeypatch.setattr(Projection, "__init__", counted)
    with client_of(built) as api:
        assert api.post("/search", content=query("level"), headers=PNG).json()["place"] is None
        assert drawn == []
        assert api.get("/map").status_code == 200
        assert api.post("/search", content=query("level"), headers=PNG).json()["place"] is not None
        assert drawn == [4]


def test_a_map_of_too_many_anchors_is_refused_with_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Projection, "__init__", lambda *_: pytest.fail("It was drawn."))
    count = MAX_ANCHORS + 1
    anchors = np.random.default_rng(0).normal(size=(count, 4)).astype(np.float32)
    gallery = Gallery.create(tmp_path / "many", anchors=anchors)
    gallery.add_embeddings(anchors[:50], labels=[str(row) for row in range(50)])
    with client_of(gallery.path) as api:
        answer = api.get("/map")
        assert answer.status_code == 422
        assert answer.json() == {"error": "The map shows up to 2,000 anchors; this gallery has 2,001."}
        found = api.get("/items/3/similar", params={"k": 1, "method": "brute_force"}).json()
        assert len(found["searches"][0]["hits"]) == 1
        assert found["place"] is None


def test_info_health_readiness_and_metrics(api: TestClient, built: Path) -> None:
    info = api.get("/info").json()
    gallery = Gallery.open(built)
    assert (info["name"], info["items"], info["classes"], info["dim"]) == ("gallery", 160, 4, gallery.dim)
    assert info["model"]["fingerprint"] == gallery.model.fingerprint  # type: ignore[union-attr]
    assert info["version"] == kedge.__version__
    assert (info["writable"], info["calibrated"], info["thumbnails"]) == (False, True, 32)
    assert api.get("/health").json() == {"status": "alive"}
    assert api.get("/ready").json() == {"status": "ready"}
    api.get("/items/1")
    text = api.get("http://localhost/metrics").text
    assert 'kedge_requests_total{method="GET",route="/items/{id}",status="200"}' in text
    assert "kedge_gallery_items 160.0" in text


def test_errors_are_one_sentence(api: TestClient, query: Query) -> None:
    cases: list[tuple[int, httpx.Response]] = [
        (404, api.get("/items/160")),
        (404, api.get("/items/160/similar")),
        (404, api.get("/items/160/thumbnail")),
        (404, api.get("/anchors/4")),
        (404, api.get("/nothing")),
        (405, api.put("/items/1")),
        (415, api.post("/search", content=b"hello", headers={"Content-Type": "text/plain"})),
        (415, api.post("/search", content=b"hello")),
        (422, api.post("/search", content=b"hello", headers=PNG)),
        (422, api.post("/search", content=b"", headers=PNG)),
        (422, api.post("/search", params={"k": 0}, content=query("level"), headers=PNG)),
        (422, api.post("/search", params={"k": 201}, content=query("level"), headers=PNG)),
        (422, api.post("/search", params={"method": "magic"}, content=query("level"), headers=PNG)),
        (422, api.get("/items/1/similar", params={"rank": "magic"})),
        (422, api.post("/search", files={"other": query("level")})),
        (422, api.get("/items", params={"labels": "level"})),
        (400, api.post("/search", content=b"x", headers={"Content-Type": "multipart/form-data; boundary=b"})),
        (403, api.post("/items", content=query("level"), headers=PNG)),
        (403, api.delete("/items/1")),
    ]
    for status, answer in cases:
        assert answer.status_code == status, answer.text
        assert list(answer.json()) == ["error"]
        assert answer.json()["error"].endswith((".", "…"))


def test_a_gallery_of_vectors_is_searched_by_its_items(tmp_path: Path, query: Query) -> None:
    gallery = Gallery.create(tmp_path / "vectors", dim=3)
    gallery.add_embeddings(np.random.default_rng(0).normal(size=(50, 3)), metadata={"year": list(range(50))})
    with client_of(gallery.path) as api:
        assert api.get("/info").json()["model"] is None
        assert len(api.get("/items/3/similar", params={"k": 4, "probes": 9}).json()["searches"][0]["hits"]) == 4
        assert api.get("/items/3").json()["metadata"] == {"year": 3}
        assert api.get("/items/3/thumbnail").status_code == 404
        assert api.post("/search", content=query("level"), headers=PNG).status_code == 422
        assert len(api.get("/map").json()["items"]["id"]) == 50


def test_an_empty_gallery_answers_with_nothing(built: Path, tmp_path: Path, query: Query) -> None:
    gallery = Gallery.create(tmp_path / "empty", Gallery.open(built).model)
    with client_of(gallery.path) as api:
        assert api.post("/search", content=query("level"), headers=PNG).json()["searches"][0]["hits"] == []
        assert api.get("/map").json()["items"]["id"] == []
        assert api.get("/items").json() == {"items": [], "next": None}
        assert api.get("/classes").json()["classes"] == []


def test_pictures_are_added_and_removed(writable: TestClient, own_gallery: Path, query: Query) -> None:
    added = writable.post("/items", params={"label": "level"}, content=query("level"), headers=PNG)
    assert added.status_code == 201
    item = added.json()
    assert item["label"] == "level"
    hits = writable.post("/search", content=query("level"), headers=PNG).json()["searches"][0]["hits"]
    assert (hits[0]["id"], hits[0]["distance"]) == (item["id"], pytest.approx(0, abs=1e-3))
    assert writable.get(f"/items/{item['id']}/thumbnail").status_code == 200
    again = writable.post("/items", params={"label": "level"}, content=query("level"), headers=PNG)
    assert (again.status_code, str(item["id"]) in again.json()["error"]) == (409, True)
    assert Gallery.open(own_gallery).item(item["id"]).label == "level"
    assert writable.delete(f"/items/{item['id']}").status_code == 204
    assert writable.delete(f"/items/{item['id']}").status_code == 404
    assert writable.get(f"/items/{item['id']}").status_code == 404
    assert writable.get("/info").json()["items"] == 160


def test_uploads_keep_their_names_made_safe(writable: TestClient, own_gallery: Path, query: Query) -> None:
    names = {
        "Käfer 7 (rot).png": "Käfer 7 (rot).png",
        "C:\\photos\\..\\cat.JPG": "cat.JPG",
        "../../etc/passwd": "passwd",
        ".bashrc": "bashrc",
        "a\n\u202eb<script>.png": "a__b_script_.png",
        "x" * 400 + ".jpeg": "x" * 120 + ".jpeg",
        "..": None,
        "///": None,
    }
    uploads = own_gallery / "uploads"
    for number, (given, kept) in enumerate(names.items()):
        content = query("level", number)
        if number % 2:
            added = writable.post("/items", params={"name": given}, content=content, headers=PNG)
        else:
            added = writable.post("/items", files={"file": (given, content, "image/png")})
        assert added.status_code == 201, added.text
        item = added.json()
        # A form's own encoding of a line break or a quote is what came.
        assert item["name"] == kept or (number % 2 == 0 and given.startswith("a\n"))
        file = Path(str(Gallery.open(own_gallery).item(item["id"]).path))
        assert file.read_bytes() == content
        assert file.resolve().is_relative_to(uploads.resolve())
        assert writable.get(f"/items/{item['id']}/thumbnail").status_code == 200
    assert all(file.parent == uploads or file.parent.parent == uploads for file in uploads.rglob("*") if file.is_file())


def test_what_is_added_to_a_class_counts_there(writable: TestClient, query: Query) -> None:
    item = writable.post("/items", params={"label": "level"}, content=query("level"), headers=PNG).json()
    expected = [{"name": name, "items": 40 + (name == "level")} for name in CLASSES]
    assert writable.get("/classes").json()["classes"] == expected
    assert item in writable.get("/items", params={"label": "level", "limit": 500}).json()["items"]
    assert writable.get("/map").json()["classes"] == CLASSES
    assert writable.get("/info").json()["classes"] == 4


def test_a_thumbnail_that_is_known_is_not_sent_again(api: TestClient) -> None:
    first = api.get("/items/3/thumbnail")
    again = api.get("/items/3/thumbnail", headers={"If-None-Match": first.headers["ETag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert api.get("/items/4/thumbnail", headers={"If-None-Match": first.headers["ETag"]}).status_code == 200


def test_a_calibration_that_another_process_writes_is_seen(own_gallery: Path, query: Query) -> None:
    with client_of(own_gallery) as api:
        for threshold, unknown in ((0.0, True), (1e9, False)):
            save_calibration(own_gallery, Calibration(threshold, 0.95, 40))
            assert api.post("/search", content=query("level"), headers=PNG).json()["unknown"] is unknown


def test_a_key_is_wanted_wherever_the_application_is_mounted(built: Path, key: str, bearer: dict[str, str]) -> None:
    outer = FastAPI()
    outer.mount("/pictures", create_app(built, Settings(key=key)))
    client = TestClient(outer, base_url="http://localhost")
    assert client.get("/pictures/api/v1/items").status_code == 401
    assert client.get("/pictures/api/v1/items", headers=bearer).status_code == 200
    assert client.get("/pictures/").status_code == 200


def test_whoever_hangs_up_leaves_no_error(built: Path) -> None:
    app = create_app(built)
    sent: list[dict[str, object]] = []

    async def hang_up() -> dict[str, str]:
        return {"type": "http.disconnect"}

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    headers = [(b"host", b"localhost"), (b"content-type", b"image/png")]
    scope = {"type": "http", "method": "POST", "path": "/api/v1/search", "query_string": b"", "headers": headers}
    asyncio.run(app(scope, hang_up, send))  # type: ignore[arg-type]
    assert [message.get("status") for message in sent][:1] == [400]


def test_a_write_that_has_begun_is_answered_however_long_it_takes(
    own_gallery: Path, key: str, bearer: dict[str, str], query: Query, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Gallery.add

    def slow(self: Gallery, *arguments: object, **options: object) -> object:
        time.sleep(3)
        return plain(self, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Gallery, "add", slow)
    with client_of(own_gallery, Settings(key=key, writable=True, seconds=1.5)) as api:
        api.headers.update(bearer | PNG)
        for row in range(4):  # the processes that decode have started
            api.post("/search", content=query("level", row))
        answers: list[httpx.Response] = []
        threads = [
            threading.Thread(target=lambda row=row: answers.append(api.post("/items", content=query("level", row))))
            for row in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(answer.status_code for answer in answers) == [201, 503]
        assert api.get("/info").json()["items"] == 161


def test_a_label_that_is_new_becomes_a_class(writable: TestClient, query: Query) -> None:
    for number in range(3):
        content = query("checked", number)
        assert writable.post("/items", params={"label": "new one"}, content=content, headers=PNG).status_code == 201
    assert {"name": "new one", "items": 3} in writable.get("/classes").json()["classes"]
    assert "new one" in {one["name"] for one in writable.get("/map").json()["anchors"]}
    answer = writable.post("/search", content=query("checked", 4), headers=PNG).json()
    near = [(anchor["distance"], anchor["name"]) for anchor in answer["nearest"]]
    assert near == sorted(near)
    assert "new one" in [name for _, name in near[:2]]


def test_nothing_but_pictures_is_kept(writable: TestClient, own_gallery: Path) -> None:
    assert writable.post("/items", content=b"<script>", headers=PNG).status_code == 422
    assert not (own_gallery / "uploads").exists()
    for label in ("", "x" * 201, "two\nlines"):
        assert writable.post("/items", params={"label": label}, content=b"x", headers=PNG).status_code == 422


def test_a_new_version_is_seen_at_once(api: TestClient, own_gallery: Path) -> None:
    with client_of(own_gallery) as other:
        assert other.get("/info").json()["items"] == 160
        Gallery.open(own_gallery).remove([5, 6])
        assert other.get("/info").json()["items"] == 158
        assert other.get("/items/5").status_code == 404
        assert 6 not in [hit["id"] for hit in other.get("/items/7/similar").json()["searches"][0]["hits"]]


# ---------------------------------------------------------------------- many at once


def test_queries_that_arrive_together_share_a_batch(built: Path, query: Query, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    go = threading.Event()
    plain = Service._embed

    def slow(self: Service, shape: tuple[int, ...], several: list[np.ndarray]) -> list[QueryVectors]:
        sizes.append(len(several))
        if len(sizes) == 2:  # the first was the server's own, to get ready
            go.wait(60)
        return plain(self, shape, several)

    monkeypatch.setattr(Service, "_embed", slow)
    expected = [Gallery.open(built).search(query(label), k=1).ids for label in CLASSES]

    async def ask() -> list[list[int]]:
        app = create_app(built, Settings(batch=3))
        async with app.router.lifespan_context(app):
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost/api/v1") as client:

                async def one(label: str) -> list[int]:
                    answer = await client.post("/search", params={"k": 1}, content=query(label), headers=PNG)
                    return [hit["id"] for hit in answer.json()["searches"][0]["hits"]]

                first = asyncio.create_task(one(CLASSES[0]))
                while len(sizes) < 2:
                    await asyncio.sleep(0.01)
                others = [asyncio.create_task(one(label)) for label in CLASSES[1:] + CLASSES]
                while len(app.state.service._encoding._queue) < len(others):
                    await asyncio.sleep(0.01)
                go.set()
                return await asyncio.gather(first, *others)

    found = asyncio.run(ask())
    assert sizes[:2] == [1, 1]
    assert sorted(sizes[2:]) == [1, 3, 3]
    assert found == [*expected, *expected]


@pytest.mark.parametrize("method", ["two_stage", "brute_force", "both"])
def test_searches_that_arrive_together_share_a_batch(
    built: Path, query: Query, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    sizes: list[int] = []
    go, plain = threading.Event(), Service.search

    def slow(self: Service, catalogue: Any, several: list[QueryVectors], k: int, **options: Any) -> Any:
        sizes.append(len(several))
        go.wait(60)
        return plain(self, catalogue, several, k, **options)

    async def ask() -> tuple[list[Any], list[Any]]:
        app = create_app(built)
        async with app.router.lifespan_context(app):
            queue, transport = app.state.service.searching._queue, httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost/api/v1") as client:

                async def one(label: str, k: int = 3) -> Any:
                    params = {"k": k, "method": method}
                    answer = (await client.post("/search", params=params, content=query(label), headers=PNG)).json()
                    # Not the distances: embeddings differ in their last digits where images share a batch.
                    hits = [[(hit["id"], hit["anchor"]) for hit in search["hits"]] for search in answer["searches"]]
                    facts = [
                        (search["method"], search["looked_at"], search["compared"]) for search in answer["searches"]
                    ]
                    return (
                        hits,
                        facts,
                        answer["rank"],
                        answer["unknown"],
                        [each["anchor"] for each in answer["nearest"]],
                    )

                alone = [await one(label) for label in CLASSES]
                monkeypatch.setattr(Service, "search", slow)
                busy = []
                for threads in range(1, _WORKERS + 1):
                    busy.append(asyncio.create_task(one("level", 10 + threads)))
                    while len(sizes) < threads:
                        await asyncio.sleep(0.01)
                together = [asyncio.create_task(one(label)) for label in CLASSES]
                while len(queue) < len(together):
                    await asyncio.sleep(0.01)
                go.set()
                await asyncio.gather(*busy)
                return alone, await asyncio.gather(*together)

    alone, together = asyncio.run(ask())
    assert len(CLASSES) in sizes
    assert together == alone


def test_whoever_comes_too_many_is_told_to_come_back(
    built: Path, query: Query, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()
    plain = Service._embed
    calls: list[int] = []

    def slow(self: Service, shape: tuple[int, ...], several: list[np.ndarray]) -> list[QueryVectors]:
        calls.append(1)
        if len(calls) > 1:
            go.wait(10)
        return plain(self, shape, several)

    monkeypatch.setattr(Service, "_embed", slow)
    with client_of(built, Settings(concurrency=2)) as api:
        answers: list[httpx.Response] = []
        threads = [
            threading.Thread(target=lambda: answers.append(api.post("/search", content=query("level"), headers=PNG)))
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        end = time.monotonic() + 10
        while "kedge_requests_inside 2.0" not in api.get("http://localhost/metrics").text and time.monotonic() < end:
            time.sleep(0.02)
        refused = api.post("/search", content=query("level"), headers=PNG)
        assert refused.status_code == 429
        assert int(refused.headers["Retry-After"]) >= 1
        assert api.get("/info").status_code == 200  # those that look are not in the way
        go.set()
        for thread in threads:
            thread.join()
        assert [answer.status_code for answer in answers] == [200, 200]
        assert api.post("/search", content=query("level"), headers=PNG).status_code == 200


# ---------------------------------------------------------------------- the client, and the real thing


def test_the_client(own_gallery: Path, stripe_files: Path, serving_in_thread: Callable[..., Any], key: str) -> None:
    with serving_in_thread(own_gallery, writable=True, key=key) as server:
        client = kedge.Client(server.url, key)
        assert repr(client) == f"Client('{server.url}', with a key, timeout=60)"
        assert client.info()["items"] == 160
        assert [one["name"] for one in client.classes()] == CLASSES
        file = next((stripe_files / "test" / "slanted").iterdir())
        for picture in (file, str(file), file.read_bytes()):
            found = client.search(picture, k=3, labels=["slanted", "level"])
            assert found["searches"][0]["hits"][0]["label"] == "slanted"
        assert len(client.search(4, method="both")["searches"]) == 2
        assert client.search(file, rank="class")["rank"] == "class"
        assert [client.search(query, rank="looks")["rank"] for query in (4, file)] == ["looks", "looks"]
        assert len(list(client.items())) == 160
        assert len(list(client.items("level"))) == 40
        assert client.thumbnail(0)[:2] == b"\xff\xd8"
        item = client.add(file, "slanted")
        assert item["name"] == file.name
        assert client.item(item["id"]) == item
        client.remove(item["id"])
        with pytest.raises(ServiceError, match=r"There is no item"):
            client.item(item["id"])
        with pytest.raises(ServiceError, match="key"):
            kedge.Client(server.url).info()
        with pytest.raises(ConfigError, match="cannot be read"):
            client.search("nowhere.png")
    with pytest.raises(ServiceError, match="does not answer"):
        client.info()
    with pytest.raises(ConfigError, match="http"):
        kedge.Client("localhost:8000")


def test_the_description_is_complete(api: TestClient) -> None:
    described = json.loads(api.get("/openapi.json").text)
    paths = {path.removeprefix("/api/v1") for path in described["paths"]}
    assert paths == {
        *("/search", "/items", "/items/{id}", "/items/{id}/similar", "/items/{id}/thumbnail"),
        *("/classes", "/anchors", "/anchors/{anchor}", "/map", "/info", "/health", "/ready"),
    }
    for methods in described["paths"].values():
        for operation in methods.values():
            assert operation["description"].endswith(".")
