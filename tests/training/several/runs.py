"""Many short runs in one process, alone or as one of several: what the tests of processes compare."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kedge.config.compose import compose
from kedge.distributed import global_rank, world_size
from kedge.encoders import encoder as encoders
from kedge.encoders.backbones import Backbone
from kedge.errors import KedgeError
from kedge.training import start_run
from kedge.training.loop import TrainingLoop

REAL = encoders.build_backbone


def tiny_backbone(name: str, **options: Any) -> Backbone:
    """Without batch normalisation, whose statistics know how many processes there are; with some, if wanted."""
    if not name.startswith("tiny"):
        return REAL(name, **options)
    norm = nn.BatchNorm2d(8) if name == "tiny-norm" else nn.Identity()
    layers = nn.Conv2d(3, 8, 3, 2, 1), norm, nn.Tanh(), nn.Conv2d(8, 12, 3, 2, 1), nn.Tanh(), nn.AvgPool2d(3)
    drop = nn.Dropout(0.3) if name == "tiny-drop" else nn.Identity()
    return Backbone(nn.Sequential(*layers, drop, nn.Flatten()), width=12, stem="small", classifier=())


def use_tiny_backbones() -> None:
    encoders.build_backbone = tiny_backbone


def run_all(cases: dict[str, Sequence[str]], out: Path) -> None:
    """Run each case; leave weights (of this process) and what was said in `out`."""
    found: dict[str, Any] = {}
    state: dict[str, torch.Tensor] = {}

    def at_the_end(self: TrainingLoop) -> None:
        real_fit(self)
        state.update({name: value.detach().clone() for name, value in self.step.state_dict().items()})
        state["target"] = torch.tensor(float(self.history.rows[-1].get(self.target, 0)), dtype=torch.float64)

    def stops(self: TrainingLoop) -> None:
        real_start(self)
        if self.epoch == stop_at:
            self.stop.set()
        if self.epoch == break_at and global_rank() == world_size() - 1:
            with torch.no_grad():
                next(self.step.network.parameters()).fill_(torch.nan)

    real_fit, real_start = TrainingLoop.fit, TrainingLoop.on_epoch_start
    TrainingLoop.fit = at_the_end  # type: ignore[method-assign]
    TrainingLoop.on_epoch_start = stops  # type: ignore[method-assign]
    for name, overrides in cases.items():
        state.clear()
        stop_at = 2 if name.startswith("stopped") else -1
        break_at = 1 if name.startswith("broken") else -1
        try:
            start_run(compose(overrides), out / name)
        except KedgeError as error:
            found[name] = f"{type(error).__name__}: {error}"
        else:
            found[name] = dict(state)
    torch.save(found, out / f"found-{global_rank()}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    use_tiny_backbones()
    run_all(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
