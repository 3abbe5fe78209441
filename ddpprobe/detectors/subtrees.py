"""Names for a part of a model: the largest modules that lie in it as a whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

MOST_NAMED = 4  # modules in a message


def subtrees(part: Iterable[str], rest: Iterable[str]) -> list[str]:
    """Return the largest modules that hold names of `part` and none of `rest`, in their order.

    A name of `part` that is also in `rest`, or around a name of it, stands for itself.
    """
    return list(by_subtree(part, rest))


def by_subtree(part: Iterable[str], rest: Iterable[str]) -> dict[str, list[str]]:
    """Return the modules of `subtrees`, each with the names of `part` that lie in it."""
    taken = {prefix for name in rest for prefix in _prefixes(name)}
    found: dict[str, list[str]] = {}
    for name in part:
        found.setdefault(next((p for p in _prefixes(name) if p not in taken), name), []).append(
            name
        )
    return found


def nearest_loss(parts: Mapping[str, Sequence[str]]) -> str:
    """Return the one of `by_subtree` that holds most names, of equals the last.

    Where no gradient arrives any more, that is the part to look behind: what comes before it gets
    none because of it, as the norm in front of an attention whose output is detached.
    """
    return max(reversed(list(parts)), key=lambda name: len(parts[name]))


def common_module(names: Iterable[str]) -> str:
    """Return the deepest module path that all names lie in; "" is the root."""
    first, *rest = (name.split(".") for name in names)
    for other in rest:
        same = zip(first, other, strict=False)
        first = first[: next((i for i, (a, b) in enumerate(same) if a != b), len(other))]
    return ".".join(first)


def without_indices(fqn: str) -> str:
    """Return a name that is the same for layers, or experts, that are numbered."""
    return ".".join("*" if part.isdecimal() else part for part in fqn.split("."))


def named_alike(fqns: Sequence[str], those: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which names [n] are, but for their indices, that of one of `those`."""
    kinds = np.array([without_indices(fqn) for fqn in fqns], np.str_)
    return np.isin(kinds, kinds[those])


def and_also(names: list[str]) -> str:
    """Return what a message says of others, after the one that it is about."""
    return f"; also {named(names)}" if names else ""


def named(modules: list[str]) -> str:
    """Return modules as prose names them."""
    names = ", ".join(name or "the whole model" for name in modules[:MOST_NAMED])
    more = len(modules) - MOST_NAMED
    return f"{names} and {more} more" if more > 0 else names


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:n]) for n in range(len(parts) + 1)]


def replaced(gone: Sequence[str], fresh: Iterable[str]) -> NDArray[np.bool_]:
    """Return which of some parameters [gone] one of those that are new stands in place of.

    It lies in the same module: pruning makes `weight_orig` of `weight`, a weight norm `weight_g`
    and `weight_v`, and a parametrization `parametrizations.weight.original`. Or it has the same
    name in a module within that: one that was wrapped where it is, as nets are that grow.
    """
    new = list(fresh)
    modules, within = {_owner(fqn) for fqn in new}, set[str]()
    for fqn in new:
        module, _, name = f".{fqn}".rpartition(".")
        while module:
            module = module.rpartition(".")[0]
            within.add(f"{module}.{name}")
    return np.array([_owner(fqn) in modules or f".{fqn}" in within for fqn in gone], bool)


def _owner(parameter: str) -> str:
    module, _, rest = f".{parameter}".partition(".parametrizations.")
    return module if rest else module.rpartition(".")[0]
