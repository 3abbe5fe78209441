"""Which of several bad gradients is nearest to where a NaN began in the backward, if one can know.

A NaN goes on to all that lies before its origin in the forward, so of the parameters whose
gradients are bad the one that was used last is the nearest. The graph tells when each was used. A
parameter that is used more than once has one gradient for all of its uses, and the parameters of a
compiled region are used by one node: there the order is not always known, and then nobody is named.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, final

from torch import Tensor

from ddpprobe.rank.torch_private import graph


@final
class Nearness:
    """The uses of parameters in the graph of one backward.

    Args:
        entered: the nodes at which it came into the model.
        names: FQN of each parameter that is looked at, by its id.
    """

    def __init__(self, entered: Iterable[Any], names: Mapping[int, str]) -> None:
        found = graph.uses_of_leaves(entered)
        self._uses = {one: found[one] for one in names if one in found}
        self._last = {one: max(numbers) for one, numbers in self._uses.items()}
        self._names = names

    def nearest(self, bad: Sequence[tuple[str, Tensor]]) -> str | None:
        """Name the nearest of all parameters with a bad gradient, given in order of arrival."""
        ids = {id(parameter): fqn for fqn, parameter in bad}
        if len(ids) == 1 or not ids.keys() <= self._uses.keys():
            return bad[0][0]
        once = [one for one in ids if len(self._uses[one]) == 1]
        if not once:
            return bad[0][0] if self._have_one_owner(ids) else None
        best = max(once, key=self._last.__getitem__)
        return ids[best] if self._is_first(best, {*ids}) else None

    def is_nearest(self, parameter: Tensor) -> bool:
        """Whether none is nearer than the first parameter whose gradient has arrived bad."""
        mine = id(parameter)
        return mine not in self._uses or self._is_first(mine, {*self._uses})

    def _is_first(self, one: int, suspects: set[int]) -> bool:
        """Whether none of the suspects, which are or may be bad, may be nearer than `one`."""
        here = self._last[one]
        rivals = [
            other
            for other in suspects - {one}
            if self._last[other] == here
            or (self._last[other] > here and len(self._uses[other]) > 1)
        ]
        rivals = [other for other in rivals if not self._have_one_owner((one, other))]
        return not any(self._may_be_nearer(other, here, {one, *rivals}) for other in rivals)

    def _may_be_nearer(self, other: int, here: int, bad: set[int]) -> bool:
        """Whether nothing clean lies between: what comes into a later use goes on to all before."""
        between = range(here + 1, self._last[other])
        return not any(
            self._last[one] in between and len(uses) == 1
            for one, uses in self._uses.items()
            if one not in bad
        )

    def _have_one_owner(self, ids: Iterable[int]) -> bool:
        return len({self._names[one].rpartition(".")[0] for one in ids}) == 1
