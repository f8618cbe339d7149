from __future__ import annotations

from io import BytesIO

import numpy as np
import pytest
from matplotlib.colors import to_rgba
from PIL import Image

from kedge.datasets import Dataset, ImageSplit
from kedge.errors import ConfigError
from kedge.evaluation import retrieval_grid
from kedge.evaluation.plots import NEUTRAL, RIGHT, WRONG


@pytest.fixture
def dataset() -> Dataset:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (12, 3, 8, 8)).astype(np.uint8)
    labels = np.arange(12) % 3
    return Dataset(
        "tiny", ("ape", "bee", "a_class_with_a_long_name"), ImageSplit(images, labels), ImageSplit(images, labels)
    )


def test_frames_marks_and_names_tell_right_from_wrong(dataset: Dataset) -> None:
    hits = {"cam": np.array([[0, 3], [4, 2]]), "ce": np.array([[1, 0], [2, 5]])}
    figure = retrieval_grid(dataset, [0, 1], hits, title="What was found")
    shown = [axes for axes in figure.axes if axes.get_visible()]
    frames = [axes.spines["top"].get_edgecolor() for axes in shown]
    colours = {to_rgba(RIGHT): "right", to_rgba(WRONG): "wrong", to_rgba(NEUTRAL): "query"}
    expected = ["query", "right", "right", "wrong", "right", "query", "right", "wrong", "wrong", "wrong"]
    assert [colours[frame] for frame in frames] == expected
    marks = [axes.texts[0].get_text() if axes.texts else "query" for axes in shown]
    assert marks == [{"right": "✓", "wrong": "✗"}.get(kind, kind) for kind in expected]
    assert [axes.get_xlabel() for axes in shown][:4] == ["ape", "ape", "ape", "bee"]
    assert shown[7].get_xlabel() == "a class with a …"
    names = ["", "cam", "", "ce", "", "", "cam", "", "ce", ""]
    assert [axes.get_ylabel() for axes in shown] == names, "the query stands before its first row"
    rows = [
        int((dataset.train.images == axes.images[0].get_array().transpose(2, 0, 1)).all((1, 2, 3)).argmax())
        for axes in shown
    ]
    assert rows == [0, 0, 3, 1, 0, 1, 4, 2, 2, 5]


def test_it_becomes_a_png(dataset: Dataset) -> None:
    file = BytesIO()
    retrieval_grid(dataset, [0], {"cam": np.zeros((1, 6), dtype=int)}).savefig(file, format="png")
    image = np.asarray(Image.open(file).convert("RGB"))
    assert image.shape[1] > image.shape[0]
    assert (image != 255).any()


@pytest.mark.parametrize(
    ("queries", "hits"),
    [
        ([0], {}),
        ([], {"cam": np.zeros((0, 6), int)}),
        ([0], {"a": np.zeros((1, 6), int), "b": np.zeros((1, 5), int)}),
    ],
)
def test_hits_must_fit_the_queries(dataset: Dataset, queries: list[int], hits: dict[str, np.ndarray]) -> None:
    with pytest.raises(ConfigError):
        retrieval_grid(dataset, queries, hits)
