"""What the ranks tell one another when the user asks for a whole tensor, on every rank.

Who asks for what is agreed through the job's own store first, so that a rank that does not come is
named and nothing hangs; the tensors then go through a gloo group of our own, as bytes. The training
groups are never used. Gloo even for GPU tensors: when a rank is missing it raises, where NCCL's
watchdog would end the process.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import Store

from ddpprobe.errors import CaptureError, InstallError
from ddpprobe.rank import rendezvous, torch_private

CHUNK = 1 << 28  # bytes in one broadcast

_groups: dict[float, tuple[object, dist.ProcessGroup]] = {}  # by timeout: (WORLD, our group)
_opened = 0


@final
class Exchange:
    """One capture's line to the other ranks.

    Attributes:
        rank, world_size: of this process.
    """

    def __init__(self, timeout: float) -> None:
        global _opened  # noqa: PLW0603  (the count of captures is what all ranks have in common)
        _opened += 1
        self.rank, self.world_size = 0, 1
        self._timeout = timeout
        self._rounds = 0
        self._store: Store | None = None
        self._group: dist.ProcessGroup | None = None
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
            self._store = torch_private.default_store()
        self._topic = f"ddpprobe/capture/{_opened}"
        self._name = ""  # once all ranks have met

    def open(self, mine: Callable[[], Mapping[str, Any]], check: _Check) -> list[dict[str, Any]]:
        """Agree that the capture begins; return what every rank answers, in rank order.

        Args:
            mine: makes this rank's part (JSON); a ValueError from it refuses on all ranks.
            check: judges all parts, on rank 0; a ValueError refuses on all ranks.

        Raises:
            CaptureError: a rank refused or did not come.
        """

        def part() -> dict[str, Any]:
            return {**mine(), "grouped": self._known_group() is not None}

        answers = self._round("ddpprobe.capture(...)", part, check)
        if self.world_size > 1:
            known = self._known_group()
            if known is None or not all(t["grouped"] for t in answers):
                limit = datetime.timedelta(seconds=self._timeout)
                known = dist.new_group(backend="gloo", timeout=limit)
                _groups[self._timeout] = (dist.group.WORLD, known)
            self._group = known
        return answers

    def tell(self, asked: str, mine: Callable[[], Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return what every rank tells about the same question, in rank order.

        Args:
            asked: the question, as a user would write it.
            mine: makes this rank's part (JSON); a ValueError from it is raised on all ranks.

        Raises:
            CaptureError: a rank asked for something else, did not ask, or cannot tell.
        """

        def check(answers: list[dict[str, Any]]) -> None:
            questions = [t["asked"] for t in answers]
            if len(set(questions)) > 1:
                lines = "; ".join(f"rank {r}: {q}" for r, q in enumerate(questions))
                raise ValueError(
                    "the ranks ask for different things, but all of them must ask for the same, "
                    f"in the same order ({lines})"
                )

        return self._round(asked, lambda: {"asked": asked, **mine()}, check)

    def send(self, mine: Tensor | None, sizes: Mapping[int, int]) -> dict[int, Tensor]:
        """Return the bytes that each rank of `sizes` sends, uint8 [size] on the CPU.

        Args:
            mine: this rank's bytes, uint8 on the CPU, if it is one of them.
            sizes: number of bytes by sending rank, equal on all ranks.

        Raises:
            CaptureError: a rank did not take part to the end.
        """
        got: dict[int, Tensor] = {}
        for rank, size in sizes.items():
            if rank == self.rank and mine is not None:
                got[rank] = mine
            else:
                got[rank] = torch.empty(size, dtype=torch.uint8, device="cpu")
            if self._group is None or not size:
                continue
            try:
                for piece in got[rank].split(CHUNK):
                    dist.broadcast(piece, src=rank, group=self._group)
            except RuntimeError as error:
                _groups.pop(self._timeout, None)
                self._group, self._store = None, None
                raise CaptureError(
                    f"the ranks lost one another while rank {rank} sent its part ({error}). "
                    "This capture can gather no more; .local() still works."
                ) from error
        return got

    def _known_group(self) -> dist.ProcessGroup | None:
        world, group = _groups.get(self._timeout, (None, None))
        return group if world is not None and world is dist.group.WORLD else None

    def _round(
        self, call: str, mine: Callable[[], Mapping[str, Any]], check: _Check
    ) -> list[dict[str, Any]]:
        if self.world_size == 1:
            try:
                answers = [dict(mine())]
                check(answers)
            except CaptureError:
                raise
            except ValueError as error:
                raise CaptureError(str(error)) from None
            return answers
        if self._store is None or not dist.is_initialized():
            raise CaptureError(
                f"{call} needs the other ranks, but the process group is gone or this capture "
                "lost them. Gather before destroy_process_group(); .local() still works."
            )

        def decide(answers: list[dict[str, Any]]) -> dict[str, Any]:
            check(answers)
            return {"answers": answers}

        try:
            if not self._name:
                self._name = rendezvous.meet(
                    self._store, self._topic, self.rank, self.world_size, self._timeout, call
                )
            self._rounds += 1
            name = f"{self._name}/{self._rounds}"
            answer = rendezvous.round_trip(
                self._store, name, self.rank, self.world_size, mine, decide, self._timeout, call
            )
        except InstallError as error:
            about = "" if call in str(error) else f" ({call})"
            raise CaptureError(f"{error}{about}") from None
        # Everybody who speaks in this round has read the last one's answer.
        self._store.delete_key(f"{name}/{self.rank}")
        if self.rank == 0 and self._rounds > 1:
            self._store.delete_key(f"{self._name}/{self._rounds - 1}/answer")
        result: list[dict[str, Any]] = answer["answers"]
        return result


_Check = Callable[[list[dict[str, Any]]], object]


def same(answers: Sequence[Mapping[str, Any]], name: str) -> None:
    """Check that every rank gave the same option.

    Raises:
        ValueError: they did not; the text names two that differ.
    """
    for rank, part in enumerate(answers):
        if part[name] != answers[0][name]:
            raise ValueError(
                f"{name} must be the same on every rank, got {answers[0][name]!r} on rank 0 and "
                f"{part[name]!r} on rank {rank}"
            )
