"""What one call of a module is executed again from: plain tensors on the host, by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddpprobe.errors import RunError, TensorError
from ddpprobe.reader.tensors import RankTensor, StoredCall
from ddpprobe.rundir.tensor_pack import ITEM_SIZES

Tensors = Mapping[str, Tensor]
_SHOWN = 4
AUTOCAST = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class Scene:
    """One call of one module on one rank, as the run recorded it.

    Attributes:
        module: its FQN; "" is the whole model.
        kind: name of its class, a text of the store's; nothing is looked up by it.
        training: its train flag.
        args, kwargs: structure of the arguments, in which `{"tensor": leaf}` stands for an input.
        inputs, outputs, grad_outputs: tensors by leaf, "" for a bare one.
        parameters, buffers: whole ones, by FQN.
        gradients: of parameters, by FQN: those that a single backward of this call can give.
        rng: state of the generator before the call by kind of device, uint8 [n].
        autocast: kind of device -> name of the dtype, where autocast was on.
        notes: what is not as one would wish, in words.
    """

    module: str
    kind: str
    training: bool
    args: Any
    kwargs: Any
    inputs: Tensors
    outputs: Tensors
    parameters: Tensors
    buffers: Tensors = field(default_factory=dict)
    grad_outputs: Tensors = field(default_factory=dict)
    gradients: Tensors = field(default_factory=dict)
    rng: Tensors = field(default_factory=dict)
    autocast: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def noting(self, *notes: str) -> Self:
        """Return the same scene with more notes."""
        return replace(self, notes=(*self.notes, *notes))


def scene_of(stored_call: StoredCall) -> Scene:
    """Return what was recorded of a call, with whole parameters.

    Raises:
        RunError: the stored call does not say how the module was called, or some ranks kept no part
            of a parameter.
        TensorError: a part of a parameter is lost.
        StoreDamaged, PackDamaged: something is damaged.
    """
    calls = _calls(stored_call)
    at = (stored_call.micro, stored_call.call)
    call = next((c for c in calls if (c.get("micro"), c.get("call")) == at), None)
    if call is None or call.get("args") is None:
        raise RunError(f"the arguments of {stored_call.module or 'the model'} were not kept")
    autocast = call.get("autocast")
    autocast = autocast if isinstance(autocast, dict) else {}
    if not all(isinstance(v, str) and v in AUTOCAST for v in autocast.values()):
        raise RunError("the capsule tells of an autocast type that this ddpprobe does not know", 3)
    alone = stored_call.header.get("world_size") == 1 and len(calls) == 1
    buffers, inputs = _state(stored_call, "buffer"), _by_leaf(stored_call, "input")
    cast = _cast_by_fsdp(stored_call, inputs) if not autocast else None
    parameters = {n: p.to(cast) if cast else p for n, p in _state(stored_call, "param").items()}
    notes = [*_notes(call, alone=alone, has_buffers=bool(buffers))]
    if cast is not None:
        notes.append(f"parameters were cast to {cast}, as FSDP's mixed precision does")
    return Scene(
        module=stored_call.module,
        kind=str(stored_call.about.get("class", "")),
        training=bool(stored_call.about.get("training", True)),
        args=call["args"],
        kwargs=call.get("kwargs", {"dict": {}}),
        inputs=inputs,
        outputs=_by_leaf(stored_call, "output"),
        grad_outputs=_by_leaf(stored_call, "grad_output"),
        parameters=parameters,
        buffers=buffers,
        gradients=_state(stored_call, "grad") if alone else {},
        rng=_by_leaf(stored_call, "rng") if call.get("rng") == "before" else {},
        autocast=autocast,
        notes=tuple(notes),
    )


def _by_leaf(stored_call: StoredCall, kind: str) -> dict[str, Tensor]:
    return {leaf: _whole(t) for (k, _, leaf), t in stored_call.tensors.items() if k == kind}


def _state(stored_call: StoredCall, kind: str) -> dict[str, Tensor]:
    """Return parameters, gradients or buffers by the FQN of their place in the module.

    One that has several places (tied, or in several captured modules) was kept once, under the
    name that the capsule's `state` gives for each place.
    """
    places = stored_call.about.get("state")
    prefix = f"{stored_call.module}." if stored_call.module else ""
    parts = {
        prefix + place: part
        for place, kept in (places.items() if isinstance(places, dict) else ())
        if (part := stored_call.tensors.get((kind, str(kept), "")))
    }
    found, partial = {}, {}
    for name, part in parts.items():
        try:
            found[name] = _whole(part)
        except TensorError:
            if _is_lost(part):
                raise
            partial[name] = part.whole.ranks
    if partial:
        raise RunError(_says_partial(stored_call, partial))
    return found


def _says_partial(stored_call: StoredCall, partial: Mapping[str, list[int]]) -> str:
    """Say why what the ranks kept of parameters makes no whole, and what to do about it."""
    names, ranks = [*partial][:_SHOWN], sorted({r for some in partial.values() for r in some})
    more = f" and {len(partial) - _SHOWN} more" if len(partial) > _SHOWN else ""
    module = stored_call.module or "''"
    return (
        f"of {stored_call.header.get('world_size')} ranks only {ranks} kept shards of "
        f"{', '.join(names)}{more} at this step: FSDP units inside of "
        f"{stored_call.module or 'the model'} hold these, whole during their own calls and "
        f"backwards only, and no backward came by. Let all ranks keep their shards: "
        f"install(..., capture={stored_call.module!r}), or, while the run lives, "
        f"ddpprobe trigger RUN --module {module}"
    )


def _is_lost(part: RankTensor) -> bool:
    """Whether a piece that a rank delivered is not there any more."""
    whole = part.whole
    return any(
        r.ranks and not r.delivered and set(r.ranks) <= set(whole.ranks) for r in whole.regions
    )


def _cast_by_fsdp(stored_call: StoredCall, inputs: Tensors) -> torch.dtype | None:
    """Return the type in which FSDP hands parameters to the module; None: as they are kept.

    A capture keeps the shards of the optimizer. With mixed precision FSDP casts what it gathers,
    and the module's inputs, to one shorter type, of which only the inputs tell.
    """
    kept = [t for (kind, _, _), t in stored_call.tensors.items() if kind == "param"]
    spread = any(t.layout.get("kind") in ("dtensor", "flat") for t in kept)
    given = {t.dtype for t in inputs.values() if t.is_floating_point()}
    if not spread or {t.dtype for t in kept} != {"float32"} or len(given) != 1:
        return None
    (cast,) = given
    return cast if cast in (torch.float16, torch.bfloat16) else None


def _notes(told: Mapping[str, Any], *, alone: bool, has_buffers: bool) -> Iterator[str]:
    if not alone:
        yield "parameter gradients are sums over calls or ranks: not compared"
    if has_buffers:
        yield "buffers are as they were after the backward"
    if told.get("inputs_changed") is None:
        yield "inputs are as they were after the call, which may have changed them in place"


def _whole(part: RankTensor) -> Tensor:
    """Return what one device needs: the whole of what is spread, this rank's own of the rest.

    What lies as a DTensor or in a flat parameter was one tensor to the model, whose parts worked
    together; a part of a batch is a rank's own business.
    """
    return tensor_of(part.whole[...] if _is_spread(part) else part.read(), part.dtype)


def _is_spread(part: RankTensor) -> bool:
    return part.layout.get("kind") in ("dtensor", "flat") and part.whole.shape != part.shape


def tensor_of(array: NDArray[Any], dtype: str) -> Tensor:
    """Return a captured array as a tensor of torch's type of that name, bit for bit."""
    if dtype not in ITEM_SIZES:
        raise RunError(f"a captured tensor is of type {dtype!r}, which this ddpprobe does not know")
    kind = getattr(torch, dtype)
    if kind is torch.complex32:  # which NumPy has not: complex64 here
        return torch.from_numpy(np.array(array, np.complex64)).to(kind)
    raw = np.array(array, order="C").reshape(-1).view(np.uint8)
    return torch.from_numpy(raw).view(kind).reshape(array.shape)


def _calls(stored_call: StoredCall) -> list[dict[str, Any]]:
    told = stored_call.about.get("calls")
    return [c for c in told if isinstance(c, dict)] if isinstance(told, list) else []
