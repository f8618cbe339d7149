"""How a batch is shared: among how many processes, in how many steps."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from kedge.distributed import global_rank, is_torchrun, world_size
from kedge.errors import ConfigError
from kedge.training.settings import Settings

__all__ = ["ALONE", "Layout", "device_of", "layout_of"]


@dataclass(frozen=True)
class Layout:
    """So many processes on each of so many machines, which see a batch in so many steps."""

    devices: int = 1
    nodes: int = 1
    accumulate: int = 1
    rank: int = 0

    @property
    def processes(self) -> int:
        """On all machines."""
        return self.devices * self.nodes

    @property
    def parts(self) -> int:
        """Of a batch: one for each process and step."""
        return self.processes * self.accumulate

    def batch_size(self, wanted: int, pictures: int) -> int:
        """The batch of all processes: as wanted, or as large as so few pictures allow."""
        size = wanted if wanted <= pictures else pictures - pictures % self.parts
        if self.parts > 1 and size < 2 * self.parts:
            raise ConfigError(
                f"{pictures} training pictures are too few for {self._said}: each needs at least two at a time."
            )
        return size

    def check(self, batch_size: int) -> None:
        """Refuse a batch that cannot be shared evenly."""
        if batch_size % self.parts or (self.parts > 1 and batch_size < 2 * self.parts):
            raise ConfigError(
                f"recipe.batch_size must be a multiple of {self.parts}, with at least two pictures for each of "
                f"{self._said}, found {batch_size}."
            )

    @property
    def _said(self) -> str:
        words = [f"{self.processes} processes"] if self.processes > 1 else []
        words += [f"{self.accumulate} steps (trainer.accumulate)"] if self.accumulate > 1 else []
        return " times ".join(words)


ALONE = Layout()


def layout_of(settings: Settings, *, resumed: bool = False) -> Layout:
    """What the settings ask for or, under torchrun, what that has started."""
    trainer = settings.trainer
    if world_size() > 1 and not is_torchrun():
        raise ConfigError(f"{world_size()} processes of another kind are at work: start them with torchrun.")
    device = device_of(trainer.accelerator)
    there = torch.cuda.device_count() if device.type == "cuda" else 1
    wanted = there if isinstance(trainer.devices, str) else trainer.devices
    if is_torchrun():
        started = int(os.environ["LOCAL_WORLD_SIZE"])
        if not resumed and trainer.devices not in ("auto", 1, started):
            raise ConfigError(f"torchrun started {started} processes on this machine, but trainer.devices={wanted}.")
        wanted, nodes = started, int(os.environ["WORLD_SIZE"]) // started
    else:
        nodes = trainer.num_nodes
    if device.type == "cuda" and wanted > there:
        raise ConfigError(f"trainer.devices={wanted}, but this machine has {there} GPUs.")
    found = Layout(wanted, nodes, trainer.accumulate, global_rank())
    found.check(settings.recipe.batch_size)
    return found


def device_of(accelerator: str) -> torch.device:
    """The kind of device to train on."""
    if accelerator == "gpu" and not torch.cuda.is_available():
        raise ConfigError("trainer.accelerator=gpu, but no CUDA GPU is there: use auto or cpu.")
    return torch.device("cuda" if accelerator != "cpu" and torch.cuda.is_available() else "cpu")
