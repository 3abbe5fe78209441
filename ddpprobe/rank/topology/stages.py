"""Do the ranks hold the same model, or is each a stage of one (pipeline)?

Ranks whose modules of one name are one and the same module merge; the rest must not. So the ranks
compare at `install` what their modules are made of and, where no wrapper vouches for it, what
values their parameters have: two stages that are both called "0" differ in that.

A model that was whole then may be cut into stages before its first forward, where ranks can no
longer ask each other. What each of them lost or renamed in between says it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch import distributed as dist

from ddpprobe.rank.stats.checksum import checksum
from ddpprobe.rank.topology.describe import Topology
from ddpprobe.rank.topology.placement import is_dtensor, ranks_of

Parts = dict[str, list[str]]  # module FQN -> [digest of its structure, digest of its values]


def parts(topology: Topology) -> Parts:
    """Digest every module with all below it. Reads all plain parameters once."""
    lines: dict[str, tuple[str, str]] = {}
    for fqn, module in topology.named_modules():
        own = [] if topology.world_size == 1 else list(_values(module, topology))
        lines[fqn] = type(module).__qualname__, " ".join(own)
    kinds: dict[str, list[str]] = {fqn: [] for fqn in lines}
    values: dict[str, list[str]] = {fqn: [] for fqn in lines}
    for fqn, (kind, value) in lines.items():
        path = fqn
        while True:
            if path in kinds:
                kinds[path].append(f"{fqn} {kind}")
                values[path].append(f"{fqn} {value}")
            if not path:
                break
            path = path.rpartition(".")[0]
    made: Parts = {}
    for fqn in lines:  # parents first
        anonymous = fqn and all(line.endswith(" ") for line in values[fqn])
        # Without parameters nothing tells one ReLU from another but what it is part of.
        parent = fqn.rpartition(".")[0] if anonymous else fqn
        made[fqn] = made[parent] if parent in made else [_digest(kinds[fqn]), _digest(values[fqn])]
    return made


def compare(heard: Sequence[Mapping[str, Sequence[str]]]) -> dict[str, Any]:
    """Tell from the parts of all ranks which modules are not the same everywhere they are.

    Returns `cut`, FQNs whose structure differs, and `differ`, further ones whose values do.
    """
    seen: dict[str, tuple[set[str], set[str]]] = {}
    for part in heard:
        for fqn, (structure, value) in part.items():
            structures, values = seen.setdefault(fqn, (set(), set()))
            structures.add(structure)
            values.add(value)
    cut = [fqn for fqn, (structures, _) in seen.items() if len(structures) > 1]
    differ = [fqn for fqn, (s, v) in seen.items() if len(s) == 1 and len(v) > 1]
    return {"cut": cut, "differ": differ}


@final
class Names:
    """The modules of a model as `install` found it: what is cut off later is missed here.

    Args:
        topology: the model; nothing in it is kept alive.
    """

    def __init__(self, topology: Topology) -> None:
        self._fqns = frozenset(fqn for fqn, _ in topology.named_modules())
        self._of = WeakKeyDictionary((module, fqn) for fqn, module in topology.named_modules())

    def cut(self, topology: Topology) -> frozenset[str]:
        """Return the FQNs of modules that have lost others since, or had another FQN.

        Nobody but this rank is asked, so something removed alike on all ranks is taken for a cut,
        unless a DDP over all of them has compared their parameters.
        """
        group = topology.ddp.process_group if topology.ddp is not None else None
        world_size = topology.world_size
        if world_size == 1 or (group and dist.get_world_size(group) == world_size):
            return frozenset()
        modules = dict(topology.named_modules())
        cut = {fqn for fqn, m in modules.items() if self._of.get(m, fqn) != fqn}
        for lost in self._fqns - modules.keys():
            cut.update(lost[:end] for end in _ends(lost))
        for fqn, module in modules.items():  # parents first
            # As in `parts`: without parameters it is told by what it is part of.
            if fqn and fqn.rpartition(".")[0] in cut and next(module.parameters(), None) is None:
                cut.add(fqn)
        return frozenset(cut & modules.keys())


def _ends(fqn: str) -> Iterator[int]:
    """Lengths of the FQNs of what contains `fqn`, the root's (0) last."""
    end = len(fqn)
    while end > 0:
        end = max(fqn.rfind(".", 0, end), 0)
        yield end


def _values(module: nn.Module, topology: Topology) -> Iterable[str]:
    """One word per parameter of the module itself: what makes it the same on two ranks."""
    for name, parameter in module.named_parameters(recurse=False):
        if is_dtensor(parameter):
            ranks = list(ranks_of(parameter.device_mesh))
            yield f"{name} {tuple(parameter.shape)}" + (f" {ranks}" if not topology.ddps else "")
        elif topology.flat or topology.tensor_meshes or not _is_readable(parameter):
            yield name
        else:
            out = torch.zeros((), dtype=torch.int64, device=parameter.device)
            checksum(parameter, out)
            yield f"{name} {tuple(parameter.shape)} {int(out)}"


def _is_readable(parameter: Tensor) -> bool:
    return type(parameter) in (Tensor, nn.Parameter) and not parameter.is_meta


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode(errors="surrogatepass")).hexdigest()[:16]
