"""The user's model for a re-execution: built by their code, filled with what the run recorded."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import final

import torch
from torch import Tensor, nn

from ddpprobe.errors import RunError
from ddpprobe.rank.topology.naming import clean, walk
from ddpprobe.reader.reexecute.scene import Scene

_TORCH = str(Path(torch.__file__).parent)
_LISTED = 12
_LONGEST = 300


@final
class Contained:
    """Context that turns what the user's code raises into a `RunError` that says where.

    Args:
        what: whose code it is, for the text.
        advice: the end of the text, unless something cannot be imported.
    """

    def __init__(self, what: str, advice: str = "") -> None:
        self._what, self._advice = what, advice

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not isinstance(error, Exception) or isinstance(error, RunError):
            return
        frames = traceback.extract_tb(trace)
        theirs = [f for f in frames if not f.filename.startswith((_TORCH, os.fspath(_HERE), "<"))]
        where = f" at {theirs[-1].filename}:{theirs[-1].lineno}" if theirs else ""
        text = " ".join(str(error).split())[:_LONGEST]
        raised = f"{self._what} raised {type(error).__name__}{where}: {text}"
        advice = "" if isinstance(error, ImportError) else self._advice
        raise RunError(f"{raised}{advice}") from error


_HERE = Path(__file__).parent
_IMPORTED = (
    ". The file is imported: what trains belongs under `if __name__ == '__main__':`, or the model "
    "into a file of its own"
)


def build(spec: str) -> nn.Module:
    """Import what the user named and call it: their model, or the module itself.

    Args:
        spec: `pkg.mod:fn`, looked for from the working directory too.

    Raises:
        RunError: it is written otherwise, is not there, raised, or returned no module.
    """
    path, colon, name = spec.partition(":")
    if not (path and colon and name):
        raise RunError(f"--build {spec}: expected pkg.mod:fn, such as train:build_model")
    if os.getcwd() not in sys.path:  # noqa: PTH109  (sys.path holds texts)
        sys.path.insert(0, os.getcwd())  # noqa: PTH109
    with Contained(f"--build {spec}: importing {path}", _IMPORTED):
        found = importlib.import_module(path)
    function = getattr(found, name, None)
    if not callable(function):
        there = [n for n, value in vars(found).items() if callable(value) and not n.startswith("_")]
        raise RunError(f"--build {spec}: no function {name!r} in {path}{_nearest(name, there)}")
    make: Callable[[], object] = function
    with Contained(f"--build {spec}: {name}()"):
        made = make()
    if not isinstance(made, nn.Module):
        raise RunError(f"--build {spec}: {name}() returned {type(made).__name__}, not an nn.Module")
    return made


def find(built: nn.Module, scene: Scene) -> nn.Module:
    """Return the module of the scene in what was built, or all of that if it is the module itself.

    Raises:
        RunError: there is none of this name.
    """
    there = dict(walk(built))  # of a wrapper and what it wraps, the latter
    if scene.module in there:
        return there[scene.module]
    if type(built).__qualname__ == scene.kind.rpartition(".")[2]:
        return built
    named = [name for name in there if name]
    raise RunError(
        f"the built {type(built).__name__} has no module {scene.module!r} and is no "
        f"{scene.kind} itself{_nearest(scene.module, named)}"
    )


def fill(module: nn.Module, scene: Scene, device: torch.device, *, double: bool) -> list[str]:
    """Load the recorded parameters and buffers, in the run's types, and set the train flag.

    Args:
        module: moved to `device`; with `double` its floating-point tensors become float64.
        scene: of which parameters and buffers are taken.
        device: where to compute.
        double: see `module`.

    Returns:
        Notes about what the run had otherwise.

    Raises:
        RunError: a parameter was not recorded, or has another shape.
    """
    if any(t.is_meta for t in (*module.parameters(), *module.buffers())):
        module.to_empty(device=device)
    module.to(device=device, dtype=torch.float64 if double else None)
    notes, left = [], dict(scene.parameters) | dict(scene.buffers)
    both = list(_named(module, scene.module))
    filled = {id(own) for fqn, own in both if fqn in left}
    for fqn, own in both:
        state = left.pop(fqn, None)
        if state is None:
            if id(own) in filled:  # a module that has two names was recorded by one of them
                continue
            if isinstance(own, nn.Parameter):
                raise RunError(_unrecorded(fqn, scene))
            notes.append(f"the buffer {fqn} was not recorded: it is as it was built")
            continue
        if state.shape != own.shape:
            raise RunError(
                f"{fqn} has shape {list(own.shape)} in the built model and {list(state.shape)} in "
                "the run: build it with the settings of the run"
            )
        if state.dtype != own.dtype and not double:
            own.data = torch.empty_like(own.data, dtype=state.dtype)  # as it was in the run
        with torch.no_grad():
            own.copy_(state)
    if left:
        notes.append(f"the run had {', '.join(sorted(left)[:_LISTED])}, which was not built")
    module.train(scene.training)
    return notes


def _named(module: nn.Module, fqn: str) -> Iterable[tuple[str, Tensor]]:
    prefix = f"{fqn}." if fqn else ""
    both = (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    )
    return ((prefix + clean(name), tensor) for name, tensor in both)


def _unrecorded(fqn: str, scene: Scene) -> str:
    if not scene.parameters:
        return f"no parameter of {scene.module or 'the model'} was recorded at this step"
    return (
        f"the parameter {fqn} of the built model was not recorded; the run had "
        f"{', '.join(sorted(scene.parameters)[:_LISTED])}: build it as it was, or capture less "
        "at once"
    )


def _nearest(name: str, there: list[str]) -> str:
    near = difflib.get_close_matches(name, there, n=3, cutoff=0.5)
    if near:
        return f"; did you mean {' or '.join(near)}?"
    return f"; there is {', '.join(there[:_LISTED])}" if there else ""
