"""`desync`: ranks that should hold the same parameter or constant hold different bits of it.

Data parallelism rests on replicas that never part. Once they do, each rank averages gradients of
another model, and nothing else looks wrong for a long time. Checksums make one bit visible.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ddpprobe.detectors.detector import Detector
from ddpprobe.detectors.rank_scalars import (
    are_one,
    is_held_back,
    is_local_sgd,
    is_unwrapped,
    norm_used_by_all,
    scalars,
)
from ddpprobe.detectors.settings import at_least
from ddpprobe.records.merge import disagreements, ranks_of
from ddpprobe.records.rank_names import ranks_text
from ddpprobe.records.step import (
    BUFFER,
    JOINED,
    LEARNING_RATE,
    UNREDUCED,
    UNWRAPPED,
    USED_NORM,
    Anomaly,
    Digests,
    StepRecord,
)

MOST_SIDES = 8  # groups of ranks in a message


@dataclass(frozen=True, slots=True)
class _Split:
    """How the ranks of one replica group fall apart over one parameter.

    `sides` are the ranks by what they hold, largest side first; the first one is right if it is a
    majority (`decided`).
    """

    fqn: str
    shard: str
    sides: tuple[tuple[int, ...], ...]

    @property
    def decided(self) -> bool:
        """More than half of the ranks agree."""
        return 2 * len(self.sides[0]) > sum(map(len, self.sides))

    @property
    def suspects(self) -> tuple[int, ...]:
        """Ranks that may be wrong, ascending: the minority, or without a majority all of them."""
        sides = self.sides[1:] if self.decided else self.sides
        return tuple(sorted(rank for side in sides for rank in side))


class Desync(Detector):
    """Pages when ranks of one replica group differ; again after `quiet_steps`, or for new suspects.

    After a step whose gradients nobody reduced it only warns: local SGD is meant to part there. It
    pages if they still differ after a step with a reduction, which does not bring them together.
    Where torch's own hook of post-local SGD is at work, they are meant to, and nothing is said.

    It warns, once for each, of buffers that no step changes and that are not the same everywhere:
    nothing but a DDP brings buffers together, and some are each rank's own by design.

    Where nothing is known to reduce gradients, ranks may be replicas nevertheless: they are if the
    optimizers of all of them get one gradient, of another norm at each step, that none of them had
    by itself, at `by_hand` sampled steps in a row. From there on they are judged as any.

    Of several parameters the first one in the order of the model is named, with the number of the
    others. A rank that delivered nothing is not compared. Steps that never reached their end are
    not judged: one rank may have taken what another has not. Nor are those under DDP's `join()`
    whose reduced gradients are not the same on all ranks: there one rank is some steps ahead.

    Args:
        quiet_steps: steps in which ranks agreed, after which the same suspects are reported again.
        by_hand: sampled steps in a row that show that a script reduces gradients itself.
    """

    name = "desync"
    title = "Replicas differ"

    def __init__(self, *, quiet_steps: int = 100, by_hand: int = 3) -> None:
        at_least(0, quiet_steps=quiet_steps)
        at_least(1, by_hand=by_hand)
        self._quiet, self._needed = quiet_steps, by_hand
        self._attempt: int | None = None
        self._last: int | None = None  # latest step at which ranks differed
        self._told: dict[str, set[int]] = {}  # level -> suspects of this episode
        self._buffers: set[str] = set()  # those that were told
        self._by_hand, self._used = 0, math.nan  # sampled steps in a row; the norm at the last one

    def update(self, record: StepRecord) -> list[Anomaly]:
        """Take the next record; at most one anomaly of parameters, and one of buffers."""
        if record.attempt != self._attempt:
            self._attempt, self._last, self._buffers = record.attempt, None, set()
            self._by_hand, self._used = 0, math.nan
        self._look_at_gradients(record)
        splits = [] if record.partial or _at_unlike_steps(record) else _splits(record.digests)
        known = self._by_hand >= self._needed
        parameters = [s for s in splits if s.shard != BUFFER and (known or s.shard != UNWRAPPED)]
        if is_local_sgd(record):
            parameters = []
        new = [s for s in splits if s.shard == BUFFER and s.fqn not in self._buffers]
        self._buffers.update(split.fqn for split in new)
        return [*self._judge(record, parameters), *([_of_buffers(record, new)] if new else [])]

    def _look_at_gradients(self, record: StepRecord) -> None:
        """Count the sampled steps at which a script has reduced the gradients of all ranks."""
        used, local = scalars(record, USED_NORM), scalars(record, "grad_norm_local")
        if not (used and is_unwrapped(record)):
            return
        known = len(local) == len(record.ranks) and math.isfinite(sum(local))
        # What each rank clips has one norm as well, but at every step.
        other = norm_used_by_all(record) is not None and not are_one([used[0], self._used])
        self._by_hand = self._by_hand + 1 if known and other and not are_one(local) else 0
        self._used = used[0]

    def _judge(self, record: StepRecord, splits: list[_Split]) -> list[Anomaly]:
        if not splits:
            return []
        if self._last is None or record.step - self._last > self._quiet:
            self._told = {}
        self._last = record.step
        found = {rank for split in splits for rank in split.suspects}
        by_hand = all(split.shard == UNWRAPPED for split in splits)
        apart = not by_hand and bool(scalars(record, UNREDUCED))
        level = "warn" if apart else "page"
        known = self._told.get("page", set()) | self._told.get(level, set())
        if found <= known:
            return []
        self._told[level] = known | found
        return [_anomaly(record, splits, level)]


def _at_unlike_steps(record: StepRecord) -> bool:
    """Whether ranks under DDP's `join()` show by their gradients that they are at other steps."""
    if not scalars(record, JOINED):
        return False
    norms = scalars(record, "grad_norm")
    return len(norms) > 1 and not are_one(norms)


def _splits(digests: Digests) -> list[_Split]:
    out = []
    for (fqn, shard), held in disagreements(digests).items():
        sides = sorted((ranks_of(mask) for mask in held.values()), key=lambda s: (-len(s), s))
        out.append(_Split(fqn, shard, tuple(sides)))
    return out


def _anomaly(record: StepRecord, splits: list[_Split], level: str) -> Anomaly:
    first = splits[0]
    suspects = first.suspects
    alone = first.decided and len(suspects) == 1
    values = {
        "parameters": len(splits),
        "versions": len(first.sides),
        "suspects": len(suspects),
        "ranks": sum(map(len, first.sides)),
    }
    return Desync.anomaly(
        record, level, _message(record, splits, level), values,
        rank=suspects[0] if alone else None, module=first.fqn, kind="param",
    )  # fmt: skip


def _of_buffers(record: StepRecord, splits: list[_Split]) -> Anomaly:
    """Return what is told of buffers; nobody is named, as a majority may be what was never set."""
    first = splits[0]
    more = f" and of {len(splits) - 1} more" if len(splits) > 1 else ""
    message = (
        f"{_sides(first)} each hold other bits of this buffer{more}, which no step changes: "
        "if it is to be the same everywhere, it was not made or loaded on all ranks alike"
    )
    values = {
        "buffers": len(splits),
        "versions": len(first.sides),
        "ranks": sum(map(len, first.sides)),
    }
    return Desync.anomaly(record, "warn", message, values, module=first.fqn, kind="buffer")


def _sides(split: _Split) -> str:
    sides = " / ".join(ranks_text(side) for side in split.sides[:MOST_SIDES])
    return sides + (" / ..." if len(split.sides) > MOST_SIDES else "")


def _message(record: StepRecord, splits: list[_Split], level: str) -> str:
    first = splits[0]
    shard = f" (shard {first.shard})" if first.shard not in {"", UNWRAPPED} else ""
    more = f" and of {len(splits) - 1} more" if len(splits) > 1 else ""
    what = f"other bits of this parameter{shard}{more}"
    if first.decided:
        text = f"{ranks_text(first.suspects)} {_hold(first.suspects)} {what} than "
        text += f"{ranks_text(first.sides[0])}"
    else:
        text = f"{_sides(first)} each hold {what}; no majority, any may be wrong"
    if level == "warn":
        why = "" if is_held_back(record) else "DDP lost its hooks, or "
        return (
            f"{text}: the gradients of this step were not reduced ({why}no_sync up to the "
            "optimizer), so replicas part until something averages them; if this is no local SGD, "
            "it is a fault"
        )
    cure = f"resume from a checkpoint; look for what only one rank does{_unlike_rates(record)}"
    if first.shard == UNWRAPPED:
        cure += (
            ", and at how the script reduces gradients: the optimizers of all ranks get one "
            "gradient, so they are to be replicas"
        )
    return f"{text}: the replicas train apart from here on; {cure}"


def _unlike_rates(record: StepRecord) -> str:
    """Say that the learning rates of ranks are not the same; "" if they are."""
    said = record.scalars.items()
    rates = {rank: float(own[LEARNING_RATE]) for rank, own in said if LEARNING_RATE in own}
    if len(set(rates.values())) < 2:
        return ""
    low, high = min(rates, key=lambda r: rates[r]), max(rates, key=lambda r: rates[r])
    return (
        f" (the learning rate is {rates[low]:.3g} on rank {low} and {rates[high]:.3g} on rank "
        f"{high})"
    )


def _hold(ranks: tuple[int, ...]) -> str:
    return "holds" if len(ranks) == 1 else "hold"
