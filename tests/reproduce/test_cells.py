from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge.errors import DataError
from kedge.reproduce.cells import Cell, Unit, number, printed_text
from kedge.reproduce.printed import Printed

shares = st.lists(st.floats(0, 1), max_size=6).map(tuple)


@given(shares)
def test_mean_and_sample_deviation(values: tuple[float, ...]) -> None:
    cell = Cell(values)
    assert cell.count == len(values)
    assert (cell.mean is None) == (len(values) == 0)
    assert (cell.std is None) == (len(values) < 2)
    if cell.mean is not None:
        assert cell.mean == pytest.approx(np.mean(values), abs=1e-12)
    if cell.std is not None:
        assert cell.std == pytest.approx(np.std(values, ddof=1), abs=1e-12)


@pytest.mark.parametrize(
    ("values", "unit", "text"),
    [
        ((0.784, 0.790, 0.796), "share", ".790 ± .006 (3)"),
        ((0.79,), "share", ".790 (1)"),
        ((), "share", "not run"),
        ((), "place", "not run"),
        ((1.0, 1.0), "share", "1.000 ± .000 (2)"),
        ((0.9996,), "share", "1.000 (1)"),
        ((0.0,), "share", ".000 (1)"),
        ((-0.012,), "share", "-.012 (1)"),
        ((-0.0001,), "share", ".000 (1)"),
        ((6.4,), "ms", "6.40 (1)"),
        ((0.151, 0.149), "ms", "0.15 ± 0.00 (2)"),
        ((10.5,), "ms", "10.50 (1)"),
        ((0.9640, 0.9642), "percent", "96.41% ± 0.01 (2)"),
        ((2.0,), "place", "2"),
    ],
)
def test_text(values: tuple[float, ...], unit: Unit, text: str) -> None:
    assert Cell(values).text(unit) == text


def test_printed_numbers_keep_the_digits_of_the_paper() -> None:
    assert printed_text(Printed(0.64, 0.008)) == ".640 ± .008"
    assert printed_text(Printed(0.116, 0.0)) == ".116 ± .000"
    assert printed_text(Printed(0.967)) == ".967"
    assert printed_text(Printed(19.0, 2.1, 1), "ms") == "19.0 ± 2.1"
    assert printed_text(Printed(0.638, 0.0076, 4), "percent") == "63.80% ± 0.76"
    assert printed_text(Printed(0.638, 0.0076, 4)) == ".6380 ± .0076"


@pytest.mark.parametrize(
    ("mean", "printed", "verdict"),
    [
        (0.622, Printed(0.622, 0.005), "within"),
        (0.632, Printed(0.622, 0.005), "within"),
        (0.6324, Printed(0.622, 0.005), "within"),
        (0.6326, Printed(0.622, 0.005), "above"),
        (0.612, Printed(0.622, 0.005), "within"),
        (0.6114, Printed(0.622, 0.005), "below"),
        (0.1164, Printed(0.116, 0.0), "within"),
        (0.1166, Printed(0.116, 0.0), "above"),
        (0.9674, Printed(0.967), "within"),
        (0.9664, Printed(0.967), "below"),
        (0.96414, Printed(0.9641, None, 4), "within"),
        (0.9643, Printed(0.9641, None, 4), "above"),
        (7.24, Printed(6.4, 0.4, 1), "within"),
        (0.15, Printed(2.5, 0.7, 1), "below"),
    ],
)
def test_verdict(mean: float, printed: Printed, verdict: str) -> None:
    assert Cell((mean,), printed).verdict == verdict


@given(st.integers(0, 1000), st.integers(0, 1000), st.one_of(st.none(), st.integers(0, 400)))
def test_verdict_is_exact_at_its_bounds(ours: int, theirs: int, spread: int | None) -> None:
    """In thousandths, where nothing is lost to binary fractions."""
    cell = Cell((ours / 1000,), Printed(theirs / 1000, None if spread is None else spread / 1000))
    bound = 2 * (spread or 0)
    assert cell.verdict == ("above" if ours > theirs + bound else "below" if ours < theirs - bound else "within")


def test_no_verdict_without_both_sides() -> None:
    assert Cell((0.5,)).verdict is None
    assert Cell((), Printed(0.5, 0.1)).verdict is None


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_is_refused(value: float) -> None:
    with pytest.raises(DataError, match="leave out runs"):
        Cell((0.5, value))


@given(st.floats(-1, 1))
def test_a_share_reads_back_as_the_number_it_shows(value: float) -> None:
    assert float(number(value)) == pytest.approx(value, abs=0.0005 + 1e-9)
    assert not number(value).lstrip("-").startswith("0")
