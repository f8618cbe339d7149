"""scikit-learn estimators over vectors of any kind: a classifier with CAMLoss, and two-stage nearest neighbours."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import nn

from kedge.deps import missing_extra
from kedge.encoders.heads import BoundedHead
from kedge.errors import ConfigError
from kedge.gallery.anchor_index import k_means
from kedge.gallery.anchors import Anchors
from kedge.gallery.inverted_lists import InvertedLists
from kedge.gallery.result import described
from kedge.gallery.search import Part, Snapshot
from kedge.losses import CAMLoss
from kedge.losses.base import check_count, check_number

try:
    from scipy.special import softmax
    from sklearn.base import BaseEstimator, ClassifierMixin, ClassNamePrefixFeaturesOutMixin, TransformerMixin
    from sklearn.metrics.pairwise import euclidean_distances
    from sklearn.preprocessing import StandardScaler
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data
    from threadpoolctl import threadpool_limits
except ImportError as _error:
    raise missing_extra("scikit-learn 1.6 or newer", extra="sklearn", purpose="kedge.interop.sklearn") from _error

__all__ = ["KedgeClassifier", "KedgeRetriever"]

Head = Literal["hidden", "linear", "identity"]


@dataclass(kw_only=True, eq=False, repr=False)
class _Embedding(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """A transformer: vectors through a small head that was trained with class anchors, on the CPU."""

    head: Head = "hidden"
    dim: int | None = None
    hidden: int = 128
    margin: float = 2.0
    min_norm: float = 1.0
    epochs: int = 60
    batch_size: int = 128
    learning_rate: float = 0.1
    weight_decay: float = 5e-4
    random_state: Any = None

    def _train(self, X: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Train head and anchors; sets `classes_` and `anchors_`, and returns each label's row in `classes_`."""
        check_classification_targets(y)
        self._check_options(X.shape[1])
        self.classes_, codes = np.unique(y, return_inverse=True)
        self._scaler = StandardScaler().fit(X)
        self._scaler.scale_[np.ptp(X, axis=0) == 0] = np.inf  # what never changes says nothing: it becomes 0
        seed = self._seed()
        # One thread is faster for so little work, and the same on every machine.
        with threadpool_limits(1), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._fit(torch.from_numpy(self._scaler.transform(X)), torch.from_numpy(np.array(codes)))
        return np.asarray(codes)

    def _check_options(self, width: int) -> None:
        if self.head not in get_args(Head):
            raise ConfigError(f"head must be one of {', '.join(get_args(Head))}, found {self.head!r}.")
        for name in ("hidden", "epochs", "batch_size"):
            check_count(name, getattr(self, name))
        check_number("learning_rate", self.learning_rate, above=True)
        check_number("weight_decay", self.weight_decay)
        if self.dim is not None:
            check_count("dim", self.dim, otherwise="None")
            if self.head == "identity" and self.dim != width:
                raise ConfigError(
                    f"With head='identity' dim must be the number of features, {width}, found {self.dim}."
                )

    def _fit(self, items: torch.Tensor, targets: torch.Tensor) -> None:
        """SGD with momentum, its rate rising and falling once (OneCycleLR).

        In double precision, so that a result does not depend on the batch it is computed in.
        """
        width, num_classes = items.shape[1], len(self.classes_)
        dim = self.dim or (width if self.head == "identity" else num_classes)
        layers: list[nn.Module] = []
        if self.head == "hidden":
            layers = [nn.Linear(width, self.hidden), nn.ReLU(), BoundedHead(self.hidden, dim)]
        elif self.head == "linear":
            layers = [BoundedHead(width, dim)]
        network = nn.Sequential(*layers).double().train()
        loss = CAMLoss(num_classes, dim, self.margin, self.min_norm).double()
        groups: list[dict[str, Any]] = [{"params": [loss.anchors]}]
        if layers:
            groups.append({"params": list(network.parameters()), "weight_decay": self.weight_decay})
        else:  # the vectors do not move, so the anchors start at their class means
            means = [items[targets == label].mean(0) for label in range(num_classes)]
            loss.anchors.data.copy_(torch.stack(means))
        optimizer = torch.optim.SGD(groups, lr=self.learning_rate, momentum=0.9)
        steps = self.epochs * -(-len(items) // self.batch_size) + 1
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.learning_rate, total_steps=steps, pct_start=0.2)
        for _ in range(self.epochs):
            for rows in torch.split(torch.randperm(len(items)), self.batch_size):
                optimizer.zero_grad()
                loss(network(items[rows]), targets[rows]).backward()
                optimizer.step()
                schedule.step()
        self._head: nn.Module | None = network.eval().requires_grad_(False)
        self.anchors_ = loss.anchors.detach().numpy()

    def _seed(self) -> int:
        return int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))

    def transform(self, X: Any) -> np.ndarray:
        """The embeddings of vectors."""
        return self._embed(self._validate(X))

    def _validate(self, X: Any) -> np.ndarray:
        check_is_fitted(self)
        checked: np.ndarray = validate_data(self, X, dtype=np.float64, reset=False)
        return checked

    def _embed(self, X: np.ndarray) -> np.ndarray:
        if self._head is None:
            return X.copy()
        with torch.no_grad():
            return np.asarray(self._head(torch.from_numpy(self._scaler.transform(X))))

    @property
    def _n_features_out(self) -> int:
        return int(self.anchors_.shape[1])


@dataclass(eq=False, repr=False)
class KedgeClassifier(ClassifierMixin, _Embedding):  # type: ignore[misc]
    """Vectors are embedded near the anchor of their class; the nearest anchor is the prediction.

    `head` embeds standardised vectors: `linear` (bounded, as in Kedge's encoders), `hidden` (a layer of `hidden` units
    before it), or `identity`, with which only the anchors learn. Embeddings have `dim` numbers; by default as many as
    there are classes, or features with `identity`. Trained with `kedge.CAMLoss` on the CPU, the same from the same
    `random_state`. `transform` gives the embeddings, for a `Gallery` or whatever comes next in a pipeline.

    Attributes: `classes_`, `anchors_` (one row per class), `n_features_in_`.

    >>> from sklearn.datasets import load_iris
    >>> X, y = load_iris(return_X_y=True)
    >>> bool(KedgeClassifier(random_state=0).fit(X, y).score(X, y) > 0.8)
    True
    """

    head: Head = "hidden"

    def fit(self, X: Any, y: Any) -> KedgeClassifier:
        """Train head and anchors."""
        X, y = validate_data(self, X, y, dtype=np.float64)
        self._train(X, y)
        return self

    def predict(self, X: Any) -> np.ndarray:
        """The class of the nearest anchor."""
        nearest = self._scores(X).argmax(axis=1)
        return np.asarray(self.classes_[nearest])

    def decision_function(self, X: Any) -> np.ndarray:
        """−½‖e − c‖² for each class; of two classes, what the second has more of."""
        scores = self._scores(X)
        return scores[:, 1] - scores[:, 0] if len(self.classes_) == 2 else scores

    def predict_proba(self, X: Any) -> np.ndarray:
        """As if the embeddings of a class were spread around its anchor, with variance 1 in each direction."""
        return np.asarray(softmax(self._scores(X), axis=1))

    def _scores(self, X: Any) -> np.ndarray:
        return np.asarray(euclidean_distances(self.transform(X), self.anchors_, squared=True) / -2)


@dataclass(eq=False, repr=False)
class KedgeRetriever(_Embedding):
    """The nearest vectors, found in two stages: the nearest anchors first, then only their lists.

    With labels, `fit` trains a head and anchors as `KedgeClassifier` does, and lists are those of the labels; without,
    vectors stay as they are, and `anchors` k-means centroids (by default the square root of their number) are the
    anchors. `probes` is how many lists a query looks into, more where they hold fewer items than asked for; with as
    many as there are lists, the answer is that of an exhaustive search.

    Attributes: `anchors_` (one row per list), `n_samples_fit_`, `n_features_in_`; with labels `classes_`.

    >>> X = np.random.default_rng(0).normal(size=(200, 8))
    >>> retriever = KedgeRetriever(n_neighbors=3, random_state=0).fit(X)
    >>> retriever.kneighbors(X[:2], return_distance=False)[:, 0].tolist()
    [0, 1]
    """

    n_neighbors: int = 5
    _: KW_ONLY
    probes: int = 1
    anchors: int | None = None

    def fit(self, X: Any, y: Any = None) -> KedgeRetriever:
        """Take the vectors that will be found, and with labels learn from them."""
        if y is None:
            X, codes = validate_data(self, X, dtype=np.float64), None
            count = round(len(X) ** 0.5) if self.anchors is None else self.anchors
            if not 1 <= count <= len(X):
                raise ConfigError(f"anchors must lie between 1 and the {len(X)} samples, found {count}.")
            self._head, self.anchors_ = None, k_means(X, count, rounds=10, seed=self._seed())
        else:
            X, y = validate_data(self, X, y, dtype=np.float64)
            codes = self._train(X, y)
        self.n_samples_fit_ = len(X)
        self._vectors = self._embed(X).astype(np.float32)
        anchors = Anchors(self.anchors_.astype(np.float32), (None,) * len(self.anchors_), len(self.anchors_))
        assigned = anchors.nearest(self._vectors, 1)[:, 0] if codes is None else codes
        missing = [None] * len(X)
        lists = InvertedLists.in_memory(assigned, len(anchors), np.arange(len(X)), self._vectors, missing, missing)
        self._snapshot = Snapshot(0, anchors, (Part(lists),))
        return self

    def kneighbors(
        self, X: Any = None, n_neighbors: int | None = None, return_distance: bool = True
    ) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
        """Distances and indices of the nearest fitted vectors, nearest first.

        Without `X`, of each of those vectors, which is then not its own neighbour.
        """
        check_is_fitted(self)
        count = self.n_neighbors if n_neighbors is None else n_neighbors
        itself = int(X is None)
        if not 1 <= count <= self.n_samples_fit_ - itself:
            raise ConfigError(f"n_neighbors must lie between 1 and {self.n_samples_fit_ - itself}, found {count}.")
        if not self.probes >= 1:
            raise ConfigError(f"probes must be at least 1, found {self.probes}.")
        queries = self._vectors if X is None else self._embed(self._validate(X)).astype(np.float32)
        total = count + itself
        hits, _ = self._snapshot.search(queries, total, probes=self.probes, min_candidates=total)
        columns = [described(nearest) for nearest in hits]
        indices = np.array([of_query.ids for of_query in columns], dtype=np.int64)
        distances = np.array([of_query.distances for of_query in columns], dtype=np.float64)
        if X is None:
            indices, distances = _drop_itself(indices, distances)
        return (distances, indices) if return_distance else indices


def _drop_itself(indices: np.ndarray, distances: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each row without its own index or, where that was not found, without the farthest."""
    own = indices == np.arange(len(indices))[:, None]
    own[~own.any(axis=1), -1] = True
    shape = len(indices), indices.shape[1] - 1
    return indices[~own].reshape(shape), distances[~own].reshape(shape)
