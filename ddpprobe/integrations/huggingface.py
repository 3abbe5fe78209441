"""Hugging Face's `Trainer`, and the trainers of TRL, which descend from it.

trainer = Trainer(..., callbacks=[DdpprobeCallback(every=10)])
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from accelerate.utils import extract_model_from_parallel
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ddpprobe.integrations.fit import Fit
from ddpprobe.integrations.loggers import Sink, TensorBoardSink, sink_of
from ddpprobe.probe import Probe
from ddpprobe.rank.hooks.copy_safe_hook import CopySafeObserver
from ddpprobe.rundir.fuse import Fuse

_LOGGERS = frozenset({"wandb", "mlflow", "tensorboard"})


@final
class DdpprobeCallback(TrainerCallback):
    """Observes the model of a `Trainer` from `train()` on.

    Steps are numbered as `state.global_step` counts them, also when training resumes. The loss is
    the one that the model returns, as the mean over the tokens of the step (see `_log_loss`).
    Between the end of a step and the next one the probe pauses if the trainer evaluates or saves.
    wandb, MLflow and TensorBoard, if `report_to` names them, are told of the run (see
    `loggers.LoggerLink`).

    Args:
        options: keywords of `ddpprobe.install`. `run_dir` is by default a new directory below
            `output_dir/ddpprobe`, or the newest one there if training resumes.
            `on_anomaly="stop"` sets `control.should_training_stop` on all ranks behind the same
            step, instead of raising.
    """

    def __init__(self, **options: Any) -> None:  # noqa: ANN401  (install's)
        self._fit = Fit(options)
        self._loss_hook: RemovableHandle | None = None
        self._micros = self._share = 1
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
        self._share = args.world_size if args.average_tokens_across_devices else 1
        # In front of the probe's own hooks, which would take the model's loss as it is.
        log = Fuse("the loss of the Trainer").guard(self._log_loss)
        self._take_off()
        self._loss_hook = extract_model_from_parallel(
            model, keep_torch_compile=False
        ).register_forward_hook(CopySafeObserver(log, takes=4), prepend=True, with_kwargs=True)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl,
        train_dataloader: DataLoader[Any] | None = None, **_: Any,  # noqa: ANN401  (the trainer's)
    ) -> None:  # fmt: skip
        """Go on, and know of how many micro-batches the step is."""
        self._fit.go_on()
        self._micros = args.gradient_accumulation_steps
        try:
            batches = len(train_dataloader) if train_dataloader is not None else 0
        except TypeError:  # of an IterableDataset
            return
        steps = math.ceil(batches / self._micros)
        if steps and state.global_step % steps == steps - 1:  # the last of an epoch takes the rest
            self._micros = batches - (steps - 1) * self._micros

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
        """Pause, as behind a step."""
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

    def _take_off(self) -> None:
        if self._loss_hook is not None:
            self._loss_hook.remove()
        self._loss_hook = None

    def _log_loss(
        self, _: nn.Module, __: object, kwargs: Mapping[str, object], output: object
    ) -> None:
        """Log the loss that a micro-batch would have alone.

        Told the number of tokens of the whole step (`num_items_in_batch`), the model divides by
        that what it has summed up over one micro-batch on one rank: with 4 micro-batches on 2 ranks
        its loss is an eighth of what it says. Untold, it divides by its own tokens, and the probe
        takes the loss as it is.
        """
        if self.probe is None or not torch.is_grad_enabled():
            return
        loss = output.get("loss") if isinstance(output, Mapping) else None
        if isinstance(loss, Tensor) and kwargs.get("num_items_in_batch") is not None:
            self.probe.log(loss=loss.detach() * (self._micros * self._share))
