"""Do the ranks hold the same model, or is each a stage of one (pipeline)?

Ranks whose modules of one name are one and the same module merge; the rest must not. So the ranks
compare at `install` what their modules are made of and, where no wrapper vouches for it, what
values their parameters have: two stages that are both called "0" differ in that.

A model that was whole then may be cut into stages before its first forward, where ranks can no
longer ask each other. What each of them lost or renamed in between says it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch import distributed as dist

from ddpprobe.rank.stats.checksum import checksum
from ddpprobe.rank.topology.describe import Topology
from ddpprobe.rank.topology.placement import is_dtensor, ranks_of

# module FQN -> [digest of its structure, digest of its values], and a third, `BLANK`, where all of
# its parameters are uniform: the gain of a norm (ones) is equal in all norms of its size.
Parts = dict[str, list[str]]
BLANK = "blank"


def parts(topology: Topology) -> Parts:
    """Digest every module with all below it. Reads all plain parameters once."""
    lines: dict[str, tuple[str, str]] = {}
    distinct: set[str] = set()  # FQNs that hold a parameter which is no other's, also below them
    for fqn, module in topology.named_modules():
        own = [] if topology.world_size == 1 else list(_values(module, topology))
        lines[fqn] = type(module).__qualname__, " ".join(word for word, _ in own)
        if not all(is_uniform for _, is_uniform in own):
            distinct.update(_ancestry(fqn))
    kinds: dict[str, list[str]] = {fqn: [] for fqn in lines}
    values: dict[str, list[str]] = {fqn: [] for fqn in lines}
    for fqn, (kind, value) in lines.items():
        for path in _ancestry(fqn):
            if path in kinds:
                kinds[path].append(f"{fqn} {kind}")
                values[path].append(f"{fqn} {value}")
    made: Parts = {}
    for fqn in lines:  # parents first
        anonymous = fqn and all(line.endswith(" ") for line in values[fqn])
        # Without parameters nothing tells one ReLU from another but what it is part of.
        parent = fqn.rpartition(".")[0] if anonymous else fqn
        if parent in made:
            made[fqn] = made[parent]
        else:
            blank = [] if fqn in distinct or not fqn else [BLANK]
            made[fqn] = [_digest(kinds[fqn]), _digest(values[fqn]), *blank]
    return made


def compare(heard: Sequence[Mapping[str, Sequence[str]]]) -> dict[str, Any]:
    """Tell from the parts of all ranks which modules are not the same everywhere they are.

    Returns `cut`, FQNs whose structure differs, and `differ`, further ones whose values do.
    """
    seen: dict[str, tuple[set[str], set[str]]] = {}
    blank: set[str] = set()
    ranks: dict[str, list[int]] = {}
    for rank, part in enumerate(heard):
        for fqn, (structure, value, *more) in part.items():
            structures, values = seen.setdefault(fqn, (set(), set()))
            structures.add(structure)
            values.add(value)
            ranks.setdefault(fqn, []).append(rank)
            blank.update([fqn] if more else [])
    cut = [fqn for fqn, (structures, _) in seen.items() if len(structures) > 1]
    differ = {fqn for fqn, (s, v) in seen.items() if len(s) == 1 and len(v) > 1}
    others = differ.union(cut)
    if others:
        relatives = _Relatives({fqn: at for fqn, at in ranks.items() if fqn not in blank}, others)
        differ |= {f for f in blank - others if not relatives.are_alike(f, ranks[f])}
    return {"cut": cut, "differ": [fqn for fqn in seen if fqn in differ]}


@final
class _Relatives:
    """What is known of the modules around one whose own values tell nothing.

    Stages of a pipeline that are called alike have norms called alike, and so have experts, each
    rank some of them, beside what all ranks share. So its siblings tell: the ranks that have it
    have some in common that are one module (experts), or none of these (stages). Else their
    parent's siblings do, and so on.

    Args:
        ranks: by FQN, those that have a module; of modules whose values tell something.
        others: FQNs of those that are not the same module everywhere.
    """

    def __init__(self, ranks: Mapping[str, list[int]], others: Collection[str]) -> None:
        self._ranks, self._others = ranks, others
        self._children: dict[str, list[str]] = {}
        for fqn in ranks:
            if fqn:
                self._children.setdefault(fqn.rpartition(".")[0], []).append(fqn)

    def are_alike(self, fqn: str, ranks: list[int]) -> bool:
        """Whether the module of an FQN is the same one on these ranks, all that have it."""
        path = fqn
        while path:
            parent = path.rpartition(".")[0]
            if parent in self._ranks and parent not in self._others:
                return True  # the whole of it is one module
            siblings = [
                each not in self._others
                for each in self._children.get(parent, ())
                if each != path and self._ranks[each] == ranks
            ]
            if siblings:
                return any(siblings)
            path = parent
        return False


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
            cut.update(_ancestry(lost.rpartition(".")[0]))
        for fqn, module in modules.items():  # parents first
            # As in `parts`: without parameters it is told by what it is part of.
            if fqn and fqn.rpartition(".")[0] in cut and next(module.parameters(), None) is None:
                cut.add(fqn)
        return frozenset(cut & modules.keys())


def _ancestry(fqn: str) -> Iterator[str]:
    """Yield an FQN and those of all that contains it, the root's ("") last."""
    while fqn:
        yield fqn
        fqn = fqn.rpartition(".")[0]
    yield ""


def _values(module: nn.Module, topology: Topology) -> Iterable[tuple[str, bool]]:
    """Yield of each parameter of the module itself what makes it the same on two ranks.

    And whether it is known that all its elements are equal.
    """
    for name, parameter in module.named_parameters(recurse=False):
        if is_dtensor(parameter):
            ranks = list(ranks_of(parameter.device_mesh))
            more = f" {ranks}" if not topology.ddps else ""
            yield f"{name} {tuple(parameter.shape)}{more}", False
        elif topology.flat or topology.tensor_meshes or not _is_readable(parameter):
            yield name, False
        else:
            out = torch.zeros((), dtype=torch.int64, device=parameter.device)
            checksum(parameter, out)
            yield f"{name} {tuple(parameter.shape)} {int(out)}", _is_uniform(parameter)


def _is_uniform(parameter: Tensor) -> bool:
    flat = parameter.detach().flatten()
    # Most are not, which two elements tell without reading the rest.
    return not len(flat) or bool((flat[:1] == flat[-1:]).all() and (flat == flat[0]).all())


def _is_readable(parameter: Tensor) -> bool:
    return type(parameter) in (Tensor, nn.Parameter) and not parameter.is_meta


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode(errors="surrogatepass")).hexdigest()[:16]
