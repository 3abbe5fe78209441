"""Hugging Face's `Trainer`, and the trainers of TRL, which descend from it.

trainer = Trainer(..., callbacks=[DdpprobeCallback(every=10)])
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, final

from torch import Tensor, nn
from transformers import (
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from ddpprobe.integrations.fit import Fit
from ddpprobe.integrations.loggers import Sink, TensorBoardSink, sink_of
from ddpprobe.probe import Probe
from ddpprobe.rundir.fuse import Fuse

_LOGGERS = frozenset({"wandb", "mlflow", "tensorboard"})


@final
class DdpprobeCallback(TrainerCallback):
    """Observes the model of a `Trainer` from `train()` on.

    Steps are numbered as `state.global_step` counts them, also when training resumes. The loss is
    the one that the trainer trains on and reports, whatever the model returns (see `_listen`).
    Between the end of a step and the next one the probe pauses if the trainer evaluates or saves.
    wandb, MLflow and TensorBoard, if `report_to` names them, are told of the run (see
    `loggers.LoggerLink`).

    Args:
        options: keywords of `ddpprobe.install`. `run_dir` is by default a new directory below
            `output_dir/ddpprobe`, or the newest one there if training resumes.
            `on_anomaly="stop"` sets `control.should_training_stop` on all ranks after the same
            step, instead of raising.
    """

    def __init__(self, **options: Any) -> None:  # noqa: ANN401  (install's)
        self._fit = Fit(options)
        self._trainer: Any = None
        self._own_step: Any = None  # an attribute that somebody had put in front of the method
        self._writer: Any = None

    @property
    def probe(self) -> Probe | None:
        """The probe of the training under way, to log numbers of your own."""
        return self._fit.probe

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl,
        model: nn.Module, **_: Any,  # noqa: ANN401  (the trainer's)
    ) -> None:  # fmt: skip
        """Install: the model is wrapped, the process group there, a checkpoint loaded."""
        names = _LOGGERS.intersection(args.report_to)
        sinks = partial(self._sinks, names, args) if names else None
        self._fit.begin(model, args.output_dir, state.global_step, sinks)
        self._take_off()
        for trainer in filter(self._is_in, gc.get_objects()):
            self._listen(trainer)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl,
        **_: Any,  # noqa: ANN401  (the trainer's)
    ) -> None:  # fmt: skip
        """Go on."""
        self._fit.go_on()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl,
        **_: Any,  # noqa: ANN401  (the trainer's)
    ) -> None:  # fmt: skip
        """Stop if it is wished, and pause for what is no training."""
        control.should_training_stop |= self._fit.stopped_for is not None
        if control.should_evaluate or control.should_save:
            self._fit.pause("evaluation" if control.should_evaluate else "checkpoint")

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl,
        **_: Any,  # noqa: ANN401  (the trainer's)
    ) -> None:  # fmt: skip
        """Pause, as after a step."""
        self.on_step_end(args, state, control)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl,
        **_: Any,  # noqa: ANN401  (the trainer's)
    ) -> None:  # fmt: skip
        """Close the run."""
        self._take_off()
        self._fit.end()
        if self._writer is not None:
            self._writer.close()
        self._writer = None

    def _is_in(self, found: object) -> bool:
        """Whether it is the trainer of this callback, which is told of everything but that."""
        if not issubclass(type(found), Trainer):
            return False
        handler = getattr(found, "callback_handler", None)
        return any(known is self for known in getattr(handler, "callbacks", ()))

    def _sinks(self, names: frozenset[str], args: TrainingArguments) -> Iterator[Sink]:
        """Yield those of `report_to` that are known; the trainer's callbacks have started them."""
        for name, run in (("wandb", "run"), ("mlflow", "active_run")):
            client = getattr(sys.modules.get(name), run, None) if name in names else None
            sink = sink_of(client() if callable(client) else client, commit=True)
            if sink is not None:
                yield sink
        if "tensorboard" in names:
            # The trainer's own writer cannot be had, and a file takes one: this is a second file,
            # which TensorBoard shows below the same directory.
            from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  (if it is there)

            where = os.environ.get("TENSORBOARD_LOGGING_DIR") or Path(args.output_dir) / "runs"
            self._writer = SummaryWriter(Path(where).expanduser() / "ddpprobe")
            yield TensorBoardSink(self._writer)

    def _listen(self, trainer: Trainer) -> None:
        """Log what `training_step` returns of each micro-batch, times their number in the step.

        That is its share of the loss that the trainer reports, however it is divided. What the
        model returns is something else under many trainers: TRL's DPO has labels in its inputs, so
        the model returns a language model's loss, which nobody trains.
        """
        log = Fuse("the loss of the Trainer").guard(self._log_loss)
        step = trainer.training_step

        def training_step(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  (the trainer's)
            loss = step(*args, **kwargs)
            log(trainer, loss)
            return loss

        self._trainer, self._own_step = trainer, vars(trainer).get("training_step")
        trainer.training_step = training_step

    def _take_off(self) -> None:
        if self._trainer is not None and self._own_step is not None:
            self._trainer.training_step = self._own_step
        elif self._trainer is not None:
            del self._trainer.training_step
        self._trainer = None

    def _log_loss(self, trainer: Trainer, loss: Tensor) -> None:
        if self.probe is not None:
            self.probe.log(loss=loss.detach() * trainer.current_gradient_accumulation_steps)
