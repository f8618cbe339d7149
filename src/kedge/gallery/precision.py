"""Lists in fewer bits: a narrow copy of every item, read instead of the item to find who may be near.

An item is coded by its difference from its list's anchor. How far a code lies from its item is measured when it is
written, so that a search knows how much a distance between codes can be wrong.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch

from kedge.gallery.crew import Kernel, read_together

__all__ = ["PRECISIONS", "Codes", "Guess", "Narrow", "Precision", "described"]

Precision = Literal["float32", "bfloat16", "int8"]


class Guess(NamedTuple):
    """Squared distances that are nearly right."""

    squares: np.ndarray
    length: float
    """Of the query, from where the rows' lengths are measured: the digits of a product are lost in proportion."""
    error: float = 0.0
    """How far what was compared may lie from the query and the row together."""
    surely: bool = True
    """Whether everything that is left in doubt must be looked at."""


class Narrow(Protocol):
    """How vectors are coded."""

    dtype: type
    """As it is stored."""
    kernel: Kernel
    exact: bool
    """Whether a search looks at everything that the codes leave in doubt, and so misses nothing."""

    def encode(self, vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Codes and the scale of each row."""

    def widen(self, codes: np.ndarray) -> np.ndarray:
        """Codes as single-precision numbers, without their scale."""


class BFloat16:
    """The upper half of a single-precision number."""

    dtype: type = np.uint16
    kernel: Kernel = "bf16"
    exact = True

    def encode(self, vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rounded to 8 significant bits."""
        codes = torch.from_numpy(vectors).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        return codes, np.ones(len(vectors), np.float32)

    def widen(self, codes: np.ndarray) -> np.ndarray:
        """The lower half is zero."""
        return (codes.astype(np.uint32) << 16).view(np.float32)


class Int8:
    """255 steps from the smallest to the largest number of a row."""

    dtype: type = np.int8
    kernel: Kernel = "int8"
    exact = False

    def encode(self, vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Each row with a step of its own."""
        scales = np.abs(vectors).max(axis=1) / 127
        steps = np.where(scales > 0, scales, 1).astype(np.float32)
        return np.rint(vectors / steps[:, None]).astype(np.int8), steps

    def widen(self, codes: np.ndarray) -> np.ndarray:
        """As they are."""
        return codes.astype(np.float32)


PRECISIONS: dict[str, Narrow | None] = {"float32": None, "bfloat16": BFloat16(), "int8": Int8()}


@dataclass(frozen=True)
class Codes:
    """The narrow copy of lists, row by row."""

    narrow: Narrow
    codes: np.ndarray
    scales: np.ndarray
    norms: np.ndarray
    """The squared length of what each row's code stands for."""
    errors: np.ndarray
    """For each list, how far a code lies from its item at most."""
    centres: np.ndarray
    """For each list, what was subtracted."""

    def near(self, place: int, start: int, end: int, query: np.ndarray) -> Guess:
        """Distances between the codes of a list and that of a query."""
        code, scale, norm, error = self._coded(query[None] - self.centres[place])
        found = read_together(code, self.codes[start:end], "dot", self.narrow.kernel)
        found *= self.scales[start:end]
        found *= -2 * scale[0]
        found += self.norms[start:end]
        found += norm[0]
        return Guess(found, math.sqrt(norm[0]), float(error[0] + self.errors[place]), self.narrow.exact)

    def near_many(self, place: int, start: int, end: int, queries: np.ndarray) -> list[Guess]:
        """The same for several queries, in one matrix product."""
        code, scale, norm, error = self._coded(queries - self.centres[place])
        found = (self.narrow.widen(code) * scale[:, None]) @ self.narrow.widen(self.codes[start:end]).T
        found *= -2 * self.scales[start:end]
        found += self.norms[start:end]
        found += norm[:, None]
        doubts = (error + self.errors[place]).tolist()
        lengths = np.sqrt(norm).tolist()
        return [Guess(*row, self.narrow.exact) for row in zip(found, lengths, doubts, strict=True)]

    def _coded(self, queries: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        codes, scales = self.narrow.encode(queries)
        norms, errors = described(self.narrow, queries, codes, scales)
        return codes, scales, norms, errors


def described(
    narrow: Narrow, vectors: np.ndarray, codes: np.ndarray, scales: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The squared length of what codes stand for, and how far that lies from the vectors."""
    meant = narrow.widen(codes)
    meant *= scales[:, None]
    norms = np.einsum("ij,ij->i", meant, meant)
    meant -= vectors
    return norms, np.sqrt(np.einsum("ij,ij->i", meant, meant))
