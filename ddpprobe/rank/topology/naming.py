"""Names of modules as the unwrapped model would give them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpprobe.rank.torch_private import dictionaries, is_a

_PREFIXES = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")


def inner(module: nn.Module) -> nn.Module | None:
    """What a wrapper wraps; None if `module` is no wrapper."""
    if isinstance(module, DistributedDataParallel):
        wrapped: nn.Module = module.module
        return wrapped
    for name, child in dictionaries(module)[2].items():
        if name in _PREFIXES and child is not None:
            return child
    return None


def walk(root: nn.Module, outer: nn.Module | None = None) -> Iterator[tuple[str, nn.Module]]:
    """Yield (FQN, module) of everything in `root`, parents first, each once.

    A wrapper has the FQN of what it wraps and comes before it. `outer` is where to begin, if other
    wrappers are around `root`. It is walked at every sampled step, so it reads torch's own
    dictionaries: the public iterators cost five times as much.
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
        children = dictionaries(module)[2]
        stack += [(prefix + n, c) for n, c in reversed(children.items()) if c is not None]


def held(
    walked: Iterable[tuple[str, nn.Module]],
) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """Yield (FQN, module, name in it, parameter) of modules; a tied one at each of its places."""
    for path, module in walked:
        for name, parameter in dictionaries(module)[0].items():
            if parameter is not None:
                yield f"{path}.{name}" if path else name, module, name, parameter


def clean(name: str) -> str:
    """Remove wrapper components from a dotted name: the FQN the unwrapped model would give."""
    return ".".join(part for part in name.split(".") if part not in _PREFIXES)


def own_class(module: nn.Module) -> type[nn.Module]:
    """Return the class as the user wrote it: `fully_shard` puts one of its own in front."""
    kind = type(module)
    if is_a(module, "torch.distributed.fsdp", "FSDPModule"):
        own: type[nn.Module] = kind.__mro__[2]
        return own
    return kind
