"""Where a NaN may begin: sixty origins, each on a sampled step and on another, in three wrappers.

Every plan says what a verdict must say of it. Several modules are allowed where the fault lies in
the code of the one around them; a module or rank of None (not known) is allowed only where the step
was not sampled, or where the fault lay between modules.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

WRAPS = ("one", "ddp", "fsdp2")
STEPS, EVERY = 14, 4
SAMPLED_STEP, UNSAMPLED_STEP = 8, 6
LEAVES = ("embed", "blocks.0.norm", "blocks.1.up", "blocks.1.act", "blocks.2.down", "head")
# Kinds of origins; what each is stands in `origin_ranks`.
BETWEEN = ("functional", "between_inplace", "loss", "logged_loss", "data")
STATE = ("param", "buffer", "lr_inf", "eps_zero", "exp_avg")


@dataclass(frozen=True, slots=True)
class Origin:
    """One place and way in which something becomes non-finite.

    `kind` is what `origin_ranks` carries out, in `module`, by writing `value` into micro-batch
    `micro`; `then` is what the script does about it: "" (goes on), "skip" (the batch), "raise",
    "exit" or "kill" in the same forward; `mask`: a module emits -Inf at all steps, as it should;
    `scaler`: the loss is scaled.
    """

    kind: str
    module: str = ""
    value: str = "nan"
    micro: int = 0
    then: str = ""
    mask: bool = False
    scaler: bool = False

    @property
    def name(self) -> str:
        """What it is called on the command line."""
        words = [self.kind, self.module, self.value if self.value != "nan" else "", self.then]
        words += [f"micro{self.micro}" if self.micro else ""]
        words += ["mask" if self.mask else "", "scaler" if self.scaler else ""]
        return " ".join(filter(None, words))


ORIGINS = (
    *(Origin("forward", module) for module in LEAVES),
    *(Origin("forward", module, micro=1) for module in ("embed", "blocks.1.down", "head")),
    Origin("forward", "blocks.1"),
    Origin("forward", "blocks.2", micro=1),
    Origin("forward", "blocks.1.down", "inf"),  # after `up` tanh would make it finite again
    Origin("forward", "head", "-inf"),
    Origin("forward", "wrap.child"),
    Origin("inplace", "wrap"),
    Origin("inplace", "wrap", micro=1),
    Origin("functional", "blocks.0"),
    Origin("functional", "blocks.2", "inf"),
    Origin("between_inplace", "blocks.1"),
    *(Origin("grad", module) for module in ("embed", "blocks.0.up", "blocks.1.down", "head")),
    *(Origin("grad", module, micro=1) for module in ("embed", "blocks.2.norm", "blocks.1")),
    Origin("grad", "blocks.1.up", "-inf"),
    *(Origin("autograd", module) for module in ("embed", "blocks.1.up", "head")),
    *(Origin("autograd", module, micro=1) for module in ("blocks.0.down", "blocks.2.up")),
    Origin("autograd", "blocks.1.up", "inf"),
    *(Origin("loss", "", value) for value in ("nan", "inf", "-inf")),
    *(Origin("logged_loss", "", value) for value in ("nan", "inf", "-inf")),
    Origin("data"),
    Origin("data", "", "inf", micro=1),
    *(Origin("param", module) for module in ("embed", "blocks.1.up", "head")),
    Origin("buffer", "blocks.2"),
    Origin("lr_inf"),
    Origin("eps_zero", "blocks.0.up"),
    Origin("exp_avg", "blocks.1.down"),
    Origin("reduction"),
    Origin("overflow", "blocks.1.up", "inf", scaler=True),
    Origin("forward", "blocks.1.up", scaler=True),
    Origin("forward", "head", micro=1, scaler=True),
    Origin("grad", "blocks.1.down", scaler=True),
    *(Origin("forward", module, then="skip") for module in ("blocks.1.up", "head")),
    *(Origin("forward", module, then="raise") for module in ("blocks.0.norm", "blocks.1.down")),
    *(Origin("forward", module, then="exit") for module in ("blocks.1.up", "blocks.2")),
    *(Origin("forward", module, then="kill") for module in ("embed", "blocks.2.up")),
    Origin("nothing", mask=True),
    Origin("forward", "blocks.1.up", mask=True),
    Origin("forward", "head", micro=1, mask=True),
    Origin("grad", "blocks.1.down", mask=True),
    Origin("forward", "mask", mask=True),
)  # fmt: skip


# FSDP2 calls no hook of the weight that is trained: its gradients cannot be kept at zero.
_WHERE = {"reduction": ("ddp",), "eps_zero": ("one", "ddp")}


@dataclass(frozen=True, slots=True)
class Plan:
    """An origin, a wrapper, and whether its step is sampled; `number` counts them.

    `far`: as on a device that the host cannot look into (see `tests.far`).
    """

    number: int
    origin: Origin
    wrap: str
    sampled: bool
    far: bool = False

    @property
    def step(self) -> int:
        """The step of the fault."""
        return SAMPLED_STEP if self.sampled else UNSAMPLED_STEP

    @property
    def world(self) -> int:
        """Ranks."""
        return 1 if self.wrap == "one" else 2

    @property
    def rank(self) -> int:
        """To which it happens; 0 where DDP takes the buffers of all from there."""
        return 0 if self.origin.kind == "buffer" else self.world - 1

    def as_json(self) -> dict[str, Any]:
        """Return what `of_json` reads."""
        return asdict(self)

    @classmethod
    def of_json(cls, said: dict[str, Any]) -> Plan:
        """Read what `as_json` returned."""
        return cls(**{**said, "origin": Origin(**said["origin"])})

    def __str__(self) -> str:
        word = "sampled" if self.sampled else "unsampled"
        where = ", far" if self.far else ""
        return f"{self.number} {self.origin.name}, {self.wrap}, {word} step {self.step}{where}"


def plans(*, far: bool = False) -> Iterator[Plan]:
    """Yield every origin in every wrapper where there is such a thing, on both sorts of step."""
    number = 0
    for origin in ORIGINS:
        for wrap in WRAPS:
            for sampled in (True, False):
                if wrap in _WHERE.get(origin.kind, WRAPS):
                    yield Plan(number, origin, wrap, sampled, far)
                number += 1
