"""Lightning's `Trainer`, of `lightning.pytorch` or of `pytorch_lightning`, whichever is in use.

trainer = Trainer(..., callbacks=[LightningCallback(every=10)])
"""

from __future__ import annotations

import sys
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, final

from torch import Tensor

from ddpprobe.integrations.fit import Fit
from ddpprobe.integrations.lightning_loggers import sinks_of
from ddpprobe.probe import Probe
from ddpprobe.rank import torch_private

# They are two packages with the same classes: a Trainer knows those of its own.
_OLD_NAME = find_spec("lightning") is None or (
    "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
)
if TYPE_CHECKING or not _OLD_NAME:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    from pytorch_lightning import Callback, LightningModule, Trainer


@final
class LightningCallback(Callback):
    """Observes the module of a `Trainer` while `fit()` trains it.

    Steps are numbered as `trainer.global_step` counts them (of several optimizers it counts each),
    also when training resumes. With automatic optimization the loss of each sampled step is kept as
    `training_step` returned it. The probe pauses while the trainer validates or saves. The
    trainer's loggers are told of the run (see `loggers.LoggerLink`).

    Args:
        options: keywords of `ddpprobe.install`. `run_dir` is by default a new directory below
            `default_root_dir/ddpprobe`, or the newest one there if training resumes.
            `on_anomaly="stop"` sets `trainer.should_stop` on all ranks after the same step,
            instead of raising.
    """

    def __init__(self, **options: Any) -> None:  # noqa: ANN401  (install's)
        self._fit = Fit(options)

    @property
    def probe(self) -> Probe | None:
        """The probe of the training under way, to log numbers of your own."""
        return self._fit.probe

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Install: the module is wrapped, the process group there, a checkpoint loaded."""
        model = trainer.strategy.model or pl_module
        sinks = partial(sinks_of, trainer.loggers) if trainer.loggers else None
        self._fit.begin(model, trainer.default_root_dir, trainer.global_step, sinks)

    def on_train_batch_start(self, *_: object) -> None:
        """Go on."""
        self._fit.go_on()

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        """Log the loss as it was returned: Lightning divides it, and scales it under AMP."""
        if self.probe is None or not pl_module.automatic_optimization:
            return
        loss = loss.detach() * trainer.accumulate_grad_batches
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        scale = None if scaler is None else torch_private.scale_of(scaler)
        self.probe.log(loss=loss if scale is None else loss / scale)

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        """Stop if it is wished."""
        if self._fit.stopped_for is not None:
            trainer.should_stop = True

    def on_validation_start(self, *_: object) -> None:
        """Pause: what follows is no training."""
        self._fit.pause("validation")

    def on_save_checkpoint(self, *_: object) -> None:
        """Pause while the trainer writes."""
        self._fit.pause("checkpoint")

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Close the run for Ctrl-C: Lightning catches it, and ends the process by exit code 1.

        All others reach the script, which may catch them; who ends by one says so at its end.
        """
        if isinstance(exception, KeyboardInterrupt):
            self._fit.end()

    def on_train_end(self, *_: object) -> None:
        """Close the run."""
        self._fit.end()
