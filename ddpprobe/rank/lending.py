"""The first passes of a step whose gradients no optimizer of this model takes: they were *lent*.

Where several models are trained in one process, another model's step may run this model, too: a
generator learns through the discriminator. The gradients which that leaves here are thrown away
before this model's own pass, and so is what was counted of it.
"""

from __future__ import annotations

from typing import final

from ddpprobe.rank.anchors import Anchors
from ddpprobe.rank.owners import Owners
from ddpprobe.rank.topology.describe import Topology
from ddpprobe.rank.torch_private import dynamo, graph

PATIENCE = 64  # passes for which an optimizer that has not stepped yet is waited for
_LOOKS = 2  # for one: the first gradients may vanish before it is made


@final
class Lending:
    """Learns from the backwards of a step which of its passes were lent.

    Attributes:
        anchors: see there.
        has_left: the backwards of this step have left the anchors gradients.
    """

    def __init__(self, topology: Topology, owners: Owners) -> None:
        self.anchors = Anchors(topology)
        self.has_left = False
        self._topology, self._owners = topology, owners
        self._lent = 0  # forwards of the step, the first ones
        self._through = 0  # training forwards before the last backward that no optimizer called
        self._others_stepped = False  # since that backward
        self._leaves_none = False  # the backward under way, see `_goes_by`
        self._looks = _LOOKS
        self._to_come = False  # an optimizer of torch has yet to step this model

    def begin_step(self) -> None:
        """Begin a step, of which nothing is known."""
        self._lent, self._through, self.has_left = 0, 0, False

    def another_steps(self) -> None:
        """Hear that an optimizer of something else has stepped, perhaps by these gradients.

        Until one of torch's has stepped this model, only that of another model of ours counts.
        """
        self._others_stepped = True

    def is_further(self, micro: int) -> bool:
        """Whether the backward that begins is a further one of the same forward."""
        return self._through > micro

    def backward_begins(self) -> None:
        """Hear of a backward that has come into the model."""
        self._leaves_none = self._goes_by()

    def backward_over(self, forwards: int, *, in_a_step: bool) -> None:
        """Hear that it is over.

        Args:
            forwards: of the step so far.
            in_a_step: an optimizer's `step` has called it.
        """
        self.anchors.drop()
        self.has_left |= not (self._leaves_none or self.anchors.vanished())
        if not (in_a_step or self._leaves_none):
            self._through, self._others_stepped = forwards, False

    def throws_away(self) -> bool:
        """Whether the loop throws away gradients that no torch optimizer of this model took.

        An optimizer that is none of torch's may have taken them, or one of master weights, unless
        one of torch's owns some of this model, or another model of ours has just been stepped.
        """
        return self._owners.any or self._others_stepped or self._is_to_come()

    def was_thrown_away(self) -> bool:
        """Whether what came so far is lent: a `zero_grad` followed, and no step of this model's."""
        return self.has_left and self.anchors.vanished() and self._may_lend()

    def was_frozen(self) -> bool:
        """Whether a backward went through this model while none of its weights was to learn.

        A loop that trains another model through it may set `requires_grad` to False for that time.
        """
        if any(p.requires_grad for p in self.anchors.living()):
            return False
        learns = any(p.requires_grad for _, p in self._topology.named_parameters())
        return not learns and self._may_lend()

    def is_left_over(self) -> bool:
        """At the end of the run: whether what no optimizer of this model took was for another's.

        Another optimizer has stepped since, or the gradients are gone. While the run goes on, one
        of this model's may yet take them.
        """
        gone = self.has_left and self.anchors.vanished()
        return (self._others_stepped or gone) and self._may_lend()

    def lend(self) -> int:
        """Count out what came so far; returns how many forwards of the step that are."""
        self._lent, self.has_left = self._through, False
        return self._lent

    def _may_lend(self) -> bool:
        """Whether there are forwards whose gradients may have been another model's."""
        if self._owners.some_stepped:
            return False
        return self._through > self._lent and self.throws_away()

    def _is_to_come(self) -> bool:
        """Whether an optimizer of torch has parameters of this model, and was not seen to step yet.

        What the weights do does not tell: SAM moves them by gradients that it throws away, and no
        version counts what a step by hand does to `.data`. A loop that steps by hand may keep an
        optimizer for its learning rates, so one that does not step is not waited for for ever.
        """
        if self._through > PATIENCE or dynamo.some_is_unheard():
            self._looks, self._to_come = 0, False
        elif self._looks and not self._to_come:
            self._looks -= 1
            self._to_come = self._owners.are_to_come()
        return self._to_come

    def _goes_by(self) -> bool:
        """Whether the backward under way leaves older gradients as they are: a penalty's, say.

        Its `autograd.grad` goes through the model before the loop throws those of the step before
        away, which are then none of the forwards up to here.
        """
        if not self.anchors.dropped or self.anchors.vanished():
            return False
        return not graph.leaves_gradients(self.anchors.living())
