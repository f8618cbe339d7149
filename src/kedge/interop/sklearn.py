"""The loss and the two-stage search as scikit-learn estimators, over vectors of any kind."""

from __future__ import annotations

from typing import Any

import numpy as np

from kedge.errors import ConfigError
from kedge.gallery.anchor_index import k_means
from kedge.gallery.anchors import Anchors
from kedge.gallery.inverted_lists import InvertedLists
from kedge.gallery.search import Part, Snapshot
from kedge.interop.fitting import Fitted, Head, fit_head

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, ClassNamePrefixFeaturesOutMixin, TransformerMixin
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError as _error:
    raise ConfigError("The estimators need scikit-learn 1.6 or newer: pip install 'kedge[sklearn]'.") from _error

__all__ = ["KedgeClassifier", "KedgeRetriever"]

_LARGEST_SEED = np.iinfo(np.int32).max


class _Embedding(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Vectors through a head that was trained with anchors."""

    head: Head
    dim: int | None
    hidden: int
    margin: float
    min_norm: float
    epochs: int
    batch_size: int
    learning_rate: float
    weight_decay: float
    random_state: Any

    def _train(self, X: np.ndarray, y: np.ndarray) -> Fitted:
        """Train on codes of classes; sets `classes_` and `anchors_`."""
        check_classification_targets(y)
        self.classes_, codes = np.unique(y, return_inverse=True)
        fitted = fit_head(
            X,
            codes,
            len(self.classes_),
            head=self.head,
            dim=self.dim,
            hidden=self.hidden,
            margin=self.margin,
            min_norm=self.min_norm,
            epochs=self.epochs,
            batch_size=self.batch_size,
            learning_rate=self.learning_rate,
            weight_decay=self.weight_decay,
            seed=int(check_random_state(self.random_state).randint(_LARGEST_SEED)),
        )
        self.anchors_ = fitted.anchors
        return fitted

    def transform(self, X: Any) -> np.ndarray:
        """The embeddings of vectors."""
        return self._embedded(self._known(X))

    def _known(self, X: Any) -> np.ndarray:
        check_is_fitted(self)
        checked: np.ndarray = validate_data(self, X, dtype=np.float64, reset=False)
        return checked

    def _embedded(self, X: np.ndarray) -> np.ndarray:
        return X.copy() if self._fitted is None else self._fitted.embed(X)

    _fitted: Fitted | None

    @property
    def _n_features_out(self) -> int:
        return int(self.anchors_.shape[1])


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

    def __init__(
        self,
        head: Head = "hidden",
        *,
        dim: int | None = None,
        hidden: int = 128,
        margin: float = 2.0,
        min_norm: float = 1.0,
        epochs: int = 60,
        batch_size: int = 128,
        learning_rate: float = 0.1,
        weight_decay: float = 5e-4,
        random_state: Any = None,
    ) -> None:
        self.head = head
        self.dim = dim
        self.hidden = hidden
        self.margin = margin
        self.min_norm = min_norm
        self.epochs = epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.random_state = random_state

    def fit(self, X: Any, y: Any) -> KedgeClassifier:
        """Train head and anchors."""
        X, y = validate_data(self, X, y, dtype=np.float64)
        self._fitted = self._train(X, y)
        return self

    def predict(self, X: Any) -> np.ndarray:
        """The class of the nearest anchor."""
        nearest = self._scores(X).argmax(axis=1)
        found: np.ndarray = self.classes_[nearest]
        return found

    def decision_function(self, X: Any) -> np.ndarray:
        """−½‖e − c‖² for each class; of two classes, what the second has more of."""
        scores = self._scores(X)
        return scores[:, 1] - scores[:, 0] if len(self.classes_) == 2 else scores

    def predict_proba(self, X: Any) -> np.ndarray:
        """As if the embeddings of a class were spread around its anchor, with variance 1 in each direction."""
        scores = self._scores(X)
        shares = np.exp(scores - scores.max(axis=1, keepdims=True))
        found: np.ndarray = shares / shares.sum(axis=1, keepdims=True)
        return found

    def _scores(self, X: Any) -> np.ndarray:
        embeddings = self._embedded(self._known(X))
        # |e|² is the same for all classes, but says how sure a prediction is.
        squares = (
            (embeddings**2).sum(axis=1)[:, None] - 2 * embeddings @ self.anchors_.T + (self.anchors_**2).sum(axis=1)
        )
        return np.asarray(-squares / 2)


class KedgeRetriever(_Embedding):
    """The nearest vectors, found in two stages: the nearest anchors first, then only their lists.

    With labels, `fit` trains a head and anchors as `KedgeClassifier` does, and lists are those of the labels; without,
    vectors stay as they are, and `anchors` k-means centres (by default the square root of their number) are the
    anchors. `probes` is how many lists a query looks into, more where they hold fewer items than asked for; with as
    many as there are lists, the answer is that of an exhaustive search.

    Attributes: `anchors_` (one row per list), `n_samples_fit_`, `n_features_in_`; with labels `classes_`.

    >>> X = np.random.default_rng(0).normal(size=(200, 8))
    >>> retriever = KedgeRetriever(n_neighbors=3, random_state=0).fit(X)
    >>> retriever.kneighbors(X[:2], return_distance=False)[:, 0].tolist()
    [0, 1]
    """

    def __init__(
        self,
        n_neighbors: int = 5,
        *,
        probes: int = 1,
        anchors: int | None = None,
        head: Head = "hidden",
        dim: int | None = None,
        hidden: int = 128,
        margin: float = 2.0,
        min_norm: float = 1.0,
        epochs: int = 60,
        batch_size: int = 128,
        learning_rate: float = 0.1,
        weight_decay: float = 5e-4,
        random_state: Any = None,
    ) -> None:
        self.n_neighbors = n_neighbors
        self.probes = probes
        self.anchors = anchors
        self.head = head
        self.dim = dim
        self.hidden = hidden
        self.margin = margin
        self.min_norm = min_norm
        self.epochs = epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.random_state = random_state

    def fit(self, X: Any, y: Any = None) -> KedgeRetriever:
        """Take the vectors that will be found, and with labels learn from them."""
        if y is None:
            X, codes = validate_data(self, X, dtype=np.float64), None
            self._fitted = None
            self.anchors_ = self._centres(X)
        else:
            X, y = validate_data(self, X, y, dtype=np.float64)
            self._fitted = self._train(X, y)
            codes = np.searchsorted(self.classes_, y)
        self.n_samples_fit_ = len(X)
        vectors = self._embedded(X).astype(np.float32)
        anchors = Anchors(self.anchors_.astype(np.float32), (None,) * len(self.anchors_), len(self.anchors_))
        homes = anchors.nearest(vectors, 1)[:, 0] if codes is None else codes
        nothing = [None] * len(X)
        lists = InvertedLists.in_memory(homes, len(anchors), np.arange(len(X)), vectors, nothing, nothing)
        self._searched = Snapshot(0, anchors, (Part(lists),))
        return self

    def _centres(self, X: np.ndarray) -> np.ndarray:
        count = round(len(X) ** 0.5) if self.anchors is None else self.anchors
        if not 1 <= count <= len(X):
            raise ConfigError(f"anchors must lie between 1 and the {len(X)} samples, found {count}.")
        seed = int(check_random_state(self.random_state).randint(_LARGEST_SEED))
        return k_means(X, count, rounds=10, seed=seed)

    def kneighbors(
        self, X: Any = None, n_neighbors: int | None = None, return_distance: bool = True
    ) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
        """Distances and numbers of the nearest vectors that were fitted, nearest first.

        Without `X`, of each of those vectors, which is then not its own neighbour.
        """
        check_is_fitted(self)
        count = self.n_neighbors if n_neighbors is None else n_neighbors
        more = int(X is None)
        if not 1 <= count <= self.n_samples_fit_ - more:
            raise ConfigError(f"n_neighbors must lie between 1 and {self.n_samples_fit_ - more}, found {count}.")
        if not self.probes >= 1:
            raise ConfigError(f"probes must be at least 1, found {self.probes}.")
        queries = self._own() if X is None else self._embedded(self._known(X)).astype(np.float32)
        total = count + more
        results, _ = self._searched.search(queries, total, probes=self.probes, min_candidates=total)
        numbers = np.array([found.ids for found in results], dtype=np.int64)
        distances = np.array([found.distances for found in results], dtype=np.float64)
        if X is None:
            numbers, distances = _without_oneself(numbers, distances)
        return (distances, numbers) if return_distance else numbers

    def _own(self) -> np.ndarray:
        lists = self._searched.parts[0].lists
        queries = np.empty_like(lists.vectors)
        queries[lists.ids] = lists.vectors
        return queries


def _without_oneself(numbers: np.ndarray, distances: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each row less its own number or, where that was not found, less the farthest."""
    own = numbers == np.arange(len(numbers))[:, None]
    own[~own.any(axis=1), -1] = True
    shape = len(numbers), numbers.shape[1] - 1
    return numbers[~own].reshape(shape), distances[~own].reshape(shape)
