from __future__ import annotations

import subprocess
import sys
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
    figure = retrieval_grid(dataset, [0, 1], hits)
    frames = [axes.spines["top"].get_edgecolor() for axes in figure.axes]
    colours = {to_rgba(RIGHT): "right", to_rgba(WRONG): "wrong", to_rgba(NEUTRAL): "query"}
    expected = ["query", "right", "right", "wrong", "right", "query", "right", "wrong", "wrong", "wrong"]
    assert [colours[frame] for frame in frames] == expected
    marks = [axes.texts[0].get_text() if axes.texts else "query" for axes in figure.axes]
    assert marks == [{"right": "✓", "wrong": "✗"}.get(kind, kind) for kind in expected]
    assert [axes.get_xlabel() for axes in figure.axes][:4] == ["ape", "ape", "ape", "bee"]
    assert figure.axes[7].get_xlabel() == "a class with a …"
    assert [text.get_text() for text in figure.texts] == ["query", "cam", "ce"]
    np.testing.assert_array_equal(figure.axes[3].images[0].get_array(), dataset.train.images[1].transpose(1, 2, 0))


def test_more_than_two_models_stand_below_one_another(dataset: Dataset) -> None:
    hits = {name: np.array([[0, 3], [4, 2]]) + place for place, name in enumerate(("cam", "ce", "mine"))}
    figure = retrieval_grid(dataset, [0, 1], hits, title="What was found")
    assert [text.get_text() for text in figure.texts] == ["What was found", "query"]
    heights: dict[float, list[str]] = {}
    for axes in figure.axes:
        heights.setdefault(round(axes.get_position().y0, 6), []).append(axes.get_ylabel())
    rows = [heights[height] for height in sorted(heights, reverse=True)]
    assert rows == [["", "cam", ""], ["ce", ""], ["mine", ""]] * 2, "the query stands before its first row"
    shown = [
        int((dataset.train.images == axes.images[0].get_array().transpose(2, 0, 1)).all((1, 2, 3)).argmax())
        for axes in figure.axes
    ]
    assert shown == [0, 0, 3, 1, 4, 2, 5, 1, 4, 2, 5, 3, 6, 4]


def test_it_becomes_a_png(dataset: Dataset) -> None:
    file = BytesIO()
    retrieval_grid(dataset, [0], {"cam": np.zeros((1, 6), dtype=int)}).savefig(file, format="png")
    image = np.asarray(Image.open(file).convert("RGB"))
    assert image.shape[1] > image.shape[0]
    assert (image != 255).any()


def test_no_window_system_is_touched() -> None:
    code = "import sys, kedge.evaluation; sys.exit('matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


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
