"""Names of modules as the unwrapped model would give them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.parallel import DistributedDataParallel

_PREFIXES = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")


def inner(module: nn.Module) -> nn.Module | None:
    """What a wrapper wraps; None if `module` is no wrapper."""
    if isinstance(module, DistributedDataParallel):
        wrapped: nn.Module = module.module
        return wrapped
    return next((child for name, child in module.named_children() if name in _PREFIXES), None)


def walk(root: nn.Module, outer: nn.Module | None = None) -> Iterator[tuple[str, nn.Module]]:
    """Yield (FQN, module) of everything in `root`, parents first, each once.

    A wrapper has the FQN of what it wraps and comes before it. `outer` is where to begin, if other
    wrappers are around `root`.
    """
    stack: list[tuple[str, nn.Module]] = [("", outer if outer is not None else root)]
    seen: set[int] = set()
    while stack:
        fqn, module = stack.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield fqn, module
        wrapped = inner(module)
        if wrapped is not None:
            stack.append((fqn, wrapped))
            continue
        prefix = f"{fqn}." if fqn else ""
        children = [(f"{prefix}{name}", child) for name, child in module.named_children()]
        stack.extend(reversed(children))


def held(root: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """Yield (FQN, module, name in it, parameter) below `root`; a tied one at each of its places."""
    for path, module in walk(root):
        for name, parameter in module.named_parameters(recurse=False):
            yield f"{path}.{name}" if path else name, module, name, parameter


def clean(name: str) -> str:
    """Remove wrapper components from a dotted name: the FQN the unwrapped model would give."""
    return ".".join(part for part in name.split(".") if part not in _PREFIXES)
