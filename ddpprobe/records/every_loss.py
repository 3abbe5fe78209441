"""The loss of every step: a sampled record also has those of the steps since the one before it.

They are scalars of it, so they are stored and merged as such: `loss@-3` is the loss three steps
before the record's.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from ddpprobe.records.step import StepRecord

_LOSS, _EARLIER = "loss", "loss@-"


def name_of(steps: int) -> str:
    """Return the name of the loss so many steps before the record's."""
    return f"{_EARLIER}{steps}" if steps else _LOSS


def losses_of(record: StepRecord) -> list[tuple[int, Mapping[int, float]]]:
    """Return (step, loss by rank) of all steps that a record tells of, ascending by step."""
    found: dict[int, dict[int, float]] = {}
    for rank, scalars in record.scalars.items():
        for steps, name in _places(tuple(scalars)):
            found.setdefault(record.step - steps, {})[rank] = float(scalars[name])
    return sorted(found.items())


@lru_cache(64)  # all ranks, step by step, give the same few tables of names
def _places(names: tuple[str, ...]) -> tuple[tuple[int, str], ...]:
    """Return (how many steps before the record, name) of the losses among the names."""
    behind = [(name.removeprefix(_EARLIER), name) for name in names if name.startswith(_EARLIER)]
    earlier = [(int(n), name) for n, name in behind if n.isascii() and n.isdigit() and len(n) < 10]
    return (*earlier, *((0, name) for name in names if name == _LOSS))
