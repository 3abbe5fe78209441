"""What a planted fault is, and how it is written: `nan:step=60,rank=1,module=blocks.2.mlp`."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

KINDS = ("nan", "inf", "explode")
PHASES = ("forward", "backward")


@dataclass(frozen=True, slots=True)
class Fault:
    """One planned fault.

    Attributes:
        kind: `nan` and `inf` (+Inf) replace `elements` elements, `explode` multiplies all of them
            by `factor`.
        step: optimizer step, counted from `first_step` since `inject`.
        module: path without wrapper prefixes; "" is the root module. Its first floating-point
            output tensor is hit.
        rank: the global rank it happens on.
        phase: `forward` hits the output, `backward` the gradient with respect to the output.
        micro: micro-batch within the step, from 0.
        elements: how many elements, spread evenly (one: the middle one).
        factor: of `explode` only.

    Raises:
        ValueError: a field has no such meaning.
    """

    kind: str
    step: int
    module: str
    rank: int = 0
    phase: str = "forward"
    micro: int = 0
    elements: int = 1
    factor: float = 1e4

    def __post_init__(self) -> None:
        one_of("fault", self.kind, KINDS)
        one_of("phase", self.phase, PHASES)
        for name, low in (("step", 0), ("rank", 0), ("micro", 0), ("elements", 1)):
            if getattr(self, name) < low:
                msg = f"{name}={getattr(self, name)}: expected an integer of at least {low}"
                raise ValueError(msg)

    def __str__(self) -> str:
        where = f"step {self.step}, rank {self.rank}, module {self.module or '(root)'}"
        return f"{self.kind} at {where}, {self.phase}, micro-batch {self.micro}"

    @classmethod
    def parse(cls, spec: str) -> Fault:
        """Read `kind:key=value,...`; `step` and `module` are required.

        Raises:
            ValueError: unknown kind or key, missing key, or a value of the wrong type.
        """
        kind, _, rest = spec.partition(":")
        one_of("fault", kind, KINDS)
        keys = [f.name for f in dataclasses.fields(cls) if f.name != "kind"]
        keys.remove("elements" if kind == "explode" else "factor")
        values: dict[str, Any] = {}
        for part in filter(None, rest.split(",")):
            key, equals, text = part.partition("=")
            one_of("key", key, keys)
            if not equals or key in values:
                msg = f"{part!r} in {spec!r}: expected key=value, each key once"
                raise ValueError(msg)
            values[key] = _number(key, text) if key not in ("module", "phase") else text
        missing = [k for k in ("step", "module") if k not in values]
        if missing:
            msg = f"{spec!r} lacks {' and '.join(missing)}: try nan:step=60,rank=1,module=NAME"
            raise ValueError(msg)
        return cls(kind=kind, **values)


def one_of(what: str, given: str, known: Iterable[str]) -> None:
    """Raise ValueError with the nearest names unless `given` is a known one."""
    names = list(known)
    if given in names:
        return
    near = difflib.get_close_matches(given, names, n=3, cutoff=0.5)
    hint = (
        f"did you mean {' or '.join(near)}?" if near else f"choose one of {', '.join(names[:20])}"
    )
    msg = f"no {what} {given!r}: {hint}"
    raise ValueError(msg)


def _number(key: str, text: str) -> float:
    try:
        return float(text) if key == "factor" else int(text)
    except ValueError:
        wanted = "a number" if key == "factor" else "an integer"
        msg = f"{key}={text}: expected {wanted}"
        raise ValueError(msg) from None
