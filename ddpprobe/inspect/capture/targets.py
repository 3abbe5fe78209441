"""Which modules a capture watches, and what they are called."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from ddpprobe.rank import torch_private
from ddpprobe.rank.topology.naming import clean, inner, walk

Selector = str | nn.Module | type[nn.Module]


@dataclass(frozen=True, slots=True)
class Targets:
    """The chosen modules of one rank.

    Attributes:
        root: the user's model, without a DDP or torch.compile wrapper around it.
        modules: FQN without wrapper prefixes -> module, parents first, each module once.
        aliases: further FQNs of shared modules -> the name under which they are captured.
        known: every FQN of the model, for messages.
        unmatched: selectors that match nothing here (other ranks may have them), as written.
        compiled: FQNs of chosen modules inside a graph of torch.compile, where hooks are lost.
    """

    root: nn.Module
    modules: dict[str, nn.Module]
    aliases: dict[str, str]
    known: tuple[str, ...]
    unmatched: tuple[str, ...]
    compiled: tuple[str, ...]


def choose(
    model: nn.Module,
    selectors: Sequence[Selector],
    exclude: Sequence[Selector],
    *,
    paramless: bool,
) -> Targets:
    """Return the modules that `selectors` choose, less those of `exclude`.

    Args:
        model: plain or wrapped (DDP, FSDP, checkpoint wrappers, torch.compile).
        selectors: globs over FQNs, module objects, or classes of modules; none: every module.
        exclude: the same.
        paramless: whether modules without parameters of their own are taken, too.
    """
    root = unwrap(model)
    named, aliases = name_modules(root)
    names = {name: [name] for name in named}
    for alias, name in aliases.items():
        names[name].append(alias)
    wanted = selectors or ("*",)
    chosen = {
        name: module
        for name, module in named.items()
        if any(_chooses(s, names[name], module) for s in wanted)
        and not any(_chooses(s, names[name], module) for s in exclude)
        and (paramless or next(module.parameters(recurse=False), None) is not None)
        # A list of modules is never called; who names it is told so.
        and (type(module).forward is not nn.Module.forward or {name, module} & {*wanted})
    }
    unmatched = tuple(
        describe(s)
        for s in (*wanted, *exclude)
        if not any(_chooses(s, names[name], module) for name, module in named.items())
    )
    compiled = tuple(_compiled(model, chosen))
    return Targets(root, chosen, aliases, (*named, *aliases), unmatched, compiled)


def unwrap(model: nn.Module) -> nn.Module:
    """Return the user's module inside whatever wrappers are around it."""
    while (wrapped := inner(model)) is not None:
        model = wrapped
    return model


def name_modules(root: nn.Module) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """Return FQN -> module, each once and wrappers left out, and alias -> FQN of shared ones."""
    named = {fqn: module for fqn, module in walk(root) if inner(module) is None}
    first = {id(module): fqn for fqn, module in named.items()}
    every = ((clean(name), m) for name, m in root.named_modules(remove_duplicate=False))
    aliases = {n: first[id(m)] for n, m in every if id(m) in first and n not in named}
    return named, aliases


def close_names(name: str, known: Sequence[str], count: int = 4) -> str:
    """Return a few names of `known` that resemble `name`, for a message."""
    close = difflib.get_close_matches(name, known, n=count, cutoff=0.4)
    parts = set(name.strip("'").split("."))
    close += [k for k in known if k not in close and parts & set(k.split("."))]
    return ", ".join(repr(k) for k in (close or list(known))[:count])


def describe(selector: Selector) -> str:
    """Return how a user would write the selector."""
    if isinstance(selector, str):
        return repr(selector)
    return (
        selector.__name__ if isinstance(selector, type) else f"the given {type(selector).__name__}"
    )


def _compiled(model: nn.Module, chosen: dict[str, nn.Module]) -> Iterator[str]:
    inside: set[int] = set()
    for module in model.modules():
        if torch_private.is_compiled(module):
            inside.update(id(m) for m in module.modules())
    yield from (name for name, module in chosen.items() if id(module) in inside)


def _chooses(selector: Selector, names: Sequence[str], module: nn.Module) -> bool:
    if isinstance(selector, str):
        return selector in names or any(fnmatch.fnmatchcase(name, selector) for name in names)
    if isinstance(selector, type):
        return isinstance(module, selector)
    return isinstance(selector, nn.Module) and unwrap(selector) is module
