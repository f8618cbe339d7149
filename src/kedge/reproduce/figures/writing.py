"""A figure as files."""

from __future__ import annotations

from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

from kedge.io import atomic_write

__all__ = ["write_figure"]


def write_figure(figure: Figure, folder: Path, name: str) -> list[Path]:
    """The figure as ``name.png`` (150 dots per inch) and ``name.svg``; the same figure gives the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    # The SVG carries scatters as pictures: coarser ones keep it small.
    kinds: dict[str, tuple[int, dict[str, str | None]]] = {
        "png": (150, {"Software": None}),
        "svg": (110, {"Date": None, "Creator": "Kedge"}),
    }
    written = []
    for kind, (dpi, metadata) in kinds.items():
        final = folder / f"{name}.{kind}"
        with rc_context({"svg.hashsalt": "kedge"}), atomic_write(final) as stream:
            figure.savefig(stream, format=kind, dpi=dpi, metadata=metadata)
        written.append(final)
    return written
