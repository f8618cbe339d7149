"""Results of experiments as figures: curves, small multiples, embeddings in two dimensions, the league of losses."""

from kedge.reproduce.figures.embeddings import embeddings_2d
from kedge.reproduce.figures.league import league_chart
from kedge.reproduce.figures.lines import curves
from kedge.reproduce.figures.small_multiples import panels
from kedge.reproduce.figures.writing import write_figure

__all__ = ["curves", "embeddings_2d", "league_chart", "panels", "write_figure"]
