from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kedge.errors import ConfigError
from kedge.gallery import Gallery
from kedge.gallery.calibration import Calibration


def test_the_threshold_holds_for_items_to_come() -> None:
    """Over many draws, the share of new items that is accepted is at least what was asked for."""
    chance = np.random.default_rng(0)
    # Of numbers spread evenly from 0 to 1, a threshold accepts a share of just its value.
    shares = [Calibration.from_distances(chance.random(60), accept=0.9).threshold for _ in range(5000)]
    assert 0.9 <= np.mean(shares) < 0.905


def test_far_queries_are_unknown(tmp_path: Path) -> None:
    anchors = np.eye(3, 8) * 5
    chance = np.random.default_rng(0)
    gallery = Gallery.create(tmp_path / "g", anchors=anchors, classes=["a", "b", "c"])
    near = (anchors[chance.integers(0, 3, 200)] + chance.normal(size=(200, 8)) * 0.3).astype(np.float32)
    gallery.add_embeddings(near)
    assert gallery.search(near[0]).unknown is None
    calibration = gallery.calibrate(near, accept=0.95)
    assert calibration.items == 200
    for opened in (gallery, Gallery.open(gallery.path)):
        known = [result.unknown for result in opened.search_embeddings(near)]
        assert 0.90 < 1 - np.mean(np.array(known, dtype=float)) < 0.99
        assert opened.search(np.full(8, -9.0)).unknown is True


def test_bad_input(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least 19 are needed, found 5"):
        Calibration.from_distances(np.ones(5), 0.95)
    with pytest.raises(ConfigError, match="accept must lie between 0 and 1"):
        Calibration.from_distances(np.ones(5), 1.0)
    with pytest.raises(ConfigError, match="calibrate it with vectors"):
        Gallery.create(tmp_path / "g", dim=3).calibrate(tmp_path)
