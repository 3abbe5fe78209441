"""How a capture begins, alike on every rank, and ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, final

import torch

from ddpprobe.errors import CaptureError
from ddpprobe.inspect.capture.exchange import Exchange, same
from ddpprobe.inspect.capture.gathering import Gathering
from ddpprobe.inspect.capture.session import CaptureSession
from ddpprobe.inspect.capture.targets import Targets, close_names
from ddpprobe.inspect.capture.watcher import ModuleWatcher


@final
class Opening:
    """Opens a capture once and closes it.

    Args:
        targets: the chosen modules.
        watcher: their hooks.
        options: what must be the same on all ranks, for the check.
        wrong: complains about arguments (ValueError); asked where an error reaches all ranks.
        eager: whether compiled modules run eagerly while the capture is open.
        timeout: seconds to wait for other ranks.
    """

    def __init__(
        self,
        targets: Targets,
        watcher: ModuleWatcher,
        options: Mapping[str, Any],
        wrong: Callable[[], None],
        *,
        eager: bool,
        timeout: float,
    ) -> None:
        self._targets, self._watcher, self._options = targets, watcher, dict(options)
        self._wrong, self._eager, self._timeout = wrong, eager, timeout
        self._undo = ExitStack()
        self._opened = False

    def open(self, session: CaptureSession) -> None:
        """Agree with the other ranks and hang the hooks.

        Raises:
            CaptureError: see `Seen.open`.
        """
        if self._opened:
            raise CaptureError("this capture was opened before; make a new one")
        self._opened = True
        exchange = Exchange(self._timeout)
        answers = exchange.open(self._mine, self._check)
        names = dict.fromkeys(name for part in answers for name in part["names"])
        session.names = tuple(names)
        aliases = [pair for part in answers for pair in part["aliases"].items()]
        session.aliases = {alias: name for alias, name in aliases if name in names}
        session.rank, session.world_size = exchange.rank, exchange.world_size
        session.gathering = Gathering(exchange, session.group)
        with ExitStack() as undo:
            if self._eager:
                undo.enter_context(torch.compiler.set_stance("force_eager"))
            undo.callback(self._watcher.close)
            self._watcher.open()
            self._undo = undo.pop_all()

    def close(self) -> None:
        """Take every hook off; harmless if it is closed."""
        self._undo.close()

    def _mine(self) -> dict[str, Any]:
        self._wrong()
        targets = self._targets
        if targets.compiled and not self._eager:
            raise CaptureError(
                f"{targets.compiled[0]!r} runs inside torch.compile, which silently ignores hooks "
                'that come after its first call. Pass compiled="eager": compiled modules then run '
                "eagerly while the capture is open (rounding may differ). Or capture the model "
                "before compiling it, or a module around the compiled one."
            )
        return {
            "names": list(targets.modules),
            "aliases": targets.aliases,
            "unmatched": list(targets.unmatched),
            "close": [close_names(s, targets.known) for s in targets.unmatched],
            **self._options,
        }

    def _check(self, answers: list[dict[str, Any]]) -> None:
        for name in self._options:
            same(answers, name)
        for selector, close in zip(answers[0]["unmatched"], answers[0]["close"], strict=True):
            if all(selector in part["unmatched"] for part in answers):
                raise ValueError(f"{selector} matches no module. There are, for example: {close}")
        if not any(part["names"] for part in answers):
            raise ValueError(
                "no module is left to capture: exclude= or paramless=False takes all of them"
            )
