"""The ways of one encoder as it is now: which are made, what they took, and which comes next."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor

from kedge.encoders import Encoder
from kedge.errors import ModelError
from kedge.model.engines.measuring import check_staying, in_turns
from kedge.model.engines.timings import Case, Timing, recall, remember
from kedge.model.engines.watching import Watch
from kedge.model.engines.ways import CHEAP, COSTLY, Unfit, Way, eager, make

__all__ = ["WORTH", "Choice"]

WORTH = 60.0
"""Seconds of work behind which measuring, which takes about as long, is begun."""
_AT_ONCE = ("fused", "folded_channels_last", "eager")
"""What is used before anything is measured: the first that fits."""
_ALIKE = 0.95
"""A way that takes more of the time of a cheaper one than this is not worth its making."""


@dataclass
class _Work:
    """What was done with batches of one kind, and what is known of them."""

    case: Case
    timings: dict[str, Timing] | None
    pictures: int = 0
    seconds: float = 0.0
    asked: bool = False
    """Whether someone asked for the best, whatever its making costs."""
    used: str = ""
    tried: bool = False


class Choice:
    """Embeds with the best way, of those that are worth their making; to be thrown away when the weights change."""

    def __init__(self, encoder: Encoder, wish: str, *, mirror: bool) -> None:
        self._encoder, self._wish, self.mirror = encoder, wish, mirror
        self.watch = Watch(encoder)
        self._eager = eager(encoder, mirror=mirror)
        self._ways: dict[tuple[object, ...], Way] = {}
        self.unfit: dict[tuple[object, ...], str] = {}
        self._work: dict[tuple[int, ...], _Work] = {}
        self._lock = threading.RLock()
        self._turn = threading.Lock()
        self._helper: threading.Thread | None = None

    def embed(self, images: Tensor) -> Tensor:
        """Embeddings of images; whatever fails where eager does not is not used again."""
        with self._lock:
            work = self._work_with(images)
            name = work.used = self._name(work, images)
            way = self._made(name, images)
            busy = self._helper is not None
        started = time.perf_counter()
        with self._turn if busy else nullcontext():
            try:
                found = way(images)
            except Exception as error:
                if name == "eager" or name == self._wish:
                    raise
                self._drop(name, images, error)
                found = self._eager(images)
        with self._lock:
            work.pictures += len(images)
            work.seconds += time.perf_counter() - started
        return found

    def tune(self, images: Tensor) -> None:
        """Measure, unless that was done, and make the best way for batches like this one."""
        work = self._work_with(images)
        work.asked = True
        if work.timings is None:
            self._measure(work, _sample(images, work.case.batch), self._encoder)
        self._prepare(self._best(work, images), images, self._encoder)
        work.used = self._name(work, images)

    def describe(self) -> str:
        """What runs, and why."""
        said = []
        for work in self._work.values():
            known = work.timings
            if known is None or work.used not in known:
                why = "asked for" if self._wish != "auto" else "not measured yet"
            else:
                why = f"{known['eager'].picture / known[work.used].picture:.2f} x eager, measured"
            if work.used:
                said.append(f"{work.used} for {_kind(work.case)} ({why})")
        return "; ".join(said) or "nothing embedded yet"

    # ------------------------------------------------------------------ which

    def _name(self, work: _Work, images: Tensor) -> str:
        """The way to go now; what is costly and worth it is made in the background meanwhile."""
        if self._wish != "auto":
            return self._wish
        best = self._best(work, images)
        if best in COSTLY and self._key(best, images) not in self._ways:
            self._begin(lambda encoder, some: self._prepare(best, some, encoder), images)
        elif work.timings is None and work.seconds >= WORTH and not work.tried:
            sample = _sample(images, work.case.batch)
            work.tried = self._begin(lambda encoder, some: self._measure(work, some, encoder), sample)
        for name in self._ranked(work):
            if self._key(name, images) in self._ways or (name in CHEAP and self._fits(name, images)):
                return name
        return "eager"

    def _best(self, work: _Work, images: Tensor) -> str:
        """The least time in all, making included, if there is as much work ahead as behind."""
        timings = work.timings or {}
        ranked = [name for name in self._ranked(work) if self._key(name, images) not in self.unfit]
        quick = next((name for name in ranked if name in CHEAP), "eager")
        for name in ranked:
            if name == quick:
                break
            made = work.asked or self._key(name, images) in self._ways
            saved = timings[quick].picture - timings[name].picture
            if timings[name].picture < _ALIKE * timings[quick].picture and (
                made or saved * work.pictures > timings[name].making
            ):
                return name
        return quick

    def _ranked(self, work: _Work) -> list[str]:
        known = work.timings
        return list(_AT_ONCE) if known is None else sorted(known, key=lambda name: known[name].picture)

    # ------------------------------------------------------------------ making

    def _key(self, name: str, images: Tensor) -> tuple[object, ...]:
        """Cheap ways take any images; programs are made for a shape, a thread count and one or many."""
        if name not in COSTLY:
            return (name,)
        return (name, *images.shape[2:], len(images) == 1, torch.get_num_threads())

    def _fits(self, name: str, images: Tensor) -> bool:
        if self._key(name, images) in self.unfit:
            return False
        try:
            self._made(name, images)
        except Unfit:
            return False
        return True

    def _made(self, name: str, images: Tensor, encoder: Encoder | None = None) -> Way:
        key = self._key(name, images)
        if name == "eager":
            return self._eager
        if key not in self._ways:
            some = images[: 2 if name in COSTLY else 1]
            try:
                self._ways[key] = make(name, encoder or self._encoder, some, mirror=self.mirror)
            except Unfit as error:
                self.unfit[key] = str(error)
                if name == self._wish:
                    raise ModelError(
                        f"engine {name} cannot run {self._encoder.name} here ({error}): choose another, or auto."
                    ) from error
                raise
        return self._ways[key]

    def _drop(self, name: str, images: Tensor, error: Exception) -> None:
        with self._lock:
            key = self._key(name, images)
            self._ways.pop(key, None)
            self.unfit[key] = f"{type(error).__name__}: {error}"

    def _prepare(self, name: str, images: Tensor, encoder: Encoder) -> None:
        try:
            self._made(name, images, encoder)
        except Unfit:
            return  # noted there

    # ------------------------------------------------------------------ measuring

    def _measure(self, work: _Work, images: Tensor, encoder: Encoder) -> None:
        """Make all ways from `encoder`, which nobody else holds or changes, and time them."""
        making: dict[str, float] = {}
        ways: dict[str, Way] = {}
        for name in (*CHEAP, *COSTLY):
            check_staying()
            started = time.perf_counter()
            try:
                some = images[: 2 if name in COSTLY else 1]
                ways[name] = make(name, encoder, some, mirror=self.mirror)
            except Unfit as error:
                self.unfit[self._key(name, images)] = str(error)
                continue
            making[name] = time.perf_counter() - started
        seconds, calm = in_turns(ways, images, self._turn)
        work.timings = {name: Timing(spent / len(images), making[name]) for name, spent in seconds.items()}
        if calm:  # otherwise they serve this process, and another measures again
            remember(work.case, work.timings)
        with self._lock:
            best = self._best(work, images)
            if best != "eager":
                self._ways.setdefault(self._key(best, images), ways[best])

    def _begin(self, act: Callable[[Encoder, Tensor], None], images: Tensor) -> bool:
        """Whether it was begun: in a thread, one at a time, and with copies, since training may go on meanwhile."""
        if self._helper is not None:
            return False
        with torch.inference_mode(False):
            encoder, some = deepcopy(self._encoder), images.clone()

        def helped() -> None:
            with suppress(Exception):  # whatever it is, the work goes on as before
                act(encoder, some)
            with self._lock:
                self._helper = None

        self._helper = threading.Thread(target=helped, name="kedge-engine")
        self._helper.start()
        return True

    def _work_with(self, images: Tensor) -> _Work:
        count, threads = _standing_for(len(images)), torch.get_num_threads()
        key = (*images.shape[2:], count, threads)
        with self._lock:
            if key not in self._work:
                spec = json.dumps(self._encoder.spec, sort_keys=True)
                case = Case(spec, images.shape[2], images.shape[3], self.mirror, count, threads)
                self._work[key] = _Work(case, recall(case))
            return self._work[key]


def _standing_for(count: int) -> int:
    """The batch that is measured for batches like this one."""
    return 1 if count == 1 else 4 if count <= 8 else 16


def _kind(case: Case) -> str:
    sizes = {1: "single pictures", 4: "batches of 2 to 8", 16: "batches of 9 and more"}[case.batch]
    return f"{sizes} of {case.height} x {case.width}, {case.threads} threads"


def _sample(images: Tensor, count: int) -> Tensor:
    return images.repeat(-(-count // len(images)), 1, 1, 1)[:count].clone()
