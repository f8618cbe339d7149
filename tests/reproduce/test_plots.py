"""What figures show: the numbers they were given, readable, in files that are the same each time."""

from __future__ import annotations

import statistics
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.text import Annotation
from PIL import Image

import kedge.config
from kedge.reproduce.plots import (
    Points,
    loss_styles,
    plot_curves,
    plot_embeddings,
    plot_loss_benchmark,
    write_figure,
)

DIMENSIONS = [32, 64, 128, 256, 512, 1024, 2048]
PLACE = ("cifar100", "resnet18")


def curves(*losses: str, seeds: int = 3) -> dict[str, dict[float, list[float]]]:
    rng = np.random.default_rng(0)
    return {
        loss: {
            x: list(0.6 - 0.02 * place * (1 + step) / 4 + 0.01 * rng.random(seeds)) for step, x in enumerate(DIMENSIONS)
        }
        for place, loss in enumerate(losses)
    }


def frame(panels: dict[tuple[str, str], dict[str, dict[float, list[float]]]]) -> pd.DataFrame:
    records = [
        (*place, loss, x, value)
        for place, losses in panels.items()
        for loss, curve in losses.items()
        for x, values in curve.items()
        for value in values
    ]
    return pd.DataFrame(records, columns=["dataset", "encoder", "loss", "x", "value"])


def points(count: int, classes: int = 10) -> Points:
    rng = np.random.default_rng(0)
    centres = rng.uniform(-10, 10, (classes, 2))
    labels = rng.integers(0, classes, count)
    return centres[labels] + rng.standard_normal((count, 2)), labels


def lines(figure: Figure, axes: int = 0) -> dict[str, tuple[list[float], list[float]]]:
    return {
        str(line.get_label()): (list(np.atleast_1d(line.get_xdata())), list(np.atleast_1d(line.get_ydata())))
        for line in figure.axes[axes].lines
        if not str(line.get_label()).startswith("_")
    }


def assert_readable(figure: Figure) -> None:
    """Titles, labels and legend lie within the figure, and not on each other."""
    FigureCanvasAgg(figure).draw()
    axes = [part for one in figure.axes for part in (one.title, one.xaxis.label, one.yaxis.label)]
    texts = [text for text in (*figure.texts, *axes) if text.get_text()]
    texts += [text for legend in figure.legends for text in legend.get_texts()]
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts]
    for name, box in boxes:
        assert min(box.x0, box.y0) >= 0, name
        assert box.x1 <= figure.bbox.x1, name
        assert box.y1 <= figure.bbox.y1, name
    for (name, box), (other, beside) in combinations(boxes, 2):
        assert not box.overlaps(beside), (name, other)


def test_a_line_lies_at_the_means_of_the_seeds() -> None:
    data = curves("cam", "cross_entropy", "mine")
    data["mine"] = {4: [0.3], 1: [0.1], 2: []}
    figure = plot_curves(
        frame({PLACE: data}), x_label="embedding dimension", log2_x=True, title="Size of the embedding"
    )
    drawn = lines(figure)
    assert list(drawn) == ["CAM", "cross-entropy", "mine"]
    assert drawn["CAM"][0] == DIMENSIONS
    assert drawn["CAM"][1] == pytest.approx([sum(data["cam"][x]) / 3 for x in DIMENSIONS])
    assert drawn["mine"] == ([1, 4], [0.1, 0.3]), "in the order of x, without what was not measured"
    assert figure.axes[0].get_xscale() == "log"
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == list(drawn)
    assert_readable(figure)


@pytest.mark.parametrize("log2_x", [False, True])
def test_a_bar_is_one_standard_deviation_of_a_sample(log2_x: bool) -> None:
    values = {1.0: [0.1, 0.2, 0.6], 2.0: [0.4, 0.5], 4.0: [0.7]}
    (bars,) = plot_curves(frame({PLACE: {"cam": values}}), x_label="epoch", log2_x=log2_x).axes[0].collections
    for (x, seeds), path in zip(values.items(), bars.get_paths(), strict=True):
        mean, deviation = statistics.fmean(seeds), statistics.stdev(seeds) if len(seeds) > 1 else 0
        np.testing.assert_allclose(path.vertices, [[x, mean - deviation], [x, mean + deviation]])


def test_panels_stand_by_dataset_and_encoder_and_say_what_was_not_run() -> None:
    panels = {
        ("cifar100", "resnet18"): curves("cam", "contrastive"),
        ("cifar100", "swin_t"): curves("cam"),
        ("svhn", "resnet18"): {"cam": {1.0: [0.25, 0.75], 16384.0: [0.9]}},
    }
    figure = plot_curves(frame(panels), x_label="images of each class", log2_x=True, title="Few shots")
    assert [[text.get_text() for text in axes.texts] for axes in figure.axes] == [[], [], [], ["not run"]]
    assert [axes.get_title() for axes in figure.axes] == ["ResNet-18", "Swin-T", "", ""]
    assert [axes.get_ylabel() for axes in figure.axes] == ["CIFAR-100", "", "SVHN", ""]
    assert lines(figure, 2) == {"CAM": ([1, 16384], [0.5, 0.9])}
    assert len({axes.get_ylim() for axes in figure.axes}) == 1
    assert figure.axes[0].get_xlim() == figure.axes[1].get_xlim() != figure.axes[2].get_xlim()
    assert_readable(figure)


def test_a_loss_looks_the_same_everywhere() -> None:
    shipped = [path.stem for path in (Path(kedge.config.__file__).parent / "loss").glob("*.yaml")]
    losses = {*shipped} - {"metric_learning"}
    beside = loss_styles([*losses, *(f"loss {number}" for number in range(20))])
    assert {loss: beside[loss] for loss in losses} == loss_styles(losses)
    assert len({colour for colour, _ in loss_styles(losses).values()}) == len(losses)
    assert len(set(beside.values())) == len(beside), "others differ by colour or marker"
    figure = plot_curves(frame({PLACE: curves("contrastive", "mine")}), x_label="x")
    colours = [loss_styles(["contrastive", "mine"])[loss][0] for loss in ("contrastive", "mine")]
    assert [line.get_color() for line in figure.axes[0].lines] == colours


def test_embeddings_have_a_column_per_loss_and_all_their_points() -> None:
    train, test = points(500), points(200)
    anchors = np.array([[place, -place] for place in range(10)], float)
    splits: dict[str, Points] = {"train": train, "test": test}
    figure = plot_embeddings(
        {"cross_entropy": splits, "cam": splits},
        {"cam": anchors},
        [str(digit) for digit in range(10)],
        title="Embeddings",
    )
    plots = np.array(figure.axes[:8]).reshape(4, 2)
    assert [axes.get_title() for axes in plots[0]] == ["cross-entropy", "CAM"]
    assert [[len(axes.collections) for axes in row] for row in plots] == [[1, 1], [0, 0]] * 2
    assert [[len(axes.images) for axes in row] for row in plots] == [[0, 0], [1, 1]] * 2
    for axes, (embeddings, labels) in ((plots[0, 0], train), (plots[2, 1], test)):
        (scatter,) = axes.collections
        assert scatter.get_rasterized()
        drawn = np.column_stack([np.asarray(scatter.get_offsets()), np.asarray(scatter.get_facecolor())[:, :3]])
        colours = np.unique(drawn[:, 2:], axis=0)
        assert len(colours) == len(np.unique(labels)), "a colour for each class"
        np.testing.assert_allclose(np.sort(drawn[:, 0]), np.sort(embeddings[:, 0]))
    (marks,) = plots[0, 1].lines
    np.testing.assert_array_equal(np.column_stack([marks.get_xdata(), marks.get_ydata()]), anchors)
    assert [text.get_text() for text in plots[0, 1].texts if isinstance(text, Annotation)] == list("0123456789")
    assert len(plots[0, 0].lines[0].get_xdata()) == 0
    assert len({axes.get_xlim() for axes in plots[:, 0]}) == 1
    assert_readable(figure)


def test_a_density_is_highest_where_most_points_are() -> None:
    rng = np.random.default_rng(0)
    embeddings = np.concatenate([rng.normal((0, 5), 0.1, (900, 2)), rng.normal((8, 0), 0.1, (100, 2))])
    labels = np.repeat([0, 1], [900, 100])
    figure = plot_embeddings({"cam": {"train": (embeddings, labels)}}, {}, ["a", "b"])
    (image,) = figure.axes[1].images
    density = np.asarray(image.get_array())
    left, right, bottom, top = image.get_extent()
    row, column = np.unravel_index(density.argmax(), density.shape)
    assert left + (column + 0.5) / density.shape[1] * (right - left) == pytest.approx(0, abs=0.2)
    assert bottom + (row + 0.5) / density.shape[0] * (top - bottom) == pytest.approx(5, abs=0.2)
    assert density.max() == 1
    assert 0.03 < density[:, density.shape[1] // 2 :].max() < 0.3


def test_outliers_do_not_squash_and_are_counted() -> None:
    embeddings, labels = points(5000)
    reach = np.abs(embeddings).max()
    embeddings[:10] *= 1e4
    embeddings[10] = np.nan
    figure = plot_embeddings({"cam": {"test": (embeddings, labels)}}, {}, list("abcdefghij"))
    low, high = figure.axes[0].get_xlim()
    assert high - low < 3 * reach
    x, y = embeddings.T
    bottom, top = figure.axes[0].get_ylim()
    outside = int((~((x >= low) & (x <= high) & (y >= bottom) & (y <= top))).sum())
    assert outside >= 11
    assert f"{outside} outside" in [text.get_text() for text in figure.axes[0].texts]


def test_an_anchor_far_from_its_class_is_seen() -> None:
    figure = plot_embeddings({"cam": {"train": points(100, 2)}}, {"cam": np.array([[90.0, 0], [0, 0]])}, ["a", "b"])
    assert figure.axes[0].get_xlim()[1] > 90


def test_the_loss_benchmark_is_ordered_by_its_first_metric() -> None:
    losses = {
        "mine": [(0.3, 0.9)],
        "cam": [(0.6, 0.5), (0.7, 0.8), (None, 0.8)],
        "unfinished": [(None, 0.99)],
        "cross_entropy": [(0.5, None)],
    }
    seeds = [(loss, *values) for loss, seeds in losses.items() for values in seeds]
    scores = pd.DataFrame(seeds, columns=["loss", "brute force", "accuracy"]).set_index("loss").astype(float)
    figure = plot_loss_benchmark(scores, title="Losses", x_label="mAP")
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["CAM", "cross-entropy", "mine", "unfinished"]
    first, last = axes.get_ylim()
    assert first > last
    drawn = lines(figure)
    assert drawn["brute force"][0] == pytest.approx([0.65, 0.5, 0.3])
    assert drawn["accuracy"][0] == pytest.approx([0.7, 0.9, 0.99])
    assert [round(height) for height in drawn["brute force"][1]] == [0, 1, 2]
    assert [round(height) for height in drawn["accuracy"][1]] == [0, 2, 3]
    ranges = [np.asarray(path.vertices)[:, 0].tolist() for part in axes.collections for path in part.get_paths()]
    assert ranges == [[0.6, 0.7], [0.5, 0.5], [0.3, 0.3], [0.5, 0.8], [0.9, 0.9], [0.99, 0.99]]
    assert len({to_rgba(line.get_color()) for line in axes.lines}) == 2
    assert_readable(figure)


def test_both_files_are_written_whole_and_the_same_each_time(tmp_path: Path) -> None:
    def make() -> list[Figure]:
        return [
            plot_curves(frame({PLACE: curves("cam", "mine")}), x_label="dimension", log2_x=True),
            plot_embeddings({"cam": {"train": points(300, 3)}}, {"cam": np.eye(3, 2)}, ["a", "b", "c"]),
            plot_loss_benchmark(pd.DataFrame({"brute force": [0.1, 0.2]}, index=["cam", "cam"])),
        ]

    for run in ("one", "two"):
        for number, figure in enumerate(make()):
            paths = write_figure(figure, tmp_path / "new" / run, f"figure{number}")
            assert [path.name for path in paths] == [f"figure{number}.png", f"figure{number}.svg"]
    for path in (tmp_path / "new" / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "new" / "two" / path.name).read_bytes()
        assert b"<dc:date>" not in path.read_bytes()
    with Image.open(tmp_path / "new/one/figure0.png") as image:
        assert image.info["dpi"] == pytest.approx((150, 150), abs=0.1)


def test_what_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = plot_curves(frame({PLACE: curves("cam")}), x_label="dimension")
    monkeypatch.setattr(Figure, "savefig", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_figure(figure, tmp_path, "a")
    assert list(tmp_path.iterdir()) == []


def test_no_window_system_is_touched() -> None:
    code = "import sys, kedge.reproduce.experiments; sys.exit('matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
