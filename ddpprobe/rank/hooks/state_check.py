"""Is what a step leaves behind finite: parameters, buffers, and the optimizer's state?

Looked at once after the optimizer on each sampled step. A fault that is born there shows in the
next forward, where every module looks guilty: so when a forward goes bad, the parameters are looked
at then and there, and if they were bad before it, the step before is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.optim import Optimizer

from ddpprobe.rank import torch_private
from ddpprobe.rank.hooks import lanes
from ddpprobe.rank.hooks.state_look import BadTensor, Look, Looker, is_finite
from ddpprobe.rank.topology.describe import Topology
from ddpprobe.rank.topology.outliving import Inventory, Key, outliving, parameters_of
from ddpprobe.rank.torch_private import sharding
from ddpprobe.records.step import FirstBad


@dataclass(frozen=True, slots=True)
class Looks:
    """The looks of one sampled step, which may still be on their way to the host.

    `before`: at the parameters, before the forward; only where the step before was not looked at
    and the host cannot look when it must. `after`: at everything, after the optimizer; None if
    the step never came so far. `last` are the step and micro-batch that ended before it.
    """

    check: StateCheck
    step: int
    micro: int
    last: tuple[int, int]
    before: Look | None
    after: Look | None

    def ready(self) -> bool:
        """Whether all has arrived; never waits."""
        return all(look.ready() for look in (self.before, self.after) if look is not None)

    def wait(self) -> None:
        """Wait for it: only at the end of a run."""
        for look in (self.before, self.after):
            if look is not None:
                look.wait()

    def origin(self, seen: FirstBad | None) -> FirstBad | None:
        """Return the earliest evidence of the step; `seen`: what else there is."""
        return self.check.judge(self, seen)


@final
class StateCheck:
    """Finds what is non-finite after a step, and tells each tensor once.

    An infinity without a NaN that a buffer or a frozen parameter had when it was first looked at (a
    mask) is how it is meant to be: that name may have infinities from then on.

    Args:
        topology: the model.
        optimizers: those that own some of its parameters.
        rank: this rank.
    """

    def __init__(
        self, topology: Topology, optimizers: Callable[[], Iterable[Optimizer]], rank: int
    ) -> None:
        self._topology = topology
        self._rank = rank
        self._everything = _Sight(
            Inventory(topology, optimizers, lambda: outliving(topology, optimizers()))
        )
        self._parameters = _Sight(Inventory(topology, tuple, lambda: parameters_of(topology)))
        self._first: Look | None = None  # not judged yet
        self._begun = False
        self._known: frozenset[Key] = frozenset()  # looked at before
        self._learnt: tuple[Key, ...] | None = None  # of the last look
        self._steady: set[Key] = set()
        self._came: set[Key] = set()  # bad before the first step
        self._told: dict[Key, FirstBad] = {}
        self._harmless: set[Key] = set()  # bad, and a forward since then was fine
        self._last = (-1, 0)  # step and micro-batch of the step that ended last
        self._checked = False  # it was looked at then
        self._before: Look | None = None
        self._guilty: Key | None = None  # what `explain` has named

    def begin(self, *, sampled: bool) -> None:
        """At the first training forward of a step."""
        self._before = None
        if not self._begun:
            self._begun = True
            self._first = self._everything.look()
            self._learn(self._first)
        elif lanes.is_near(self._topology.device):
            self._forget_mended()
        elif sampled and not self._checked:
            self._before = self._parameters.look()

    def _forget_mended(self) -> None:
        """Forget which parameters were bad if none is: the script went back to other weights."""
        told = [key for key in self._told.keys() - self._harmless if key[0] == "param"]
        if not told or torch_private.in_functorch():
            return
        there = self._parameters.tensors()
        # The first that is still bad ends it: after a fault that stays this is all of its cost.
        if all(is_finite(there[key]) for key in told if key in there):
            for key in told:
                del self._told[key]

    def end(self, step: int, micro: int, seen: FirstBad | None) -> None:
        """At the end of a step that is not looked at; `seen`: what the watch saw in it."""
        self._last, self._checked = (step, micro), False
        if self._told and lanes.is_near(self._topology.device) and _is_fine(seen, step):
            self._harmless.update(self._told)

    def look(self, step: int, micro: int, *, over: bool) -> Looks:
        """At the end of a sampled step; `over`: the optimizer is done."""
        after = self._everything.look() if over else None
        last, self._last, self._checked = self._last, (step, micro), over
        return Looks(self, step, micro, last, self._before, after)

    def left(self) -> FirstBad | None:
        """At the end of a run, between steps: what the last one left behind, if nobody looked."""
        step, micro = self._last
        if self._checked or step < 0 or torch_private.in_functorch():
            return None
        if any(sharding.has_weights_of_another(ddp) for _, ddp in self._topology.ddps):
            return None
        looks = self.look(step, micro, over=True)
        looks.wait()
        return looks.origin(None)

    def explain(self, step: int, micro: int) -> FirstBad | None:
        """When a forward went bad: was a parameter so before it? None: no, or nobody can say.

        `micro`: its micro-batch if those before it in the step were fine, else 0.
        """
        if torch_private.in_functorch() or not lanes.is_near(self._topology.device):
            return None
        guilty = self._guilty
        if guilty in self._told and guilty not in self._harmless:
            known = self._parameters.tensors().get(guilty)  # as in each step from then on
            if known is not None and not is_finite(known):
                return self._told[guilty]
        blamed = self._blame(self._parameters.look().bad(), step, self._last, micro)
        self._guilty = ("param", blamed.fqn or "", "") if blamed is not None else None
        return blamed

    def judge(self, looks: Looks, seen: FirstBad | None) -> FirstBad | None:
        """Return the earliest evidence of a sampled step whose looks have arrived."""
        self._settle()
        fine = _is_fine(seen, looks.step)
        earlier = None
        if looks.before is not None:
            earlier = self._blame(looks.before.bad(), looks.step, looks.last)
        elif seen and not (fine or seen.micro or lanes.is_near(self._topology.device)):
            # The step's first forward was bad at once; else all parameters were fine before it.
            earlier = min(self._blaming(), key=lambda bad: bad.place, default=None)
        if fine and earlier is None:
            self._harmless.update(self._told)
        found = [bad for bad in (earlier, seen) if bad is not None]
        if looks.after is not None:
            born = self._born(looks)
            found += [born] if born is not None else []
        return min(found, key=lambda bad: bad.place, default=None)

    def _born(self, looks: Looks) -> FirstBad | None:
        """Tell what is bad after a step and was not told; forget what is finite again."""
        assert looks.after is not None  # noqa: S101  (the caller has asked)
        self._learn(looks.after)
        bad = {one.key: one for one in looks.after.bad() if not self._is_meant(one)}
        for key in self._told.keys() - bad.keys():
            del self._told[key]
            self._harmless.discard(key)
        self._came &= bad.keys()
        new = [one for key, one in bad.items() if key not in self._told]
        for place, one in enumerate(new):
            came = one.key in self._came
            phase, order = ("forward", -1) if came else ("step", place)
            micro = 0 if came else looks.micro
            self._told[one.key] = self._witness(one, looks.step, micro, phase, order)
        return min((self._told[one.key] for one in new), key=lambda b: b.place, default=None)

    def _blame(
        self, bad: Sequence[BadTensor], step: int, before: tuple[int, int], micro: int = 0
    ) -> FirstBad | None:
        """Return the parameter that was bad before a forward of `step`, as of its own step.

        That is `step` itself where the forwards before `micro` were fine.
        """
        self._settle()
        last, last_micro = before
        guilty = []
        for place, one in enumerate(bad):
            if self._is_meant(one) or one.key in self._harmless:
                continue
            if one.key not in self._told:
                came = one.key in self._came
                here = came or micro > 0 or last < 0
                now = (step, 0 if came else micro, "forward", -1)
                told = now if here else (last, last_micro, "step", place)
                self._told[one.key] = self._witness(one, *told)
            guilty.append(self._told[one.key])
        return min(guilty, key=lambda found: found.place, default=None)

    def may_be_mask(self, fqn: str) -> bool:
        """Whether a buffer has infinities that are meant; True as long as nobody knows."""
        self._settle()
        key = ("buffer", fqn, "")
        return self._first is not None or key in self._steady or key not in self._known

    def _blaming(self) -> Iterable[FirstBad]:
        return (
            found
            for key, found in self._told.items()
            if key[0] == "param" and key not in self._harmless
        )

    def _settle(self) -> None:
        """Take in the first look of all once it has arrived."""
        if self._first is None or not self._first.ready():
            return
        first, self._first = self._first, None
        for one in first.bad():
            meant = one.infinite and self._is_fixed(one.key)
            (self._steady if meant else self._came).add(one.key)

    def _learn(self, look: Look) -> None:
        """Remember what was looked at; a buffer may appear, and be a mask, at any time."""
        if look.keys is self._learnt:
            return
        self._learnt = look.keys
        new = frozenset(look.keys) - self._known
        if new and look is not self._first:
            self._steady |= {
                one.key
                for one in look.bad()
                if one.infinite and one.key in new and one.key[0] == "buffer"
            }
        self._known |= new

    def _is_fixed(self, key: Key) -> bool:
        """Whether nobody trains it: an infinity in there may be meant."""
        kind, fqn, _ = key
        return kind == "buffer" or (
            kind == "param"
            and any(
                name == fqn and not parameter.requires_grad
                for name, parameter in self._topology.named_parameters()
            )
        )

    def _is_meant(self, one: BadTensor) -> bool:
        return one.infinite and one.key in self._steady

    def _witness(self, one: BadTensor, step: int, micro: int, phase: str, order: int) -> FirstBad:
        kind, fqn, leaf = one.key
        nan, pos_inf, neg_inf, numel = one.counts
        return FirstBad(
            step=step, micro=max(micro, 0), phase=phase, order=order, rank=self._rank, fqn=fqn,
            kind=kind, leaf=leaf, nan=nan, pos_inf=pos_inf, neg_inf=neg_inf, numel=numel,
        )  # fmt: skip


@final
class _Sight:
    """Looks at what an inventory lists."""

    def __init__(self, inventory: Inventory) -> None:
        self._inventory, self._looker = inventory, Looker()

    def look(self) -> Look:
        with torch.no_grad():
            return self._looker.look(*self._inventory.take())

    def tensors(self) -> dict[Key, Tensor]:
        """Return what is listed, by its key."""
        with torch.no_grad():
            return dict(zip(*self._inventory.take(), strict=True))


def _is_fine(seen: FirstBad | None, step: int) -> bool:
    """Whether nothing bad was seen in the forward of a step."""
    return seen is None or (seen.step == step and seen.phase != "forward")
