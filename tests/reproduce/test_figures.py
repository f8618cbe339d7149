from __future__ import annotations

import statistics
import subprocess
import sys
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgb, to_rgba
from matplotlib.figure import Figure
from matplotlib.text import Annotation, Text
from PIL import Image

import kedge.config
from kedge.errors import ConfigError
from kedge.reproduce.figures import curves, embeddings_2d, league_chart, panels, write_figure
from kedge.reproduce.figures.embeddings import CLASS_COLOURS, Cloud, Split
from kedge.reproduce.figures.lines import _spread
from kedge.reproduce.figures.styles import FIXED, RIVALS, Style, styles_of

DIMENSIONS = [32, 64, 128, 256, 512, 1024, 2048]
LOSSES = ["triplet", "arcface", "proxy_anchor", "circle", "multi_similarity", "supcon", "proxy_nca", "center", "mine"]


def series(*losses: str, seeds: int = 3) -> dict[str, dict[int, list[float]]]:
    rng = np.random.default_rng(0)
    return {
        loss: {
            x: list(0.6 - 0.02 * place * (1 + step) / 4 + 0.01 * rng.random(seeds)) for step, x in enumerate(DIMENSIONS)
        }
        for place, loss in enumerate(losses)
    }


def style_of(loss: str) -> Style:
    return styles_of([loss])[loss]


def cloud(count: int, classes: int = 10, seed: int = 0) -> Cloud:
    rng = np.random.default_rng(seed)
    centres = rng.uniform(-10, 10, (classes, 2))
    labels = rng.integers(0, classes, count)
    return centres[labels] + rng.standard_normal((count, 2)), labels


def lines(figure: Figure, axes: int = 0) -> dict[str, tuple[list[float], list[float]]]:
    return {
        str(line.get_label()): (list(np.atleast_1d(line.get_xdata())), list(np.atleast_1d(line.get_ydata())))
        for line in figure.axes[axes].lines
    }


def texts(figure: Figure) -> list[Text]:
    """What can be read: drawn, not empty and not blank."""
    figure.canvas.draw()
    found = [text for text in figure.findobj(Text) if isinstance(text, Text)]
    ticks = {
        label
        for axes in figure.axes
        for axis in (axes.xaxis, axes.yaxis)
        for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks())
        for label in (tick.label1, tick.label2)
    }
    return [text for text in found if text.get_visible() and text.get_text().strip() and text not in ticks]


def assert_readable(figure: Figure) -> None:
    """No text leaves the figure, none lies on another."""
    boxes = [(text.get_text(), Text.get_window_extent(text)) for text in texts(figure)]
    for name, box in boxes:
        assert box.x0 >= 0, name
        assert box.y0 >= 0, name
        assert box.x1 <= figure.bbox.x1, name
        assert box.y1 <= figure.bbox.y1, name
    for (name, box), (other, beside) in combinations(boxes, 2):
        apart = box.x1 <= beside.x0 or beside.x1 <= box.x0 or box.y1 <= beside.y0 or beside.y1 <= box.y0
        assert apart, (name, other)


def test_a_line_lies_at_the_means_of_the_seeds() -> None:
    data = series("cam", "cross_entropy", "contrastive")
    figure = curves(data, x_label="embedding dimension", log2_x=True, labels={"cam": "CAM"})
    drawn = lines(figure)
    assert list(drawn) == ["CAM", "cross_entropy", "contrastive"]
    for loss, name in zip(data, drawn, strict=True):
        assert drawn[name][0] == DIMENSIONS
        assert drawn[name][1] == pytest.approx([sum(data[loss][x]) / 3 for x in DIMENSIONS])
    assert_readable(figure)


def test_points_are_drawn_in_the_order_of_x() -> None:
    figure = curves({"cam": {4: [0.3], 1: [0.1], 2: [0.2]}}, x_label="shots")
    assert lines(figure) == {"cam": ([1, 2, 4], [0.1, 0.2, 0.3])}


def test_the_band_is_one_standard_deviation_of_a_sample() -> None:
    values = {1: [0.1, 0.2, 0.6], 2: [0.4, 0.5]}
    axes = curves({"cam": values}, x_label="epoch").axes[0]
    (outline,) = axes.collections[0].get_paths()
    for x, found in values.items():
        edges = [float(y) for at, y in np.asarray(outline.vertices) if at == x]
        mean, deviation = statistics.fmean(found), statistics.stdev(found)
        assert [min(edges), max(edges)] == pytest.approx([mean - deviation, mean + deviation])


def test_a_single_seed_has_no_band() -> None:
    axes = curves({"cam": {1: [0.5], 2: [0.6], 4: [0.7]}}, x_label="shots").axes[0]
    assert [path for part in axes.collections for path in part.get_paths()] == []


def test_seeds_at_one_point_alone_have_a_bar() -> None:
    axes = curves({"cam": {1: [0.5], 2: [0.6, 0.8], 4: [0.7]}}, x_label="shots").axes[0]
    (bar,) = [path for part in axes.collections for path in part.get_paths()]
    deviation = statistics.stdev([0.6, 0.8])
    np.testing.assert_allclose(np.asarray(bar.vertices, float), [[2, 0.7 - deviation], [2, 0.7 + deviation]])


@pytest.mark.parametrize("log2_x", [False, True])
def test_one_point_is_enough(tmp_path: Path, log2_x: bool) -> None:
    figure = curves({"cam": {64: [0.5]}}, x_label="embedding dimension", log2_x=log2_x)
    assert lines(figure) == {"cam": ([64], [0.5])}
    low, high = figure.axes[0].get_xlim()
    assert low < 64 < high
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["64"]
    assert_readable(figure)
    write_figure(figure, tmp_path, "one")


def test_values_that_are_missing_or_not_numbers_are_left_out() -> None:
    data = {"cam": {1: [0.5, float("nan")], 2: [], 4: [0.7]}, "contrastive": {1: [float("nan")]}}
    assert lines(curves(data, x_label="shots")) == {"cam": ([1, 4], [0.5, 0.7])}


def test_ticks_are_the_numbers_themselves() -> None:
    axes = curves(series("cam"), x_label="embedding dimension", log2_x=True).axes[0]
    assert axes.get_xscale() == "log"
    assert [label.get_text() for label in axes.get_xticklabels()] == [str(x) for x in DIMENSIONS]
    assert curves(series("cam"), x_label="epoch").axes[0].get_xscale() == "linear"


def test_tick_labels_do_not_touch() -> None:
    shots = [*(2**power for power in range(14)), 13861]
    figure = panels({("SVHN", "ResNet-18"): {"cam": {x: [0.5] for x in shots}}}, x_label="shots", log2_x=True)
    figure.canvas.draw()
    axes = figure.axes[0]
    boxes = [label.get_window_extent() for label in axes.get_xticklabels()]
    written = [label.get_text() for label in axes.get_xticklabels()]
    assert (written[0], written[-1]) == ("1", "13861")
    assert len(boxes) >= 5
    assert all(left.x1 < right.x0 for left, right in pairwise(boxes))
    marked = {*axes.xaxis.get_majorticklocs(), *axes.xaxis.get_minorticklocs()}
    assert marked == set(shots)


def test_many_lines_that_end_together_have_names_that_do_not_overlap() -> None:
    figure = curves({loss: {1: [0.1], 2: [0.5 + 1e-4 * place]} for place, loss in enumerate(LOSSES)}, x_label="epoch")
    names = [text for text in texts(figure) if isinstance(text, Annotation)]
    assert sorted(name.get_text() for name in names) == sorted(LOSSES)
    heights = {name.get_text(): name.xyann[1] for name in names}
    assert sorted(LOSSES, key=lambda loss: heights[loss]) == LOSSES
    leaders = [
        (name.arrow_patch.get_window_extent(), Text.get_window_extent(name)) for name in names if name.arrow_patch
    ]
    assert len(leaders) >= len(LOSSES) - 1
    assert all(leader.x1 <= name.x0 for leader, name in leaders), "a leader runs through names"
    assert_readable(figure)


def test_names_have_the_colour_of_their_line() -> None:
    figure = curves(series("cam", "contrastive", "mine"), x_label="epoch")
    drawn = {str(line.get_label()): line.get_color() for line in figure.axes[0].lines}
    named = {text.get_text(): text.get_color() for text in texts(figure) if isinstance(text, Annotation)}
    assert named == drawn == {loss: style_of(loss).colour for loss in drawn}


def test_spreading_moves_no_more_than_it_must() -> None:
    assert _spread([10, 50, 90], 12, 0, 100) == [10, 50, 90]
    assert _spread([50, 50], 10, 0, 100) == [45, 55]
    assert _spread([0, 0], 10, 0, 100) == [0, 10]
    assert _spread([99, 100], 10, 0, 100) == [90, 100]


@pytest.mark.parametrize("data", [{}, {"cam": {}}, {"cam": {1: []}}])
def test_nothing_to_draw_is_an_error(data: dict[str, dict[int, list[float]]]) -> None:
    with pytest.raises(ConfigError):
        curves(data, x_label="epoch")
    with pytest.raises(ConfigError):
        panels({("a", "b"): data}, x_label="epoch")


def test_zero_has_no_place_on_a_logarithmic_axis() -> None:
    with pytest.raises(ConfigError, match="x = 0"):
        curves({"cam": {0: [0.1], 1: [0.2]}}, x_label="epoch", log2_x=True)


def test_panels_stand_by_row_and_column_and_say_what_was_not_run() -> None:
    grid: dict[tuple[str, str], dict[str, dict[int, list[float]]]] = {
        ("CIFAR-100", "ResNet-18"): series("cam", "contrastive"),
        ("CIFAR-100", "ResNet-50"): {"cam": {64: [0.5]}},
        ("CIFAR-100", "Swin-T"): series("cam"),
        ("SVHN", "ResNet-18"): {"cam": {1: [0.25, 0.75], 16384: [0.9]}},
        ("SVHN", "Swin-T"): {"cam": {}},
        ("Food-101", "Swin-T"): {"cam": {}},
    }
    figure = panels(grid, x_label="images per class", log2_x=True, title="Few shots")
    said = [[text.get_text() for text in axes.texts] for axes in figure.axes]
    assert said == [[], [], [], [], ["not run"], ["not run"]], "of Food-101 nothing was run: it has no row"
    assert [len(axes.lines) for axes in figure.axes] == [2, 1, 1, 1, 0, 0]
    assert [axes.get_title() for axes in figure.axes[:3]] == ["ResNet-18", "ResNet-50", "Swin-T"]
    assert [text.get_text() for text in figure.texts if text.get_rotation() == 90] == ["CIFAR-100", "SVHN"]
    assert lines(figure, 3) == {"cam": ([1, 16384], [0.5, 0.9])}
    assert len({axes.get_ylim() for axes in figure.axes}) == 1
    assert len({axes.get_xlim() for axes in figure.axes[:3]}) == 1
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["cam", "contrastive"]
    assert_readable(figure)


def test_long_words_shrink_to_the_room_they_have() -> None:
    long = (
        "a name that goes on and on, well beyond what anyone would call a dataset or a title, and then some more of it"
    )
    assert_readable(curves(series("cam"), x_label="x", y_label=long, title=long))
    grid = {(long, f"{long} {number}"): series("cam") for number in range(2)}
    assert_readable(panels({**grid, ("b", long): series("cam")}, x_label="x", y_label=long, title=long))


def test_a_loss_looks_the_same_everywhere() -> None:
    assert style_of("cam") == style_of("CAM")
    assert style_of("cross_entropy") == style_of("Cross-entropy")
    assert len({style_of(loss) for loss in ("cam", "cross_entropy", "contrastive")}) == 3
    figure = panels({("a", "b"): series("contrastive", "mine")}, x_label="x")
    assert [line.get_color() for line in figure.axes[0].lines] == [style_of(x).colour for x in ("contrastive", "mine")]


def test_unknown_losses_have_stable_colours_of_their_own() -> None:
    styles = styles_of(["cam", "cross_entropy", "contrastive", *LOSSES])
    assert len({style.colour for style in styles.values()}) == len(styles)
    assert styles_of([*reversed(LOSSES), "contrastive", "cam", "cross_entropy"]) == styles
    code = f"from kedge.reproduce.figures.styles import styles_of; print(styles_of({LOSSES!r}))"
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert told.strip() == repr(styles_of(LOSSES))


def test_a_shipped_rival_keeps_its_colour_whoever_is_beside_it() -> None:
    shipped = [path.stem for path in (Path(kedge.config.__file__).parent / "loss").glob("*.yaml")]
    beside = styles_of([*shipped, *(f"loss {number}" for number in range(20))])
    assert {loss: beside[loss] for loss in RIVALS} == {loss: style_of(loss) for loss in RIVALS}
    assert len({style_of(loss).colour for loss in (*FIXED, *RIVALS)}) == len(FIXED) + len(RIVALS)
    assert {*shipped} - {"metric_learning"} <= {*FIXED, *RIVALS}


def test_more_losses_than_colours_differ_by_marker() -> None:
    assert len(set(styles_of(f"loss {number}" for number in range(80)).values())) == 80


def test_embeddings_have_a_column_per_loss_and_all_their_points() -> None:
    train, test = cloud(500), cloud(200)
    anchors = np.array([[place, -place] for place in range(10)], float)
    figure = embeddings_2d(
        {"cross_entropy": {"train": train, "test": test}, "cam": {"train": train, "test": test}},
        {"cam": anchors, "cross_entropy": None},
        [str(digit) for digit in range(10)],
        labels={"cam": "CAM"},
    )
    *plots, _ = figure.axes
    assert [axes.get_title() for axes in plots if axes.get_title()] == ["cross_entropy", "CAM"]
    assert [len(axes.collections) for axes in plots] == [1, 0, 1, 0] * 2
    assert [len(axes.images) for axes in plots] == [0, 1, 0, 1] * 2
    for axes, (points, labels) in ((plots[0], train), (plots[6], test)):
        (scatter,) = axes.collections
        assert scatter.get_rasterized()
        drawn = np.column_stack([np.asarray(scatter.get_offsets()), np.asarray(scatter.get_facecolor())[:, :3]])
        given = np.column_stack([points, [to_rgb(CLASS_COLOURS[label]) for label in labels]])
        np.testing.assert_allclose(drawn[np.lexsort(drawn.T)], given[np.lexsort(given.T)])
    (marks,) = plots[4].lines
    np.testing.assert_array_equal(np.column_stack([marks.get_xdata(), marks.get_ydata()]), anchors)
    assert [text.get_text() for text in plots[4].texts if isinstance(text, Annotation)] == list("0123456789")
    assert len(plots[0].lines) == 0
    assert {axes.get_xlim() for axes in plots[:4]} == {plots[0].get_xlim()}
    assert all(axes.get_aspect() == 1 for axes in plots)


def test_a_density_is_highest_where_most_points_are() -> None:
    rng = np.random.default_rng(0)
    points = np.concatenate([rng.normal((0, 5), 0.1, (900, 2)), rng.normal((8, 0), 0.1, (100, 2))])
    labels = np.repeat([0, 1], [900, 100])
    figure = embeddings_2d({"cam": {"train": (points, labels)}}, {}, ["a", "b"], title="Two of them")
    assert "Two of them" in [text.get_text() for text in figure.texts]
    assert_readable(figure)
    _, axes, _ = figure.axes
    (image,) = axes.images
    density = np.asarray(image.get_array())
    left, right, bottom, top = image.get_extent()
    row, column = np.unravel_index(density.argmax(), density.shape)
    assert left + (column + 0.5) / density.shape[1] * (right - left) == pytest.approx(0, abs=0.2)
    assert bottom + (row + 0.5) / density.shape[0] * (top - bottom) == pytest.approx(5, abs=0.2)
    assert density.max() == 1
    assert 0.03 < density[:, density.shape[1] // 2 :].max() < 0.3


def test_outliers_do_not_squash_and_are_counted() -> None:
    points, labels = cloud(5000)
    reach = np.abs(points).max()
    points[:10] *= 1e4
    points[10] = np.nan
    figure = embeddings_2d({"cam": {"test": (points, labels)}}, {}, list("abcdefghij"))
    low, high = figure.axes[0].get_xlim()
    assert high - low < 3 * reach
    x, y = points.T
    bottom, top = figure.axes[0].get_ylim()
    outside = int((~((x >= low) & (x <= high) & (y >= bottom) & (y <= top))).sum())
    assert outside >= 11
    assert f"{outside} outside" in [text.get_text() for text in figure.axes[0].texts]


def test_an_anchor_far_from_its_class_is_seen() -> None:
    figure = embeddings_2d({"cam": {"train": cloud(100, 2)}}, {"cam": np.array([[90.0, 0], [0, 0]])}, ["a", "b"])
    assert figure.axes[0].get_xlim()[1] > 90


def test_names_of_anchors_stay_within_the_frame() -> None:
    anchors = np.array([[0.0, 0], [9, 0], [0, 9], [9, 9], [4.5, 9], [4.5, 4.5]])
    names = ["T-shirt/top", "Ankle boot", "a_long_long_name", "Pullover", "Sneaker", "Bag"]
    figure = embeddings_2d({"cam": {"train": cloud(50, 6)}}, {"cam": anchors}, names)
    figure.canvas.draw()
    frame = figure.axes[0].get_window_extent()
    shown = [text for text in figure.axes[0].texts if isinstance(text, Annotation)]
    assert [text.get_text() for text in shown] == [*names[:2], "a long long…", *names[3:]]
    for text in shown:
        extent = Text.get_window_extent(text)
        assert frame.x0 <= extent.x0 <= extent.x1 <= frame.x1, text.get_text()
        assert frame.y0 <= extent.y0 <= extent.y1 <= frame.y1, text.get_text()


def test_a_loss_without_test_embeddings_says_so() -> None:
    parts: dict[str, dict[Split, Cloud]] = {
        "cam": {"train": cloud(50), "test": cloud(50)},
        "mine": {"train": cloud(50)},
    }
    figure = embeddings_2d(parts, {}, list("abcdefghij"))
    assert [[text.get_text() for text in axes.texts] == ["not run"] for axes in figure.axes[:-1]] == [
        *[False] * 6,
        *[True] * 2,
    ]
    assert len(embeddings_2d({"cam": {"train": cloud(50)}}, {}, list("abcdefghij")).axes) == 3


def test_classes_have_colours_that_differ() -> None:
    colours = [to_rgb(colour) for colour in CLASS_COLOURS]
    assert len(colours) == 32
    assert min(np.linalg.norm(np.subtract(one, other)) for one, other in combinations(colours, 2)) > 0.15


@pytest.mark.parametrize(
    ("points", "labels", "anchors"),
    [
        (np.zeros((3, 2)), np.zeros(2, int), None),
        (np.zeros((3, 3)), np.zeros(3, int), None),
        (np.zeros((3, 2)), np.array([0, 1, 2]), None),
        (np.zeros((3, 2)), np.array([0, 1, -1]), None),
        (np.zeros((3, 2)), np.zeros(3, int), np.zeros((3, 2))),
    ],
)
def test_clouds_that_do_not_fit_are_errors(points: np.ndarray, labels: np.ndarray, anchors: np.ndarray | None) -> None:
    with pytest.raises(ConfigError, match="cam"):
        embeddings_2d({"cam": {"train": (points, labels)}}, {"cam": anchors}, ["a", "b"])


def test_nothing_embedded_is_an_error() -> None:
    with pytest.raises(ConfigError):
        embeddings_2d({}, {}, ["a"])
    with pytest.raises(ConfigError):
        embeddings_2d({"cam": {}}, {}, ["a"])


def test_the_league_is_ordered_by_its_first_column() -> None:
    rows = {
        "mine": [[0.3], [0.9]],
        "CAM": [[0.6, 0.7], [0.5, 0.8, 0.8]],
        "unfinished": [[], [0.99]],
        "cross_entropy": [[0.5], []],
    }
    figure = league_chart(rows, ["brute force", "accuracy"], title="League", x_label="mAP")
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["CAM", "cross_entropy", "mine", "unfinished"]
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
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["brute force", "accuracy"]
    assert_readable(figure)


@pytest.mark.parametrize(
    ("rows", "titles"),
    [({}, ["a"]), ({"cam": []}, []), ({"cam": [[0.1]]}, ["a", "b"]), ({"cam": [[0.1]] * 7}, "abcdefg")],
)
def test_a_league_that_cannot_be_shown_is_an_error(rows: dict[str, list[list[float]]], titles: list[str]) -> None:
    with pytest.raises(ConfigError):
        league_chart(rows, titles)


def test_both_files_are_written_whole_and_the_same_each_time(tmp_path: Path) -> None:
    def make() -> list[Figure]:
        return [
            curves(series("cam", "mine"), x_label="dimension", log2_x=True),
            panels({("a", "b"): series("cam"), ("c", "d"): series("mine")}, x_label="x"),
            embeddings_2d({"cam": {"train": cloud(300, 3)}}, {"cam": np.eye(3, 2)}, ["a", "b", "c"]),
            league_chart({"cam": [[0.1, 0.2]]}, ["brute force"]),
        ]

    for run in ("one", "two"):
        for number, figure in enumerate(make()):
            paths = write_figure(figure, tmp_path / "new" / run, f"figure{number}")
            assert [path.name for path in paths] == [f"figure{number}.png", f"figure{number}.svg"]
    assert len(list((tmp_path / "new" / "one").iterdir())) == 8
    for path in (tmp_path / "new" / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "new" / "two" / path.name).read_bytes()
        if path.suffix == ".svg":
            assert b"<dc:date>" not in path.read_bytes()


def test_a_png_has_150_dots_per_inch(tmp_path: Path) -> None:
    figure = curves(series("cam"), x_label="dimension")
    image = Image.open(write_figure(figure, tmp_path, "a")[0])
    assert image.size == pytest.approx(figure.get_size_inches() * 150, abs=1)
    assert image.info["dpi"] == pytest.approx((150, 150), abs=0.1)


def test_what_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = curves(series("cam"), x_label="dimension")
    monkeypatch.setattr(Figure, "savefig", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_figure(figure, tmp_path, "a")
    assert list(tmp_path.iterdir()) == []


def test_all_of_svhn_stays_below_two_megabytes(tmp_path: Path) -> None:
    parts: dict[Split, Cloud] = {"train": cloud(73_257), "test": cloud(26_032)}
    figure = embeddings_2d(dict.fromkeys(("cross_entropy", "contrastive", "cam"), parts), {}, list("0123456789"))
    assert all(path.stat().st_size < 2_000_000 for path in write_figure(figure, tmp_path, "svhn"))


def test_no_window_system_is_touched() -> None:
    code = "import sys, kedge.reproduce.figures; sys.exit('matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
