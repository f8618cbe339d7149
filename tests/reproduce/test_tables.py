from __future__ import annotations

import csv as csv_format
import io
import re
import shutil
import subprocess
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from rich.console import Console

from kedge.errors import DataError
from kedge.evaluation.report import TITLES
from kedge.reproduce.paper import PaperValue, display
from kedge.reproduce.tables import Cell, Column, Table, Unit, for_latex, format_value, write_table

TABLE = Table(
    "table1",
    "Retrieval",
    ("encoder", "loss"),
    (Column("mAP"), Column("time (ms)", "ms", "low"), Column("epochs", "ms", None)),
    {
        ("resnet18", "cross_entropy"): (Cell((0.2, 0.3), PaperValue(0.249, 0.003)), Cell((9.5,)), Cell((100.0,))),
        ("resnet18", "cam"): (Cell((0.7, 0.7), PaperValue(0.622, 0.005)), Cell((11.0,)), Cell((90.0,))),
        ("swin_t", "cross_entropy"): (Cell((0.9,)), None, Cell(())),
        ("swin_t", "cam"): (Cell((), PaperValue(0.808, 0.004)), Cell((2.5,)), Cell(())),
    },
    ("Seeds 0 and 1.",),
)


def table_of(*values: float | None, better: str = "high", labels: tuple[str, ...] = ()) -> Table:
    """One column, a row per value; None was not run."""
    names = labels or tuple(f"row{number}" for number in range(len(values)))
    cells = [Cell(() if value is None else (value,)) for value in values]
    rows = {(name,): (cell,) for name, cell in zip(names, cells, strict=True)}
    return Table("t", "T", ("row",), (Column("mAP", "fraction", better),), rows)  # type: ignore[arg-type]


def parsed(text: str) -> list[list[str]]:
    """The cells of the only table, as a reader of Markdown sees them; what is bold is in stars."""
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    assert sum(token.type == "table_open" for token in tokens) == 1
    rows: list[list[str]] = []
    for before, token in pairwise(tokens):
        if before.type == "tr_open":
            rows.append([])
        if before.type in ("th_open", "td_open"):
            marks = {"strong_open": "*", "strong_close": "*"}
            rows[-1].append("".join(marks.get(part.type, part.content) for part in token.children or []))
    return rows


def places(table: Table) -> list[float | None]:
    return [cells[0].mean if cells[0] else None for cells in table.ranks().rows.values()]


def printed(table: Table, width: int) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width).print(table)
    return stream.getvalue()


def test_markdown_shows_ours_and_the_paper_side_by_side() -> None:
    assert parsed(TABLE.markdown()) == [
        ["encoder", "loss", "mAP", "paper", "time (ms)", "epochs"],
        ["ResNet-18", "cross-entropy", ".250 ± .071 (2) =", ".249 ± .003", "*9.50* (1)", "100.00 (1)"],
        ["", "CAM", "*.700 ± .000* (2) ↑", ".622 ± .005", "11.00 (1)", "90.00 (1)"],
        ["Swin-T", "cross-entropy", ".900 (1)", "", "–", "not run"],
        ["", "CAM", "not run", ".808 ± .004", "2.50 (1)", "not run"],
    ]


def test_legend_and_notes_stand_below() -> None:
    below = TABLE.markdown().split("|\n\n")[1]
    assert below == (
        "- Mean ± standard deviation (seeds). Bold: the best of a column among rows that differ in loss only. "
        "↑ above, = within, ↓ below the paper's mean ± two standard deviations, ours and the paper's combined.\n"
        "- Seeds 0 and 1.\n"
    )
    ablated = Table("t", "T", ("row",), (Column("mAP"),), {("a",): (Cell((0.9,), PaperValue(0.967)),)})
    assert "Bold" not in ablated.markdown()
    assert table_of(None, None).markdown().endswith("| not run |\n"), "a legend of what does not occur"


@pytest.mark.parametrize(
    ("values", "better", "bold"),
    [
        ((0.1, 0.3, 0.2), "high", [1]),
        ((0.1, 0.3, 0.2), "low", [0]),
        ((0.3, 0.3, 0.2), "high", [0, 1]),
        ((0.3001, 0.2999, 0.2), "high", [0, 1]),
        ((None, 0.3, 0.2), "high", [1]),
        ((None, 0.3, None), "high", []),
        ((None, None), "high", []),
        ((0.1, 0.3), None, []),
    ],
)
def test_the_best_of_those_that_ran_is_bold(values: tuple[float | None, ...], better: str, bold: list[int]) -> None:
    cells = [row[-1] for row in parsed(table_of(*values, better=better).markdown())[1:]]
    assert [place for place, text in enumerate(cells) if "*" in text] == bold


def test_groups_are_compared_by_labels_wherever_they_stand() -> None:
    rows = [("a", "x", 0.1), ("b", "x", 0.9), ("a", "y", 0.2), ("b", "y", 0.8)]
    shuffled = replace(
        TABLE, columns=(Column("mAP"),), rows={(one, two): (Cell((value,)),) for one, two, value in rows}
    )
    assert [row[-1] for row in parsed(shuffled.markdown())[1:]] == [
        ".100 (1)",
        "*.900* (1)",
        "*.200* (1)",
        ".800 (1)",
    ]
    assert places(shuffled) == [2, 1, 1, 2]


def test_columns_are_never_compared() -> None:
    rows = {("a",): (Cell((0.1,)), Cell((0.9,))), ("b",): (Cell((0.2,)), Cell((0.8,)))}
    table = Table("t", "T", ("row",), (Column("one"), Column("two")), rows)
    assert parsed(table.markdown())[1:] == [["a", ".100 (1)", "*.900* (1)"], ["b", "*.200* (1)", ".800 (1)"]]


def test_ranks_share_places_and_leave_out_what_was_not_run() -> None:
    assert places(table_of(0.3, 0.5, None, 0.5, 0.1)) == [3, 1, None, 1, 4]
    assert places(table_of(0.3, 0.5, None, 0.5, 0.1, better="low")) == [2, 3, None, 3, 1]
    ranked = TABLE.ranks()
    assert ranked.name == "table1-places"
    assert parsed(ranked.markdown()) == [
        ["encoder", "loss", "mAP", "time (ms)"],
        ["ResNet-18", "cross-entropy", "2", "1"],
        ["", "CAM", "1", "2"],
        ["Swin-T", "cross-entropy", "1", "–"],
        ["", "CAM", "not run", "1"],
    ]


@settings(deadline=None)
@given(st.lists(st.one_of(st.none(), st.integers(0, 5)), min_size=1, max_size=8))
def test_a_place_counts_who_is_better(values: list[int | None]) -> None:
    expected = [
        None if one is None else 1 + sum(other is not None and other > one for other in values) for one in values
    ]
    assert places(table_of(*(None if one is None else one / 10 for one in values))) == expected


def test_csv_holds_every_cell_that_makes_sense_in_full() -> None:
    lines = list(csv_format.DictReader(io.StringIO(TABLE.csv())))
    assert len(lines) == 4 * 3 - 1
    assert lines[0] == {
        "encoder": "resnet18",
        "loss": "cross_entropy",
        "column": "mAP",
        "mean": "0.25",
        "std": str(Cell((0.2, 0.3)).std),
        "seeds": "2",
        "printed_mean": "0.249",
        "printed_std": "0.003",
        "verdict": "within",
    }
    missing = next(line for line in lines if line["encoder"] == "swin_t" and line["loss"] == "cam")
    assert [missing[key] for key in ("mean", "std", "seeds", "printed_mean", "verdict")] == ["", "", "0", "0.808", ""]
    assert {line["verdict"] for line in lines if line["column"] != "mAP"} == {""}


def structure(text: str) -> list[list[str]]:
    """Heads and rows, split at what LaTeX takes for ends of cells, once all is found to be balanced."""
    opened = []
    for kind, name in re.findall(r"\\(begin|end)\{(\w+)\}", text):
        if kind == "begin":
            opened.append(name)
        else:
            assert opened.pop() == name
    assert opened == []
    bare = re.sub(r"\\[\\{}$&#%_]", "", text)
    depth = 0
    for letter in bare:
        depth += (letter == "{") - (letter == "}")
        assert depth >= 0
    assert depth == 0
    assert bare.count("$") % 2 == 0
    assert "%" not in re.sub(r"^% \\usepackage.*$", "", bare, flags=re.MULTILINE)
    assert "#" not in bare
    found = re.search(r"\\begin\{longtable\}\{([lr]+)\}\n(.*)\\end\{longtable\}", text, re.DOTALL)
    assert found is not None
    first, again, rest = re.split(r"\\endfirsthead\n|\\endhead\n", found[2])
    assert first.endswith(again)
    assert rest.startswith("\\bottomrule\n\\endfoot\n")
    drawn = again + rest.partition("\\endfoot\n")[2]
    assert drawn.startswith("\\toprule\n")
    blocks = []
    for block in drawn.removeprefix("\\toprule\n").split("\\midrule\n"):
        block = re.sub(r"\\shortstack\[r\]\{(.*?)\}(?= [&\\])", lambda head: head[1].replace(r",\\", ", "), block)
        lines = [line for line in block.splitlines() if line != r"\addlinespace"]
        assert all(line.endswith(r" \\") and not line.lstrip().startswith(("[", "*")) for line in lines)
        blocks.append([[cell.strip() for cell in re.split(r"(?<!\\)&", line[:-2])] for line in lines])
    cells = [row for block in blocks for row in block]
    assert {len(row) for row in cells} == {len(found[1])}
    return cells


def test_latex_has_the_same_cells() -> None:
    text = TABLE.latex()
    assert structure(text) == [
        ["encoder", "loss", "mAP", "paper", "time (ms)", "epochs"],
        [
            "ResNet-18",
            "cross-entropy",
            r".250 $\pm$ .071 (2) =",
            r".249 $\pm$ .003",
            r"\textbf{9.50} (1)",
            "100.00 (1)",
        ],
        ["", "CAM", r"\textbf{.700 $\pm$ .000} (2) $\uparrow$", r".622 $\pm$ .005", "11.00 (1)", "90.00 (1)"],
        ["Swin-T", "cross-entropy", ".900 (1)", "", "--", "not run"],
        ["", "CAM", "not run", r".808 $\pm$ .004", "2.50 (1)", "not run"],
    ]
    assert text.count(r"\addlinespace") == 1, "a gap between the encoders"
    assert text.isascii(), "a sign that pdflatex may not know"
    assert r"\label{tab:table1}" in text
    percent = replace(TABLE, columns=(Column("accuracy", "percent"), *TABLE.columns[1:]))
    assert r"90.00\% (1)" in structure(percent.latex())[3]


def wide_table(rows: int) -> Table:
    """Names that LaTeX must not take for its own, and more columns than fit beside one another."""
    columns = tuple(Column(f"mAP & 100% of my_lists, number {place}") for place in range(6))
    cells = (Cell((0.123, 0.456), PaperValue(0.622, 0.005)), None, Cell(()), *[Cell((0.7, 0.7))] * 3)
    labels = [("[tiny_imagenet]", f"*{place} & 50%", loss) for place in range(rows) for loss in ("a_b", "{c}^~\\")]
    stub = ("data_set", "en&coder", "loss #")
    return Table("wide", "50% of A_b & c: $1", stub, columns, dict.fromkeys(labels, cells), ("With a_b=[1].",))


@pytest.mark.parametrize("table", [table_of(0.1, 0.2), wide_table(2), wide_table(40), replace(TABLE, rows={})])
def test_latex_fits_its_page(table: Table, tmp_path: Path) -> None:
    text = table.latex()
    packages = re.findall(r"^% \\usepackage\{(\w+)\}$", text, re.MULTILINE)
    assert packages == ["booktabs", "longtable", "pdflscape"]
    assert structure(text)[0] == [for_latex(head) for head in table._texts(str, str)[0]]
    if shutil.which("pdflatex") is None or subprocess.run(["kpsewhich", "pdflscape.sty"]).returncode:
        pytest.skip("there is no LaTeX to set it with")
    loads = "".join(rf"\usepackage{{{package}}}" for package in packages)
    document = rf"\documentclass{{article}}{loads}\begin{{document}}{text}\ref{{tab:{table.name}}}\end{{document}}"
    (tmp_path / "a.tex").write_text(document)
    for _ in range(2):  # the second time references are known
        words = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "a.tex"]
        said = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, errors="replace")
        assert said.returncode == 0, said.stdout
    assert not re.search(r"Overfull|too large|Missing character|LaTeX Warning", said.stdout), said.stdout


words = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), min_size=1, max_size=12)
signs = st.text("|*_`<>[]()#+-.!\\{}$&%~^=1a ", min_size=1, max_size=12)
emphasis = st.text("_*`a1. ", min_size=1, max_size=8)
labels_of_any_kind = (words | signs | emphasis).map(lambda text: " ".join(text.split())).filter(bool)


@settings(deadline=None)
@given(st.lists(labels_of_any_kind, min_size=1, max_size=3, unique=True))
@example(["__a__", "_a_", "a_b_c"])
def test_any_label_is_shown_as_it_is(labels: list[str]) -> None:
    table = replace(table_of(*[0.5] * len(labels), labels=tuple(labels)), title=labels[0], notes=(labels[0],))
    text = table.markdown()
    assert [row[0] for row in parsed(text)[1:]] == [display(label) for label in labels]
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    said = ["".join(part.content for part in token.children or []) for token in tokens if token.type == "inline"]
    assert said[0] == labels[0]
    assert said[-1] == labels[0]
    assert len(structure(table.latex())) == 1 + len(labels)
    assert [line["row"] for line in csv_format.DictReader(io.StringIO(table.csv()))] == labels


def test_terminal_shows_all_columns() -> None:
    shown = printed(TABLE, 140)
    assert re.search(r"ResNet-18 +cross-entropy +\.250 ± \.071 \(2\) = +\.249 ± \.003", shown)
    for row in parsed(TABLE.markdown()):
        assert all(cell.replace("*", "") in shown for cell in row)
    assert "Seeds 0 and 1." in shown
    assert max(map(len, printed(TABLE, 64).splitlines())) <= 64
    assert "[bold]x[/bold]" in printed(table_of(0.5, labels=("[bold]x[/bold]",)), 80)


def test_write(tmp_path: Path) -> None:
    paths = write_table(TABLE, tmp_path / "out" / "tables")
    assert [path.name for path in paths] == ["table1.md", "table1.tex", "table1.csv"]
    assert [path.read_text(encoding="utf-8") for path in paths] == [TABLE.markdown(), TABLE.latex(), TABLE.csv()]
    assert sorted(path.name for path in paths[0].parent.iterdir()) == sorted(path.name for path in paths)
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="cannot be written"):
        write_table(TABLE, tmp_path / "file")


def test_an_empty_table_has_its_heads() -> None:
    empty = replace(TABLE, rows={}, notes=())
    assert parsed(empty.markdown()) == [["encoder", "loss", "mAP", "time (ms)", "epochs"]]
    assert len(structure(empty.latex())) == 1
    assert "epochs" in printed(empty, 80)


def test_names_are_the_papers_and_unknown_ones_stay() -> None:
    assert [display(name) for name in ("resnet101", "tiny_imagenet", "cross_entropy", "cam", "two_stage")] == [
        "ResNet-101",
        "Tiny ImageNet",
        "cross-entropy",
        "CAM",
        "two-stage",
    ]
    assert all(display(method) == title for method, title in TITLES.items())
    assert display("timm:convnext_tiny") == "timm:convnext_tiny"


fractions = st.lists(st.floats(0, 1), max_size=6).map(tuple)


@given(fractions)
def test_mean_and_sample_deviation(values: tuple[float, ...]) -> None:
    cell = Cell(values)
    assert (cell.mean is None) == (len(values) == 0)
    assert (cell.std is None) == (len(values) < 2)
    if cell.mean is not None:
        assert cell.mean == pytest.approx(np.mean(values), abs=1e-12)
    if cell.std is not None:
        assert cell.std == pytest.approx(np.std(values, ddof=1), abs=1e-12)


@pytest.mark.parametrize(
    ("values", "unit", "text"),
    [
        ((0.784, 0.790, 0.796), "fraction", ".790 ± .006"),
        ((0.79,), "fraction", ".790"),
        ((), "fraction", "not run"),
        ((), "rank", "not run"),
        ((1.0, 1.0), "fraction", "1.000 ± .000"),
        ((0.9996,), "fraction", "1.000"),
        ((0.0,), "fraction", ".000"),
        ((-0.012,), "fraction", "-.012"),
        ((-0.0001,), "fraction", ".000"),
        ((6.4,), "ms", "6.40"),
        ((0.151, 0.149), "ms", "0.15 ± 0.00"),
        ((10.5,), "ms", "10.50"),
        ((0.9640, 0.9642), "percent", "96.41% ± 0.01"),
        ((2.0,), "rank", "2"),
    ],
)
def test_text(values: tuple[float, ...], unit: Unit, text: str) -> None:
    assert Cell(values).text(unit) == text


def test_numbers_keep_the_digits_of_the_paper() -> None:
    assert format_value(0.64, 0.008, "fraction", 3) == ".640 ± .008"
    assert format_value(19.0, 2.1, "ms", 1) == "19.0 ± 2.1"
    assert format_value(0.638, 0.0076, "percent", 4) == "63.80% ± 0.76"
    assert format_value(0.638, 0.0076, "fraction", 4) == ".6380 ± .0076"


@pytest.mark.parametrize(
    ("mean", "printed", "verdict"),
    [
        (0.622, PaperValue(0.622, 0.005), "within"),
        (0.632, PaperValue(0.622, 0.005), "within"),
        (0.6324, PaperValue(0.622, 0.005), "within"),
        (0.6326, PaperValue(0.622, 0.005), "above"),
        (0.612, PaperValue(0.622, 0.005), "within"),
        (0.6114, PaperValue(0.622, 0.005), "below"),
        (0.1164, PaperValue(0.116, 0.0), "within"),
        (0.1166, PaperValue(0.116, 0.0), "above"),
        (0.9674, PaperValue(0.967), "within"),
        (0.9664, PaperValue(0.967), "below"),
        (0.96414, PaperValue(0.9641, None, 4), "within"),
        (0.9643, PaperValue(0.9641, None, 4), "above"),
        (7.24, PaperValue(6.4, 0.4, 1), "within"),
        (0.15, PaperValue(2.5, 0.7, 1), "below"),
    ],
)
def test_verdict(mean: float, printed: PaperValue, verdict: str) -> None:
    assert Cell((mean,), printed).verdict == verdict


@given(st.integers(0, 1000), st.integers(0, 1000), st.one_of(st.none(), st.integers(0, 400)))
def test_verdict_is_exact_at_its_bounds(ours: int, theirs: int, spread: int | None) -> None:
    """In thousandths, where nothing is lost to binary fractions."""
    cell = Cell((ours / 1000,), PaperValue(theirs / 1000, None if spread is None else spread / 1000))
    bound = 2 * (spread or 0)
    assert cell.verdict == ("above" if ours > theirs + bound else "below" if ours < theirs - bound else "within")


def test_both_deviations_count() -> None:
    ours = (0.60, 0.62)  # .61 ± .0141
    assert Cell(ours, PaperValue(0.638)).verdict == "within"
    assert Cell(ours, PaperValue(0.639)).verdict == "below"
    assert Cell(ours, PaperValue(0.650, 0.015)).verdict == "within"
    assert Cell(ours, PaperValue(0.652, 0.015)).verdict == "below"


def test_milliseconds_of_another_machine_have_no_verdict() -> None:
    cell = Cell((9.0,), PaperValue(6.4, 0.4, 1))
    assert Column("time", "ms").verdict(cell) is None
    assert Column("times faster", "times").verdict(cell) == "above"
    assert parsed(Table("t", "T", ("row",), (Column("time", "ms"),), {("a",): (cell,)}).markdown())[1] == [
        *("a", "9.00 (1)", "6.4 ± 0.4")
    ]


def test_no_verdict_without_both_sides() -> None:
    assert Cell((0.5,)).verdict is None
    assert Cell((), PaperValue(0.5, 0.1)).verdict is None


@given(st.floats(-1, 1))
def test_a_fraction_reads_back_as_the_number_it_shows(value: float) -> None:
    text = format_value(value, None)
    assert float(text) == pytest.approx(value, abs=0.0005 + 1e-9)
    assert not text.lstrip("-").startswith("0")
