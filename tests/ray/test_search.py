"""Several processes find what one finds."""

from __future__ import annotations

import importlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import lance
import numpy as np
import pytest

from kedge.errors import ConfigError, GalleryError
from kedge.gallery import Gallery
from kedge.gallery.anchors import Anchors
from kedge.ray import build_index, lance_index, search_with_ray

DIM = 8


def labels(count: int) -> list[str | None]:
    """Labels that have an anchor, one that has none, and no label."""
    return [("a", "b", "new", None)[number % 4] for number in range(count)]


def assert_agree(gallery: Gallery, queries: np.ndarray, k: int, **how: object) -> None:
    wanted = gallery.search_embeddings(queries, k, **how)  # type: ignore[arg-type]
    found = search_with_ray(gallery, queries, k, **how)  # type: ignore[arg-type]
    assert any(len(one) for one in wanted)
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.ids == theirs.ids
        assert mine.anchors == theirs.anchors
        assert mine.unknown == theirs.unknown
        np.testing.assert_allclose(mine.distances, theirs.distances, rtol=0, atol=1e-4)
        rest = [(hit.path, hit.label, hit.anchor) for hit in theirs]
        assert [(hit.path, hit.label, hit.anchor) for hit in mine] == rest


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("lists", ["anchor", pytest.param("label", marks=pytest.mark.soak)])
def test_the_same_hits(tmp_path: Path, lists: str) -> None:
    chance = np.random.default_rng(0)
    anchors = chance.normal(size=(4, DIM))
    gallery = Gallery.create(tmp_path / "g", anchors=anchors, classes=["a", "b", "c", "d"], lists=lists)  # type: ignore[arg-type]
    queries = chance.normal(size=(3, DIM)).astype(np.float32)
    assert [len(one) for one in search_with_ray(gallery, queries)] == [0, 0, 0]
    vectors = chance.normal(size=(600, DIM))
    for some in (slice(0, 300), slice(300, 600)):
        gallery.add_embeddings(vectors[some], labels(600)[some], metadata={"size": list(range(600))[some]})
    gallery.remove(list(range(0, 40)))
    with pytest.raises(GalleryError, match=r"has no index that several processes can search: run kedge.ray"):
        search_with_ray(gallery, queries)
    assert build_index(gallery) == 560
    gallery.optimize()
    gallery.calibrate(vectors[:50])
    assert_agree(gallery, queries, 30, probes=1)
    [item] = gallery.search(queries[0], 1, where="size < 300 AND label IS NOT NULL").ids
    assert_agree(gallery, queries[:2], 700, probes=99, where="size < 300 AND label IS NOT NULL", exclude_id=item)

    # Few match, and not in the nearest lists: both look on.
    assert_agree(gallery, queries, 5, probes=1, where="size < 44 AND label = 'new'")

    for wrong, sentence in (({"k": 0}, "k must be"), ({"probes": 0}, "probes must"), ({"where": "size <"}, "where=")):
        with pytest.raises(ConfigError, match=sentence):
            search_with_ray(gallery, queries, **wrong)  # type: ignore[arg-type]
    if lists == "label":
        return

    # What comes later: a label that is known leaves the anchors where they are, and only the rest is indexed.
    gallery.add_embeddings(chance.normal(size=(50, DIM)), ["a"] * 50)
    with pytest.raises(GalleryError, match="has items that its index does not know"):
        search_with_ray(gallery, queries)
    assert build_index(gallery) == 50
    # A new one does not.
    gallery.add_embeddings(chance.normal(size=(50, DIM)), ["newer"] * 50)
    assert build_index(gallery) == 660
    gallery.optimize()
    assert_agree(gallery, queries, 30, probes=2)
    [index] = lance.dataset(str(gallery.path / "record.lance")).describe_indices()
    assert [file.stem for file in (gallery.path / "index").iterdir()] == [index.name]


def test_no_cluster_there_and_none_imported(tmp_path: Path) -> None:
    script = """
import sys
import numpy as np
import kedge, kedge.cli, kedge.ray
from kedge.gallery import Gallery
from kedge.gallery.anchors import Anchors

assert "ray" not in sys.modules
gallery = Gallery.create(sys.argv[1], dim=3)
gallery.add_embeddings(np.ones((3, 3)))
try:
    kedge.ray.build_index(gallery, address="127.0.0.1:1")
except kedge.KedgeError as error:
    print(error)
"""
    command = [sys.executable, "-c", script, str(tmp_path / "g")]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert said.startswith("No Ray cluster answers at 127.0.0.1:1: check --address")
    assert len(said.splitlines()) == 1


def test_the_former_name_of_the_package() -> None:
    sys.modules.pop("kedge.scale", None)
    with pytest.warns(DeprecationWarning, match=r"kedge\.scale is now called kedge\.ray"):
        former = importlib.import_module("kedge.scale")
    assert former.search_with_ray is search_with_ray


def test_later_labels_take_no_query_from_learned_anchors() -> None:
    chance = np.random.default_rng(0)
    anchors = Anchors(chance.normal(size=(6, DIM)).astype(np.float32), tuple("abcdef"), 4, learned_first=True)
    queries = chance.normal(size=(50, DIM)).astype(np.float32)
    routed = np.linalg.norm(lance_index._centroids(anchors) - queries[:, None], axis=2).argsort(axis=1)
    np.testing.assert_array_equal(routed[:, :4], anchors.nearest(queries, 4))
    np.testing.assert_array_equal(lance_index._centroids(replace(anchors, learned_first=False)), anchors.vectors)
