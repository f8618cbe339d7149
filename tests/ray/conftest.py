from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from kedge.encoders import build_encoder
from kedge.gallery import Gallery
from kedge.gallery.schema import vectors_of
from kedge.images import Preprocessing
from kedge.model import Model

pytest.importorskip("ray")
pytest.importorskip("lance_ray")

from ray.cluster_utils import Cluster

COLUMNS = ["id", "path", "label", "hash", "thumbnail"]


def _draw(file: Path, seed: int) -> None:
    pixels = np.random.default_rng(seed).integers(0, 255, (24, 20, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file)


def _draw_many(root: Path, count: int) -> Path:
    for number in range(count):
        folder = root if number % 10 == 0 else root / f"c{number % 3}"
        folder.mkdir(parents=True, exist_ok=True)
        _draw(folder / f"{number:05d}.jpg", seed=number)
    (root / "c1" / "00000_empty.jpg").touch()
    (root / "c2" / "99999_text.png").write_text("no picture")
    return root


def _rows(gallery: Gallery) -> tuple[dict[str, list[object]], np.ndarray]:
    table = Gallery.open(gallery.path)._table.columns([*COLUMNS, "embedding"]).sort_by("id")
    return table.select(COLUMNS).to_pydict(), vectors_of(table)


def _assert_same(gallery: Gallery, local: Gallery) -> None:
    (mine, vectors), (theirs, wanted) = _rows(gallery), _rows(local)
    assert mine == theirs
    np.testing.assert_allclose(vectors, wanted, rtol=0, atol=1e-5)
    assert len(set(mine["id"])) == len(mine["id"])
    assert not (gallery.path / "journal").exists()


@pytest.fixture(scope="session")
def assert_same() -> Callable[[Gallery, Gallery], None]:
    """Item by item, vector by vector; and nothing is left of the work."""
    return _assert_same


@pytest.fixture(scope="session")
def draw() -> Callable[[Path, int], None]:
    return _draw


@pytest.fixture(scope="session")
def draw_many() -> Callable[[Path, int], Path]:
    """Pictures of three labels and of none, and two that cannot be read."""
    return _draw_many


@pytest.fixture(scope="session")
def model() -> Model:
    """Knows two of three labels."""
    torch.manual_seed(0)
    encoder = build_encoder("resnet10", dim=8, stem="imagenet")
    return Model(
        encoder, anchors=torch.randn(2, 8), classes=["c0", "c1"], preprocessing=Preprocessing(size=32, crop_pct=0.8)
    )


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _draw_many(tmp_path_factory.mktemp("source") / "photos", 120)


@pytest.fixture(scope="session")
def local(model: Model, photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Gallery:
    """What the same pictures make without Ray."""
    gallery = Gallery.create(tmp_path_factory.mktemp("local") / "g", model, thumbnails=16)
    gallery.add(photos)
    return gallery


@pytest.fixture
def gallery(model: Model, tmp_path: Path) -> Gallery:
    return Gallery.create(tmp_path / "g", model, thumbnails=16)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Two nodes with one processor each, and a head that does no work."""
    import ray

    folder = tempfile.mkdtemp(prefix="kedge-")  # short: it holds sockets
    (Path(folder) / "ray").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", folder)
        head = {
            "num_cpus": 0,
            "include_dashboard": False,
            "_system_config": {"idle_worker_killing_time_threshold_ms": 60_000},
        }
        found = Cluster(initialize_head=True, connect=True, head_node_args=head)
        for _ in range(2):
            found.add_node(num_cpus=1, include_dashboard=False)
        found.wait_for_nodes()
        yield found
        ray.shutdown()
        found.shutdown()
    shutil.rmtree(folder, ignore_errors=True)
