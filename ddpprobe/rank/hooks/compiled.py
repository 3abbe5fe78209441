"""Observation inside graphs of torch.compile: two graphs (observed and not), no graph break.

Every chosen module in a compiled region carries a permanent hook, a `Resident`. It is traced into
the graph and reads one bool: if it is set, the graph has calls of `ddpprobe::record` for the
module's outputs and the gradients with respect to them, otherwise it has nothing of ours. So there
are two graphs, and torch chooses between them as the steps go by.

torch does not look at hooks again once it has a graph. A region that has run before it was found
has graphs without residents: they are dropped (`torch.compiler.reset`), and torch compiles anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ddpprobe.rank import torch_private
from ddpprobe.rank.hooks.copy_safe_hook import CopySafeHook, CopySafeObserver, take_off
from ddpprobe.rank.hooks.eager import EagerHooks
from ddpprobe.rank.hooks.record_op import (
    GRADIENT,
    TRAINED,
    RecordChannel,
    admit_dtensors,
    keep_out_of_cuda_graphs,
    trace_outputs,
)
from ddpprobe.rank.topology.describe import Topology
from ddpprobe.rank.topology.naming import inner
from ddpprobe.rank.torch_private import dynamo
from ddpprobe.rundir.fuse import Fuse, logger
from ddpprobe.rundir.stopwatch import Caller


@final
class Flag:
    """The bool that graphs are guarded by: whether the steps to come are observed."""

    __slots__ = ("on",)

    def __init__(self) -> None:
        self.on = False


@final
class Resident(CopySafeHook):
    """The permanent hook of one module: traced into its graph, or called where torch fell back."""

    __slots__ = ("_flag", "_slot")

    def __init__(self, target: Callable[..., object], slot: Tensor, flag: Flag) -> None:
        super().__init__(target)
        self._slot, self._flag = slot, flag

    @dynamo.run_as_python
    def __call__(self, module: nn.Module, args: object, output: object) -> None:
        """Pass a hook's arguments on, or put them into the graph."""
        if not torch.compiler.is_compiling():
            if self._flag.on:
                self._target(module, args, output)
        # The graph of an evaluation must not depend on the flag: it is one and the same.
        elif not dynamo.is_silent() and torch.is_grad_enabled() and self._flag.on:
            trace_outputs(output, self._slot)


@final
class _Place:
    """One module in a compiled region: hears its graph, and its resident where there is none."""

    def __init__(self, owner: CompiledHooks, fqn: str, region: str, flag: Flag) -> None:
        self._owner, self._fqn, self.region = owner, fqn, region
        guard = owner.fuse.guard
        self._channel = RecordChannel(guard(self._heard))
        self.resident = Resident(guard(self._called), self._channel.slot, flag)

    def _heard(self, what: str, leaf: str, tensor: Tensor) -> None:
        self._owner.delivered.add(self._fqn)
        hooks = self._owner.eager
        if hooks is None:
            return
        if what == GRADIENT:
            hooks.traced_gradient(self._fqn, leaf, tensor)
        else:
            hooks.traced_output(self._fqn, leaf, tensor, trained=what == TRAINED)

    def _called(self, module: nn.Module, args: object, output: object) -> None:
        self._owner.delivered.add(self._fqn)
        if self._owner.eager is not None:
            self._owner.eager.forward(self._fqn, output, at_a_graph=True)


@final
class CompiledHooks:
    """The residents of a model.

    Args:
        select: whether a module of this FQN is observed.
        fuse: contains whatever goes wrong in here.
        lost: called with FQNs that stay unobserved whatever was tried.

    Attributes:
        flag: what the graphs are guarded by; set it before the forward it is for.
        eager: takes the rows; None outside of sampled steps.
        delivered: FQNs of the modules that were heard.
    """

    def __init__(
        self, select: Callable[[str], bool], fuse: Fuse, lost: Callable[[list[str]], None]
    ) -> None:
        self.flag = Flag()
        self.eager: EagerHooks | None = None
        self.delivered: set[str] = set()
        self.fuse = fuse
        self._select = select
        self._lost = lost
        self._places: dict[nn.Module, tuple[str, _Place]] = {}
        self._handles: list[RemovableHandle] = []
        self._regions: dict[str, nn.Module] = {}
        self._ran: set[str] = set()
        self._renewed: set[str] = set()
        self._told: set[str] = set()

    def __contains__(self, module: object) -> bool:
        return module in self._places

    def __len__(self) -> int:
        return len(self._places)

    def find(self, topology: Topology, *, root_is_in_one: bool) -> bool:
        """Give residents to the modules of compiled regions; whether any region has old graphs.

        Those of a torch that leaves residents out count as old: `renew` then says so.
        """
        admit_dtensors()
        if topology.device.type != "cpu":
            keep_out_of_cuda_graphs()
        stale = False
        for region, chain in _regions(topology, root_is_in_one=root_is_in_one):
            new = self._settle(topology, region, chain[-1])
            # Where torch gave the region's own frame up, it has graphs of the frames below.
            stale |= new and any(dynamo.was_compiled(m) for m in chain[0].modules())
            if new and not dynamo.SPEAKING and region not in self._renewed:
                self._renewed.add(region)
                stale = True
            if new and region not in self._regions and len(chain) > 1:
                ran = CopySafeObserver(
                    self.fuse.guard(partial(self._region_ran, region), Caller.MODULE)
                )
                self._handles.append(chain[0].register_forward_hook(ran))
            self._regions.setdefault(region, chain[-1])
        return stale

    def renew(self) -> None:
        """Drop the graphs of the regions, in which the residents are not."""
        names = [fqn or "the model" for fqn in self._regions]
        renew_graphs(", ".join(names[:3]) + (" ..." if len(names) > 3 else ""))

    def judge(self) -> bool:
        """After an observed step: whether regions ran and their modules were not heard.

        The first time the remedy is `renew`; what is then still not heard is `lost`.
        """
        blind = [r for r in self._regions if self._is_blind(r) and r not in self._told]
        new = [r for r in blind if r not in self._renewed]
        self._renewed.update(new)
        for region in blind:
            if region not in new:
                self._told.add(region)
                self._lost([fqn for fqn, place in self._places.values() if place.region == region])
        return bool(new)

    def mute(self) -> None:
        """Let the residents be and hear nothing: torch goes on with the graphs without records."""
        self.flag.on = False
        self.eager = None

    def close(self) -> None:
        """Take the residents off; torch compiles graphs without them when they are next called."""
        self.mute()
        take_off(self._handles)
        self._places.clear()
        self._regions.clear()

    def _settle(self, topology: Topology, region: str, top: nn.Module) -> bool:
        inside = {id(m) for m in top.modules()}
        found = False
        for fqn, module in topology.named_modules():
            if id(module) in inside and module not in self._places and self._select(fqn):
                place = _Place(self, fqn, region, self.flag)
                self._places[module] = fqn, place
                if dynamo.SPEAKING:  # else it would be guarded, with a graph for each module
                    self._handles.append(module.register_forward_hook(place.resident))
                found = True
        return found

    def _region_ran(self, region: str, *_: object) -> None:
        if torch.is_grad_enabled():
            self._ran.add(region)

    def _is_blind(self, region: str) -> bool:
        """Whether nothing is heard but the module that is compiled, called outside its graph."""
        top = None if region in self._ran else self._regions[region]
        inner = [
            fqn
            for module, (fqn, place) in self._places.items()
            if place.region == region and module is not top and _has_forward(module)
        ]
        ran = region in self._ran or region in self.delivered
        return ran and bool(inner) and self.delivered.isdisjoint(inner)


def renew_graphs(what: str) -> None:
    """Drop all graphs of torch.compile, which were made without the probe's hooks.

    With a torch that leaves the hooks out of every graph it only says so.
    """
    if not dynamo.SPEAKING:
        logger.warning(
            "ddpprobe: torch %s leaves the probe out of its graphs of %s, so what is inside them "
            "is not observed; with a newer torch it is. ddpprobe.install() on what "
            "torch.compile() returned observes at least the model as a whole.",
            torch.__version__, what,
        )  # fmt: skip
        return
    logger.warning(
        "ddpprobe: torch.compile has graphs of %s that were made without the probe: it makes them "
        "anew now, once. ddpprobe.install() on what torch.compile() returned, before its first "
        "call, avoids that; of a model that a compiled function calls, its first call has to show "
        "where it is.",
        what,
    )
    torch.compiler.reset()


def _regions(topology: Topology, *, root_is_in_one: bool) -> Iterator[tuple[str, list[nn.Module]]]:
    """Yield (FQN, modules) of what is compiled as a whole, outer ones first.

    The modules lead from the one that is compiled, through wrappers, to the user's own.
    """
    if root_is_in_one:
        yield "", [topology.root]
    for fqn, module in topology.walk():
        if torch_private.is_compiled(module):
            chain = [module]
            while (wrapped := inner(chain[-1])) is not None:
                chain.append(wrapped)
            yield fqn, chain


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward
