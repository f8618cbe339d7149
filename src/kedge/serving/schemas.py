"""Schemas of the API: what it answers with, and the parameters that its endpoints share."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import Path
from pydantic import BaseModel, ConfigDict, Field

MAX_ID = 2**63 - 1
MAX_K = 200
MAX_PROBES = 64
MAX_TEXT = 1000
Id = Annotated[int, Path(ge=0, le=MAX_ID, description="An item.")]
Count = Annotated[int, Field(ge=0)]
Distance = Annotated[float, Field(ge=0)]
Coordinate = Annotated[float, Field(ge=-1, le=1)]
Method = Literal["two_stage", "brute_force"]


class _Schema(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Error(_Schema):
    """What went wrong."""

    error: str


class Status(_Schema):
    """Whether the server is there."""

    status: str


class Hit(_Schema):
    """An item that was found."""

    id: Count
    name: str | None
    label: str | None
    distance: Distance
    anchor: str | None = Field(description="The anchor in whose list it was found.")


class Search(_Schema):
    """The hits of one way to search, nearest first."""

    method: Method
    hits: list[Hit]
    looked_at: list[str | None] = Field(
        description="The anchors whose lists were read, nearest first; by looks, the label whose items come first."
    )
    compared: Count = Field(description="How many items these lists hold; all items where they are ranked by looks.")
    seconds: float


class NearAnchor(_Schema):
    """An anchor near the query."""

    anchor: Count
    name: str | None
    distance: Distance


class Seconds(_Schema):
    """What took how long."""

    encoder: float | None
    total: float


class Answer(_Schema):
    """The answer to a query."""

    searches: list[Search]
    nearest: list[NearAnchor]
    rank: Literal["class", "looks"] = Field(description="Whether hits are ranked by class, or by looks alone.")
    unknown: bool | None = Field(description="Unlike every trained class; null where nothing was calibrated.")
    place: tuple[Coordinate, Coordinate] | None = Field(description="On the map; null before that is drawn.")
    seconds: Seconds
    record: Count = Field(description="The version that was searched.")


class Item(_Schema):
    """What the gallery knows of an item."""

    id: Count
    name: str | None
    label: str | None
    metadata: dict[str, Any]


class Items(_Schema):
    """Some items in order of their ids."""

    items: list[Item]
    next: int | None = Field(description="Ask for those after this id; null at the end.")


class Counted(_Schema):
    """A label and how many items have it."""

    name: str
    items: Count


class Classes(_Schema):
    """The labels of a gallery."""

    classes: list[Counted]
    unlabelled: Count


class AnchorList(_Schema):
    """An anchor and how many items its list holds."""

    anchor: Count
    name: str | None
    items: Count


class Anchors(_Schema):
    """All anchors."""

    anchors: list[AnchorList]


class Typical(AnchorList):
    """An anchor with those items of its list that are nearest to it."""

    typical: list[Hit]


class MapAnchor(_Schema):
    """An anchor on the map."""

    anchor: Count
    name: str | None
    x: Coordinate
    y: Coordinate


class MapItems(_Schema):
    """Items on the map, column by column."""

    id: list[int]
    x: list[Coordinate]
    y: list[Coordinate]
    label: list[int] = Field(description="Rows of the map's classes; -1 for none.")


class GalleryMap(_Schema):
    """The gallery in two dimensions."""

    classes: list[str]
    anchors: list[MapAnchor]
    items: MapItems
    total: Count
    record: Count


class RecordInfo(_Schema):
    """The state of the record."""

    version: Count
    versions: Count
    changed: str | None


class ModelInfo(_Schema):
    """What embeds the images."""

    encoder: str
    loss: str | None
    size: int | None
    fingerprint: str


class Limits(_Schema):
    """How much may be asked for."""

    bytes: int
    k: int
    probes: int


class Info(_Schema):
    """The facts of a gallery."""

    name: str
    version: str
    items: Count
    classes: Count
    dim: int
    features: Count = Field(description="The size of the features that looks are compared by; 0: there are none.")
    text: bool = Field(description="Whether it can be searched by text.")
    lists: str
    precision: str
    thumbnails: Count
    record: RecordInfo
    model: ModelInfo | None = Field(description="null: the gallery holds vectors.")
    calibrated: bool
    writable: bool
    limits: Limits
