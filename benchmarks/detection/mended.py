"""The unlisted faults without their fault: the same job, net and data, as somebody meant it.

What a fault changes is a switch in its class: "it should be ...". One that begins in the middle of
training is mended by never beginning.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import nn

from benchmarks.detection import ranks
from benchmarks.detection.faults import Fault
from benchmarks.detection.jobs import JOBS
from benchmarks.detection.training import Training

_NEVER = 10**9  # a step that no job reaches
_DRAWN = {"U57", "U81"}  # by their seed they have other data, or another schedule, fault or not
_IMAGES, _PIXELS = 32, 64  # of a batch of U116


# The jobs whose fault is there from the start -> what it should be.
_SHOULD_BE: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "U62": {"unlabelled": lambda _self, _y, padding: padding},
        "U66": {"target": lambda _, x: (x[:, 0] * x[:, 1] + x.sum(1))[:, None]},
        "U67": {"masks": lambda self: self.data.own},
        "U71": {"epoch_seed": lambda self: self.data_seed() + 7919 * (1 + self.step)},
        "U76": {"target": lambda _self, _x, y: y},
        "U77": {"likely": lambda _, out: out.log_softmax(-1)},
        "U78": {"hidden": lambda _, padding: padding},
        "U84": {"size": 32},
        "U96": {"batch_first": True},
        "U97": {"loss": lambda self, x, y: nn.functional.cross_entropy(self.wrapped(x), y)},
        "U98": {"nodes": lambda self: [list(range(self.world))]},
        "U111": {"too_early": False},
        "U112": {"mode": "min"},
        "U113": {"sync": True},
        "U114": {"kept": True},
        "U115": {"stops": True},
        "U116": {"over": _IMAGES * _PIXELS},
        "U117": {"times": 1},
        "U118": {"sign": 1},
        "U119": {"middle": 0.0, "spread": 1.0},
        "U120": {"power": -1},
        "U136": {"times": 1},
        "U137": {"sorted": False},
        "U138": {"own": False},
        "U139": {"by_class": False},
        "U140": {"sign": -1},
        "U146": {"prefix": ""},
        "U147": {"cleared": True},
        "U148": {"momentum": 0.01},
        "U149": {"means": False},
        "U150": {"ends": True},
    }
)


def _can_be_mended(name: str, job: type[Training]) -> bool:
    unlisted = name.startswith("U") and issubclass(job, Fault) and name not in _DRAWN
    return unlisted and (name in _SHOULD_BE or not job.from_the_start)


MENDED = [name for name, job in JOBS.items() if _can_be_mended(name, job)]


def mended(name: str) -> type[Training]:
    """Return the job of that name without its fault."""
    job = JOBS[name]
    if name in _SHOULD_BE:
        return type(job.__name__, (job,), dict(_SHOULD_BE[name]))

    def begin(self: Training, seed: int, rank: int) -> None:
        job.__init__(self, seed, rank)
        self.start = _NEVER

    return type(job.__name__, (job,), {"__init__": begin})


def launch(name: str, seed: int, every: int, directory: str) -> None:
    """Run a job without its fault; the run is in `directory`/run. Called in a forked process."""
    JOBS[name] = mended(name)
    ranks.launch(name, seed, every, directory)
