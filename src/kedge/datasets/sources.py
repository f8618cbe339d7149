"""What Kedge asks of a dataset that somebody has already: pictures with labels, one by one."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from typing import Any

from PIL import Image

from kedge.errors import DataError

__all__ = ["Label", "Source"]

Label = int | str | None


class Source(ABC):
    """One split of a dataset. It is read from several threads."""

    name: str
    classes: tuple[str, ...] | None = None
    """The names of the classes in the order of their numbers, where the dataset says them."""

    @abstractmethod
    def __len__(self) -> int:
        """How many pictures there are."""

    @abstractmethod
    def read(self, row: int) -> tuple[Image.Image, Label]:
        """A picture, upright RGB, and its label; a PictureError if it cannot be read."""

    @abstractmethod
    def labels(self) -> list[Label]:
        """The labels of all pictures; None where there is none."""

    @property
    def identity(self) -> Any:
        """Plain values that change when the pictures do; None where only a look at all of them could tell."""
        return None

    def content(self, row: int) -> bytes:
        """A picture as a file would hold it."""
        stream = io.BytesIO()
        self.read(row)[0].save(stream, "PPM")
        return stream.getvalue()

    def path(self, row: int) -> str | None:
        """The file a picture comes from, where that is on this machine and holds just the picture."""
        del row
        return None

    def name_of(self, label: Label) -> str | None:
        """The class that a label stands for."""
        if label is None or isinstance(label, str):
            return label
        if self.classes is None:
            return str(label)
        if not 0 <= label < len(self.classes):
            raise DataError(f"{self.name} has a label {label} but {len(self.classes)} classes: check its labels.")
        return self.classes[label]
