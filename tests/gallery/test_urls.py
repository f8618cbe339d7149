"""Galleries in an object store: a real server of Amazon's protocol, on this machine."""

import logging
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator

import numpy as np
import pytest
from pyarrow.fs import S3FileSystem

from kedge import Gallery
from kedge.errors import GalleryError
from kedge.gallery.location import Location

pytest.importorskip("moto")
DIM = 8


@pytest.fixture(scope="module")
def store() -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    for _ in range(300):
        try:
            urllib.request.urlopen(address)
            break
        except OSError:
            time.sleep(0.1)
    yield address
    server.kill()
    server.wait()


@pytest.fixture
def bucket(store: str, tmp_path, monkeypatch: pytest.MonkeyPatch, request) -> str:
    logging.getLogger("botocore").setLevel(logging.ERROR)
    for name, value in {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT": store,
        "AWS_ENDPOINT_URL": store,
        "AWS_ALLOW_HTTP": "true",
        "KEDGE_GALLERIES": str(tmp_path / "here"),
    }.items():
        monkeypatch.setenv(name, value)
    name = f"pictures-{abs(hash(request.node.name))}"
    host = store.removeprefix("http://")
    S3FileSystem(endpoint_override=host, scheme="http", allow_bucket_creation=True).create_dir(name)
    return f"s3://{name}"


@pytest.fixture(scope="module")
def anchors() -> np.ndarray:
    return np.eye(5, DIM, dtype=np.float32) * 4


@pytest.fixture(scope="module")
def items(anchors: np.ndarray) -> np.ndarray:
    chance = np.random.default_rng(0)
    return anchors[chance.integers(5, size=300)] + 0.3 * chance.standard_normal((300, DIM)).astype(np.float32)


def test_it_finds_what_a_folder_finds(bucket: str, tmp_path, anchors: np.ndarray, items: np.ndarray) -> None:
    there = Gallery.create(f"{bucket}/one", anchors=anchors)
    here = Gallery.create(tmp_path / "one", anchors=anchors)
    for gallery in (there, here):
        assert gallery.add_embeddings(items, labels=["a", "b", None] * 100) == list(range(300))
        gallery.remove([3, 4])
        gallery.optimize()
        gallery.add_embeddings(items[:10] + 0.01)
    again = Gallery.open(f"{bucket}/one")
    assert len(again) == len(here) == 308
    for where in (None, "label = 'a'"):
        found = [
            [hit._replace(path=None) for result in gallery.search_embeddings(items, k=7, where=where) for hit in result]
            for gallery in (again, here)
        ]
        assert found[0] == found[1]


def test_another_machine_sees_it_and_writes_to_it(
    bucket: str, tmp_path, anchors: np.ndarray, items: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Gallery.create(f"{bucket}/two", anchors=anchors)
    assert first.add_embeddings(items[:5]) == [0, 1, 2, 3, 4]
    monkeypatch.setenv("KEDGE_GALLERIES", str(tmp_path / "another machine"))
    second = Gallery.open(f"{bucket}/two")
    assert second.path != first.path
    assert second.add_embeddings(items[5:7]) == [5, 6]
    assert first.add_embeddings(items[7:9]) == [7, 8]
    second.calibrate(np.repeat(items, 2, axis=0))
    time.sleep(1.1)  # what was seen of an address counts as the newest for a second
    assert len(first) == len(second) == 9
    assert Gallery.open(f"{bucket}/two").calibration == second.calibration
    versions = first.versions()
    first.restore(versions[1].number)
    assert second.add_embeddings(items[:1]) == [9], "no id is given twice, whatever is restored"


def test_a_counter_that_changes_meanwhile_is_asked_again(
    bucket: str, anchors: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    gallery = Gallery.create(f"{bucket}/three", anchors=anchors)
    place = gallery.location
    from kedge.gallery import location as module

    real, calls = module.lance.dataset, []

    class Late:
        dataset = staticmethod(lambda uri: _Read(real(uri), calls, place))
        write_dataset = module.lance.write_dataset

    monkeypatch.setattr(module, "lance", Late)
    assert place.reserve_ids(5) == 10
    assert len(calls) == 2


@pytest.mark.parametrize("counter", ["missing", "stale"])
def test_no_id_twice_whatever_the_counter_says(
    counter: str, bucket: str, anchors: np.ndarray, items: np.ndarray
) -> None:
    from kedge.gallery import location as module

    gallery = Gallery.create(f"{bucket}/{counter}", anchors=anchors)
    assert gallery.add_embeddings(items[:5]) == [0, 1, 2, 3, 4]
    if counter == "stale":
        module.lance.write_dataset(module._counter_row(2), f"{gallery.location}/next_id.lance", mode="overwrite")
    else:
        system, path = module.Folder(str(gallery.location)), "next_id.lance"
        system.remove(path)
    assert Gallery.open(f"{bucket}/{counter}").add_embeddings(items[:2]) == [5, 6]


class _Read:
    """A counter that somebody else moves between the first reading and the first writing."""

    def __init__(self, dataset, calls: list, place: Location) -> None:
        self.dataset, self.calls, self.place = dataset, calls, place

    def to_table(self):
        found = self.dataset.to_table()
        self.calls.append(1)
        if len(self.calls) == 1:
            new = found.set_column(1, "next", [[10]])
            self.dataset.merge_insert("name").when_matched_update_all().execute(new.cast(found.schema))
        return found

    def merge_insert(self, name: str):
        return self.dataset.merge_insert(name)


def test_what_is_not_there_is_one_sentence(bucket: str, anchors: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(GalleryError, match=r"Gallery .s3://.* does not exist"):
        Gallery.open(f"{bucket}/nothing")
    Gallery.create(f"{bucket}/there", anchors=anchors)
    with pytest.raises(GalleryError, match="already exists"):
        Gallery.create(f"{bucket}/there", anchors=anchors)
    with pytest.raises(GalleryError, match="cannot be reached"):
        Gallery.open("nowhere://bucket/gallery")
