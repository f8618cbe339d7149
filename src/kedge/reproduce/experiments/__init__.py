"""The paper's nine experiments and the league: which runs each needs, and what is made of their results."""

from __future__ import annotations

from kedge.errors import ConfigError
from kedge.reproduce.experiments.base import Choice, Experiment, Results
from kedge.reproduce.experiments.curves import Convergence, Dimensions, FewShot
from kedge.reproduce.experiments.league import League
from kedge.reproduce.experiments.pictures import Embeddings2d, Qualitative
from kedge.reproduce.experiments.tables import Ablation, Classification, Table1, Table2

__all__ = ["EXPERIMENTS", "Choice", "Experiment", "Results", "experiment"]

EXPERIMENTS: dict[str, Experiment] = {
    one.name: one
    for one in (
        Table1(),
        Table2(),
        Ablation(),
        Classification(),
        Dimensions(),
        Convergence(),
        FewShot(),
        Embeddings2d(),
        Qualitative(),
        League(),
    )
}


def experiment(name: str) -> Experiment:
    """The experiment called so."""
    if name not in EXPERIMENTS:
        raise ConfigError(f"There is no experiment {name!r}: take one of {', '.join(EXPERIMENTS)}.")
    return EXPERIMENTS[name]
