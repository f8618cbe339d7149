"""A gallery made with Ray is the one made without, whoever is killed on the way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from kedge.errors import ConfigError, DataError, GalleryError, KedgeError
from kedge.gallery import Added, Gallery
from kedge.model import Model
from kedge.ray import index_with_ray, sources
from kedge.ray.cluster import connect
from kedge.ray.journal import Journal

Same = Callable[[Gallery, Gallery], None]
Draw = Callable[[Path, int], None]

# A driver of its own, which says how far it is.
DRIVER = """
import sys
from kedge.gallery import Gallery
from kedge.ray import index_with_ray, sources

gallery, source, address = sys.argv[1:]
sources.CHUNK = 16
say = lambda added: print(added.done, flush=True)
index_with_ray(Gallery.open(gallery), source, address=address, progress=say)
"""


def embedders() -> list[int]:
    """The processes that hold a model."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if b"ray::MapWorker(MapBatches(Embedder))" in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except (OSError, ValueError):
            continue
    return found


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "CHUNK", 16)


@pytest.mark.usefixtures("cluster")
def test_the_same_as_without_and_only_what_is_new(
    gallery: Gallery,
    model: Model,
    photos: Path,
    local: Gallery,
    assert_same: Same,
    draw: Draw,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def killed(_: object) -> None:
        raise KeyboardInterrupt

    # A driver that dies when all is committed leaves its journal, which must not be committed again.
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "remove", killed)
        patch.setattr(Journal, "resume", lambda *_: False)
        with pytest.raises(KeyboardInterrupt):
            index_with_ray(gallery, photos, workers=1)
    (gallery.path / "journal").rename(tmp_path / "journal")
    assert_same(gallery, local)
    (tmp_path / "journal").rename(gallery.path / "journal")

    # What changed, what is new, what is there and what is gone: as without Ray.
    other = Gallery.create(tmp_path / "other", model, thumbnails=16)
    other.add(photos)
    draw(tmp_path / "new.png", 2000)
    (tmp_path / "linked.jpg").symlink_to(photos / "00000.jpg")
    files = [tmp_path / "new.png", *sorted(photos.rglob("*.*"))[:30], tmp_path / "linked.jpg", tmp_path / "gone.jpg"]
    changed = files[12]
    before = changed.read_bytes()
    try:
        draw(changed, 3000)
        (tmp_path / "some.txt").write_text("\n".join(map(str, files)))
        seen: list[int] = []
        ours = index_with_ray(gallery, tmp_path / "some.txt", workers=1, progress=lambda one: seen.append(one.done))
        theirs = other.add(files)
    finally:
        changed.write_bytes(before)
    assert (ours, ours.present, ours.skipped, ours.total) == (theirs, theirs.present, theirs.skipped, theirs.total)
    assert len(ours) == 3
    assert_same(gallery, other)
    assert (seen[0], seen[-1]) == (0, len(files))
    lines = (gallery.path / "unreadable.txt").read_text().splitlines()
    assert lines[-1].startswith(f"{tmp_path / 'gone.jpg'}\t")


@pytest.mark.soak
@pytest.mark.usefixtures("small_chunks")
def test_the_driver_is_killed(
    cluster: Cluster, gallery: Gallery, photos: Path, local: Gallery, assert_same: Same
) -> None:
    command = [sys.executable, "-c", DRIVER, str(gallery.path), str(photos), cluster.address]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    done = next(int(line) for line in process.stdout if line.strip().isdigit() and int(line))
    process.kill()
    process.wait()
    assert 0 < done < 122
    assert len(Gallery.open(gallery.path)) == 0
    # What another writer does meanwhile takes nothing from what is finished.
    gallery.remove(gallery.add([photos / "c0" / "00003.jpg"]))
    kept: list[int] = []
    added = index_with_ray(gallery, photos, progress=lambda one: kept.append(one.done))
    assert kept[0] >= done
    assert (len(added), len(added.skipped), added[0]) == (120, 2, 0)
    assert_same(gallery, local)


def test_what_is_refused(gallery: Gallery, tmp_path: Path, photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="nowhere does not exist"):
        index_with_ray(gallery, tmp_path / "nowhere")
    (tmp_path / "song.mp3").touch()
    with pytest.raises(DataError, match=r"song.mp3 cannot be indexed; pass a folder of images, a .txt"):
        index_with_ray(gallery, tmp_path / "song.mp3")
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match="holds no images"):
        index_with_ray(gallery, tmp_path / "none")
    with pytest.raises(ConfigError, match="workers must be at least 1, found 0"):
        index_with_ray(gallery, photos, workers=0)
    with pytest.raises(ConfigError, match="has no model"):
        index_with_ray(Gallery.create(tmp_path / "vectors", dim=3), photos)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"needs ray, which is not installed: pip install 'kedge\[scale\]'"):
        index_with_ray(gallery, photos)


@pytest.mark.usefixtures("cluster")
def test_a_writer_elsewhere_and_an_error_on_a_worker(
    gallery: Gallery, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kedge.gallery import table as module

    monkeypatch.setattr(module, "_LOCK_SECONDS", 0.1)
    with gallery.writing(), pytest.raises(GalleryError, match="Another process is writing"):
        index_with_ray(Gallery.open(gallery.path), photos)

    @ray.remote
    def fail(error: Exception) -> None:
        raise error

    # What a worker says in one sentence is said here; of anything else, the reason.
    for error, sentence in ((ConfigError("One sentence."), "^One sentence.$"), (OSError(28, "full"), "failed .*full")):
        with pytest.raises(KedgeError, match=sentence), connect():
            ray.get(fail.remote(error))


@pytest.mark.usefixtures("small_chunks")
def test_a_worker_and_a_node_are_killed(
    cluster: Cluster, gallery: Gallery, photos: Path, local: Gallery, assert_same: Same
) -> None:
    lost = cluster.list_all_nodes()[-1]
    killed: list[int] = []

    def kill(added: Added) -> None:
        if 0 < added.done < added.total and len(killed) < 2:
            # First one that embeds; then, with the next chunk that is finished, a whole machine.
            killed.append(lost.all_processes["raylet"][0].process.pid if killed else embedders()[0])
            os.kill(killed[-1], signal.SIGKILL)

    try:
        added = index_with_ray(gallery, photos, progress=kill)
    finally:
        cluster.remove_node(lost, allow_graceful=False)
        cluster.add_node(num_cpus=1, include_dashboard=False)
        # Until then, work of other tests may be sent to the node that is gone.
        until = time.monotonic() + 120
        while any(node["NodeID"] == lost.node_id and node["Alive"] for node in ray.nodes()):
            assert time.monotonic() < until
            time.sleep(0.2)
    assert len(killed) == 2
    assert (len(added), added.present, len(added.skipped)) == (120, 0, 2)
    assert_same(gallery, local)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("cluster")
def test_many_pictures_and_a_killed_worker(
    gallery: Gallery, model: Model, draw_many: Callable[[Path, int], Path], assert_same: Same, tmp_path: Path
) -> None:
    photos = draw_many(tmp_path / "many", 20_000)
    other = Gallery.create(tmp_path / "other", model, thumbnails=16)
    other.add(photos)
    killed: list[int] = []

    def kill(added: Added) -> None:
        if not killed and added.done >= added.total // 2:
            killed.append(embedders()[0])
            os.kill(killed[0], signal.SIGKILL)

    assert len(index_with_ray(gallery, photos, progress=kill)) == 20_000
    assert killed
    assert_same(gallery, other)
