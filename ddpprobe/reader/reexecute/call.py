"""One call of a module, forward and backward, on one device, with every operator watched."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ddpprobe.errors import RunError
from ddpprobe.rank.hooks.outputs import leaves
from ddpprobe.rank.topology.naming import clean, walk
from ddpprobe.rank.torch_private import anomaly
from ddpprobe.rank.torch_private.modes import PlainMode
from ddpprobe.reader.reexecute.model import Contained
from ddpprobe.reader.reexecute.op_watch import Op, OpWatch
from ddpprobe.reader.reexecute.scene import AUTOCAST, Scene, Tensors
from ddpprobe.reader.reexecute.source_line import LineFinder

MAX_DEPTH = 32  # of nested arguments
_SHORT = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a call gave.

    Attributes:
        outputs, input_gradients: by leaf, on the host.
        gradients: of the parameters, by FQN, on the host.
        forward_op, backward_op: the first operator after what is not finite, if one made it.
        random: operators that drew random numbers, each name once.
        went_back: the backward ran.
    """

    outputs: Tensors
    gradients: Tensors = field(default_factory=dict)
    input_gradients: Tensors = field(default_factory=dict)
    forward_op: Op | None = None
    backward_op: Op | None = None
    random: tuple[str, ...] = ()
    went_back: bool = False


class InDouble(PlainMode):
    """Context in which what would be cast or made in a shorter type is float64 instead."""

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401  (these are torch's)
        types: object,
        args: Any = (),  # noqa: ANN401
        kwargs: Any = None,  # noqa: ANN401
    ) -> object:
        """Run one operator with any `dtype` it was given widened."""
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") in _SHORT:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def execute(
    module: nn.Module, scene: Scene, device: torch.device, *, double: bool = False
) -> Outcome:
    """Call a module, filled by `execution_model.fill`, as the scene says.

    Args:
        module: on `device`.
        scene: gives inputs, random state, autocast state, and the gradients to go back with.
        device: where to compute.
        double: in float64, without autocast. Sums differ by rounding only; so do random numbers,
            but for dropout's masks, which are the same (measured).

    Raises:
        RunError: an input was not recorded, or the module raised.
    """
    watch = OpWatch(LineFinder({id(m): n for n, m in _named(module, scene.module)}))
    inputs = {
        leaf: _leaf(tensor.to(device), double=double) for leaf, tensor in scene.inputs.items()
    }
    given = {leaf: tensor.clone() for leaf, tensor in inputs.items()}  # a leaf may not be written
    args, kwargs = arguments(scene.args, given), arguments(scene.kwargs, given)
    module.zero_grad(set_to_none=True)
    label = f"{scene.module or 'the model'} ({type(module).__qualname__})"
    with _state(scene, device, double=double), anomaly.recording(), watch, _widened(double=double):
        with Contained(f"{label}: the forward"):
            made = dict(leaves(module(*args, **kwargs)))
        bad = watch.first_bad(made.values())
        outputs = {leaf: _kept(tensor) for leaf, tensor in made.items()}
        went_back = _backward(watch, made, scene, label)
    fqns = {n: p.grad for n, p in _parameters(module, scene.module) if p.grad is not None}
    below = {leaf: t.grad for leaf, t in inputs.items() if t.grad is not None}
    module.zero_grad(set_to_none=True)
    return Outcome(
        outputs=outputs,
        gradients={n: _kept(g) for n, g in fqns.items()},
        input_gradients={n: _kept(g) for n, g in below.items()},
        forward_op=bad,
        backward_op=watch.first_bad([*fqns.values(), *below.values()]) if went_back else None,
        random=tuple(dict.fromkeys(watch.random)),
        went_back=went_back,
    )


def arguments(structure: Any, tensors: Tensors, depth: int = 0) -> Any:  # noqa: ANN401  (any JSON)
    """Rebuild arguments from their structure.

    Raises:
        RunError: an argument, or a tensor in one, was not recorded.
    """
    match structure:
        case {"tensor": str(leaf)}:
            if leaf not in tensors:
                raise RunError(
                    f"the input {leaf!r} was not recorded: capture fewer modules at once"
                )
            return tensors[leaf]
        case {"value": value}:
            return value
        case {"float": "nan" | "inf" | "-inf" as number}:
            return float(number)
        case _ if depth > MAX_DEPTH:
            raise RunError("the arguments of the call are nested too deeply", 3)
        case {"list": [*items]}:
            return [arguments(item, tensors, depth + 1) for item in items]
        case {"tuple": [*items]}:
            return tuple(arguments(item, tensors, depth + 1) for item in items)
        case {"dict": dict(named)}:
            return {key: arguments(item, tensors, depth + 1) for key, item in named.items()}
        case {"opaque": name}:
            raise RunError(
                f"an argument was a {name}, which is not recorded; re-execute a module inside it "
                "that takes tensors, or one around it"
            )
    raise RunError("the arguments of the call were not recorded as this ddpprobe writes them", 3)


def _backward(watch: OpWatch, made: Mapping[str, Tensor], scene: Scene, label: str) -> bool:
    pairs = [
        (made[leaf], gradient.to(made[leaf]))
        for leaf, gradient in scene.grad_outputs.items()
        if leaf in made and made[leaf].requires_grad and made[leaf].shape == gradient.shape
    ]
    if not pairs:
        return False
    # What was recorded of an output came to it by all ways, also through another output that is
    # computed from it (logits and their loss). So it takes the place of whatever arrives there.
    for output, gradient in pairs:
        output.register_hook(partial(_instead, gradient))
    outputs = [output for output, _ in pairs]
    watch.enter_backward(outputs)
    with Contained(f"{label}: the backward"):
        torch.autograd.backward(outputs, [torch.zeros_like(output) for output in outputs])
    return True


def _instead(recorded: Tensor, _: Tensor) -> Tensor:
    return recorded


@contextlib.contextmanager
def _state(scene: Scene, device: torch.device, *, double: bool) -> Iterator[None]:
    """Set the random and the autocast state, and put back what was."""
    before = torch.get_default_dtype()
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(cuda), contextlib.ExitStack() as stack, torch.enable_grad():
        if "torch._dynamo" in sys.modules:  # what the user compiled is to run operator by operator
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        torch.manual_seed(0)  # whatever was not recorded is the same every time
        for kind, state in scene.rng.items():
            with Contained(f"setting the recorded random state ({kind})"):
                if kind == "cpu":
                    torch.set_rng_state(state)
                elif kind == device.type == "cuda":
                    torch.cuda.set_rng_state(state, device)
        for kind, name in scene.autocast.items():
            if not double and kind in ("cpu", "cuda"):
                stack.enter_context(torch.autocast(_mapped(kind, device), AUTOCAST[name]))
        try:
            torch.set_default_dtype(torch.float64 if double else before)
            yield
        finally:
            torch.set_default_dtype(before)


def _mapped(kind: str, device: torch.device) -> str:
    """Return the kind of device whose autocast stands for that of the run."""
    return device.type if kind == "cuda" else kind


def _widened(*, double: bool) -> contextlib.AbstractContextManager[object]:
    if not double:
        return contextlib.nullcontext()
    return InDouble()


def _leaf(tensor: Tensor, *, double: bool) -> Tensor:
    wide = tensor.double() if double and tensor.is_floating_point() else tensor.clone()
    return wide.requires_grad_(wide.is_floating_point() or wide.is_complex())


def _kept(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().clone()


def _named(module: nn.Module, fqn: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in walk(module):
        yield ".".join(filter(None, (fqn, name))), child


def _parameters(module: nn.Module, fqn: str) -> Iterator[tuple[str, nn.Parameter]]:
    for name, parameter in module.named_parameters():
        yield ".".join(filter(None, (fqn, clean(name)))), parameter
