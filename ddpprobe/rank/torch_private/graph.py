"""The autograd graph of the backward that runs: where it entered, and who uses which leaf in it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ddpprobe.rank.torch_private import _lookup

_current_node = _lookup("torch._C", "_current_autograd_node")
_will_execute = _lookup("torch._C", "_will_engine_execute_node")


def current_node() -> Any:  # noqa: ANN401  (torch has no public type for all kinds of nodes)
    """Return the node of the graph for which the hook that asks was called; None outside of one.

    Degradation: None; on a step that is not sampled the nearest of several bad gradients is then
    told by the order in which they arrived.
    """
    return _current_node() if _current_node is not None else None


def leaves_gradients(leaves: Iterable[torch.Tensor]) -> bool:
    """Return whether the backward under way may make a gradient of any of these leaves.

    A `torch.autograd.grad` makes those only that it is asked for, and returns them.

    Degradation: True, as of a `backward()`.
    """
    if _will_execute is None:
        return True
    wanted = [leaf for leaf in leaves if leaf.requires_grad and leaf.is_leaf]
    nodes = (torch.autograd.graph.get_gradient_edge(leaf).node for leaf in wanted)
    try:
        return not wanted or any(_will_execute(node) for node in nodes)
    except RuntimeError:  # so torch answers if it is a leaf that autograd.grad was asked for
        return True


def returns_gradients(leaves: Iterable[torch.Tensor]) -> bool:
    """Return whether the backward under way is an `autograd.grad` of some of these leaves.

    It adds to no `.grad`: what is there is of an earlier backward.

    Degradation: False, as of a `backward()`.
    """
    if _will_execute is None:
        return False
    wanted = (leaf for leaf in leaves if leaf.requires_grad and leaf.is_leaf)
    nodes = (torch.autograd.graph.get_gradient_edge(leaf).node for leaf in wanted)
    try:
        any(_will_execute(node) for node in nodes)
    except RuntimeError:  # see above
        return True
    return False


def uses_of_leaves(nodes: Iterable[Any]) -> dict[int, set[int]]:
    """Return, by the id of each leaf tensor below `nodes`, the numbers of the nodes that use it.

    Numbers grow in the order of the forward, so a backward comes to the largest first. What a node
    keeps to itself (reentrant checkpointing) is not found. A pass over the graph: not for every
    step.

    Degradation: leaves without a number are left out.
    """
    found: dict[int, set[int]] = {}
    waiting = [node for node in nodes if node is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        for following, _ in node.next_functions:
            leaf = getattr(following, "variable", None)
            if isinstance(leaf, torch.Tensor):
                number = getattr(node, "_sequence_nr", lambda: None)()
                if number is not None:
                    found.setdefault(id(leaf), set()).add(number)
            elif following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return found


def self_test() -> dict[str, bool]:
    """Try them on two uses of one leaf; False: a name is gone or means something else."""
    nodes: list[Any] = []
    x, y = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    whole = (x * 2 + x * 3) * y
    whole.register_hook(lambda _: nodes.append(current_node()))
    whole.sum().backward()
    uses = uses_of_leaves(nodes)
    leaving: list[bool] = []
    returning: list[bool] = []
    z = x * y
    z.register_hook(lambda _: leaving.append(leaves_gradients([y])))
    z.register_hook(lambda _: returning.append(returns_gradients([y])))
    z.sum().backward(retain_graph=True)
    torch.autograd.grad(z.sum(), x, retain_graph=True)
    torch.autograd.grad(z.sum(), y)
    return {
        "leaves_gradients": leaving == [True, False, True],
        "returns_gradients": returning == [False, False, True],
        "current_node": nodes == [whole.grad_fn] and current_node() is None,
        "uses_of_leaves": len(uses[id(x)]) == 2 and max(uses[id(x)]) < min(uses[id(y)]),
    }
