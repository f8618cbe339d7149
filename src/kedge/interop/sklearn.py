"""scikit-learn estimators over vectors of any kind: a classifier with CAMLoss, and two-stage nearest neighbours."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import torch

from kedge.deps import missing_extra
from kedge.errors import ConfigError
from kedge.gallery.anchor_index import k_means
from kedge.gallery.anchors import Anchors
from kedge.gallery.inverted_lists import InvertedLists
from kedge.gallery.search import Part, Snapshot
from kedge.interop.fitting import Head, HeadOptions, fit_head

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, ClassNamePrefixFeaturesOutMixin, TransformerMixin
    from sklearn.preprocessing import StandardScaler
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data
    from threadpoolctl import threadpool_limits
except ImportError as _error:
    raise missing_extra("scikit-learn 1.6 or newer", extra="sklearn", purpose="kedge.interop.sklearn") from _error

__all__ = ["KedgeClassifier", "KedgeRetriever"]


@dataclass(kw_only=True, eq=False, repr=False)
class _Embedding(HeadOptions, ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """A transformer: vectors through a head that was trained with anchors."""

    random_state: Any = None

    def _train(self, X: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Train head and anchors; sets `classes_` and `anchors_`, and returns each label's row in `classes_`."""
        check_classification_targets(y)
        self.classes_, codes = np.unique(y, return_inverse=True)
        self._scaler = StandardScaler().fit(X)
        self._scaler.scale_[np.ptp(X, axis=0) == 0] = np.inf  # what never changes says nothing: it becomes 0
        with threadpool_limits(1):  # faster for so little work, and the same on every machine
            vectors = self._scaler.transform(X)
            head, self.anchors_ = fit_head(self, vectors, codes, len(self.classes_), self._seed())
        self._head: torch.nn.Module | None = head
        return np.asarray(codes)

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
        scores = self._scores(X)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        return np.asarray(weights / weights.sum(axis=1, keepdims=True))

    def _scores(self, X: Any) -> np.ndarray:
        embeddings = self._embed(self._validate(X))
        # |e|² is the same for all classes, but says how sure a prediction is.
        squares = (
            (embeddings**2).sum(axis=1)[:, None] - 2 * embeddings @ self.anchors_.T + (self.anchors_**2).sum(axis=1)
        )
        return np.asarray(-squares / 2)


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
        results, _ = self._snapshot.search(queries, total, probes=self.probes, min_candidates=total)
        indices = np.array([result.ids for result in results], dtype=np.int64)
        distances = np.array([result.distances for result in results], dtype=np.float64)
        if X is None:
            indices, distances = _drop_itself(indices, distances)
        return (distances, indices) if return_distance else indices


def _drop_itself(indices: np.ndarray, distances: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each row without its own index or, where that was not found, without the farthest."""
    own = indices == np.arange(len(indices))[:, None]
    own[~own.any(axis=1), -1] = True
    shape = len(indices), indices.shape[1] - 1
    return indices[~own].reshape(shape), distances[~own].reshape(shape)
