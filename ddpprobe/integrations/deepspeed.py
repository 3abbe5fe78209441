"""A loop of your own over DeepSpeed's engine, with ZeRO of stage 1 or 2.

engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
probe = install(engine, every=10)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, final

from deepspeed import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import distributed as dist
from torch.optim import Optimizer

from ddpprobe.integrations.run_directory import run_directory
from ddpprobe.probe import Probe, install_driven
from ddpprobe.rank.announcements import announce_install
from ddpprobe.rank.topology.describe import ModelRefused
from ddpprobe.rank.topology.engine import EngineGradient

_STAGES = (1, 2)


def install(
    engine: DeepSpeedEngine,
    *,
    root_dir: str | os.PathLike[str] = ".",
    first_step: int | None = None,
    **options: Any,  # noqa: ANN401  (install's)
) -> Probe:
    """Observe the model of an engine; call it on every rank, after `load_checkpoint`.

    A step is one of the engine's optimizer: `engine.step()` at the end of an accumulation. Reduced
    gradients are those that the engine hands its optimizer, before it clips them.

    Args:
        engine: what `deepspeed.initialize()` returned.
        root_dir: a new run lies below `root_dir/ddpprobe`; a resumed one goes on in the newest.
        first_step: optimizer steps taken before; by default the engine knows it.
        options: other keywords of `ddpprobe.install`.

    Raises:
        InstallError: see `ddpprobe.install`; also of a configuration whose gradients would be wrong
            or absent.
        TypeError: `engine` is none.
    """
    if not isinstance(engine, DeepSpeedEngine):
        raise TypeError(
            f"install() takes what deepspeed.initialize() returned first, got "
            f"{type(engine).__name__}"
        )
    announce_install()
    step = engine.global_steps if first_step is None else first_step
    options = {"run_dir": run_directory(root_dir, step), **options}
    return observe(engine, first_step=step, **options)


def observe(engine: DeepSpeedEngine, **options: Any) -> Probe:  # noqa: ANN401  (install's)
    """Observe the model of an engine, with nothing taken for granted but the engine's step."""
    _refuse(engine)
    options = {"first_step": engine.global_steps, **options}
    return install_driven(engine.module, _ZeroEngine(engine), **options)


@final
class _ZeroEngine:
    """Asks the engine, and stands in front of its two `step`s."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self._engine = engine
        self._wrapped: list[tuple[object, object, object]] = []  # owner, its own `step`, ours

    @property
    def wrapper(self) -> str:
        return f"zero{self._engine.zero_optimization_stage()}"

    @property
    def optimizer(self) -> Optimizer:
        optimizer: Optimizer = self._engine.optimizer.optimizer
        return optimizer

    def gradients(self) -> Iterator[EngineGradient]:
        zero = self._engine.optimizer
        for group, gradients in zero.averaged_gradients.items():
            # What is behind the last of these parameters fills the partition up.
            held = zip(zero.params_in_partition[group], gradients or (), strict=False)
            for place, (parameter, part) in enumerate(held):
                start = int(zero.first_offset[group]) if place == 0 else 0
                yield EngineGradient(parameter, part.detach().reshape(-1), start)

    def listen(
        self, ready: Callable[[], object], over: Callable[[bool], object],
        act: Callable[[], object],
    ) -> None:  # fmt: skip
        engine, zero = self._engine, self._engine.optimizer
        use, end = zero.step, engine.step

        def use_gradients(*args: object, **kwargs: object) -> object:
            ready()
            return use(*args, **kwargs)

        def end_micro_batch(*args: object, **kwargs: object) -> object:
            before = engine.global_steps
            done = end(*args, **kwargs)
            if engine.global_steps != before and self._wrapped:
                over(not engine.was_step_applied())
                act()
            return done

        self._wrap(zero, use_gradients)
        self._wrap(engine, end_micro_batch)

    def mute(self) -> None:
        wrapped, self._wrapped = self._wrapped, []
        for owner, own, ours in wrapped:
            if vars(owner).get("step") is not ours:
                continue  # somebody has wrapped it once more
            if own is None:
                del owner.step  # type: ignore[attr-defined]  # both have one
            else:
                owner.step = own  # type: ignore[attr-defined]

    def _wrap(self, owner: object, ours: Callable[..., object]) -> None:
        self._wrapped.append((owner, vars(owner).get("step"), ours))
        owner.step = ours  # type: ignore[attr-defined]  # both have one


def _refuse(engine: DeepSpeedEngine) -> None:
    """Refuse a configuration whose gradients would be wrong or absent, or in which it never ran."""
    reason = _whole_reason(engine) or _zero_reason(engine, engine.optimizer)
    if reason is not None:
        raise ModelRefused(
            f"this engine of DeepSpeed cannot be observed truthfully: {reason}. Statistics are "
            "exact with ZeRO of stage 1 or 2 in fp32 or bf16; torch's fully_shard and "
            "DistributedDataParallel are observed whole."
        )


def _whole_reason(engine: DeepSpeedEngine) -> str | None:
    stage = engine.zero_optimization_stage()
    if isinstance(engine, PipelineEngine):
        return "it is a PipelineEngine, which calls the layers of its stage one by one"
    if stage == 3:
        return "ZeRO-3 puts an empty tensor in the place of each parameter"
    if stage not in _STAGES:
        return f"ZeRO of stage {stage} partitions nothing"
    if engine.is_deepcompile_enabled():
        return "DeepCompile reduces gradients inside of its graphs"
    if engine.has_moe_layers:
        return "the experts of a MoE layer are others on each rank"
    return None


def _zero_reason(engine: DeepSpeedEngine, zero: Any) -> str | None:  # noqa: ANN401  (DeepSpeed's)
    if type(zero) is not DeepSpeedZeroOptimizer:
        return f"its optimizer is a {type(zero).__name__}, which keeps gradients elsewhere"
    if zero.cpu_offload:
        return "with offload_optimizer it keeps the reduced gradients in buffers of its own"
    if engine.fp16_enabled() or zero.torch_autocast_gradscaler is not None:
        return "it scales the loss, which was never tried (use bf16)"
    if dist.get_world_size(zero.dp_process_group) != dist.get_world_size():
        return "it is parallel in another way than by data, too"
    if any(getattr(parameter, "use_muon", False) for parameter in engine.module.parameters()):
        return "with Muon it keeps updates in the place of gradients"
    return None
