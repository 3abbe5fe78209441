"""One captured tensor: this rank's part, the whole, every rank's, and its statistics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, final

from torch import Tensor

from ddpprobe.errors import CaptureError
from ddpprobe.inspect.capture import plots
from ddpprobe.inspect.capture.gathering import Key, StatsRows, merge_ranks
from ddpprobe.inspect.capture.held_tensor import HeldTensor
from ddpprobe.inspect.capture.series import TensorStats
from ddpprobe.inspect.capture.session import CaptureSession, nothing

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@final
class CapturedTensor:
    """A tensor that a module took or gave, or the gradient with respect to it.

    Inside a structured output choose by path: `output["logits"]`, `output[0]`, `output["past.0"]`.

    `full`, `by_rank`, `stats`, `history` and the plots ask all ranks: call them on every rank, in
    the same order. `local`, and the others with `local=True`, ask nobody.
    """

    def __init__(
        self, session: CaptureSession, name: str, kind: str, path: str = "", call: int | None = None
    ) -> None:
        self._session, self._name, self._kind = session, name, kind
        self._path, self._call = path, call

    def __getitem__(self, path: str | int) -> CapturedTensor:
        longer = f"{self._path}.{path}" if self._path else str(path)
        return CapturedTensor(self._session, self._name, self._kind, longer, self._call)

    def __repr__(self) -> str:
        leaves = [f"[{leaf}]" if leaf else "" for leaf in self.leaves]
        return f"<{self._title}: {len(leaves)} tensors here {' '.join(leaves)}>"

    @property
    def leaves(self) -> tuple[str, ...]:
        """Paths of the tensors below this one, on this rank; ("",) for a bare tensor."""
        found = self._session.leaves(self._name, self._kind)
        return tuple(
            leaf for leaf in found if not self._path or f"{leaf}.".startswith(f"{self._path}.")
        )

    def local(self) -> Tensor:
        """Return this rank's part, as it was when it was captured. Asks no other rank.

        Raises:
            CaptureError: this rank has none; or copy=False and it was changed in place since.
        """
        found = self._find()
        if found is None:
            raise self._nothing()
        return found[1].tensor(self._title)

    def full(self, dim: int = 0, tp: str | int | None = None) -> Tensor:
        """Return the whole tensor on every rank: call it on all ranks.

        DTensors are assembled by their layout: shards of any dim, uneven ones too, replicas once,
        partial values reduced. Plain tensors are the ranks' parts of the batch and are joined in
        rank order; ranks on which the module did not run contribute nothing.

        Args:
            dim: along which the ranks' parts are joined: 0 for the batch.
            tp: what plain tensors inside a tensor-parallel computation are, where torch does not
                tell: "replicated" (checked bit by bit), or the dim whose shards the ranks hold.

        Returns:
            The tensor, on the device of this rank's part (on the CPU if it has none).

        Raises:
            CaptureError: the parts do not fit together, their layout is not known, no rank has
                any, or a rank did not call within the capture's timeout.
        """
        if not (tp is None or tp == "replicated" or isinstance(tp, int)):
            raise CaptureError(f'tp must be None, "replicated" or a dim, got {tp!r}')
        return self._session.gather().whole(self._title, self._find_or_explain, dim, tp)

    def by_rank(self) -> dict[int, Tensor]:
        """Return each rank's part, by rank, on every rank: call it on all ranks.

        Raises:
            CaptureError: no rank has any, or a rank did not call within the capture's timeout.
        """
        return self._session.gather().by_rank(self._title, self._find_or_explain)

    def stats(self, *, local: bool = False) -> TensorStats:
        """Return the statistics over all kept calls and all ranks, each element counted once.

        Args:
            local: only of this rank's part; then no other rank is asked.
        """
        return self._statistics(calls=False, local=local)[0]

    def history(self, *, local: bool = False) -> list[TensorStats]:
        """Return the statistics call by call, oldest first.

        With keep="stats" neighbours are merged when there are too many: `calls` says how many
        calls one entry covers.

        Args:
            local: only of this rank's part; then no other rank is asked.
        """
        return self._statistics(calls=True, local=local)

    def plot_hist(self, ax: Axes | None = None, *, local: bool = False) -> Axes:
        """Draw the histograms as an image: calls to the right, values up, log(count) in colour.

        Args:
            ax: where to draw; None: a new figure.
            local: only of this rank's part; then no other rank is asked.
        """
        return plots.histograms(self.history(local=local), ax)

    def plot_stats(self, axes: Sequence[Axes] | None = None, *, local: bool = False) -> list[Axes]:
        """Draw mean, std and near_zero over the calls.

        Args:
            axes: three of them; None: a new figure.
            local: only of this rank's part; then no other rank is asked.
        """
        return plots.statistics(self.history(local=local), axes)

    @property
    def _title(self) -> str:
        path = f"[{self._path}]" if self._path else ""
        call = f" of call {self._call}" if self._call is not None else ""
        return f"{self._name or '(root)'}.{self._kind}{path}{call}"

    def _statistics(self, *, calls: bool, local: bool) -> list[TensorStats]:
        session = self._session
        if local:
            mine = self._rows()
            if not mine:
                raise self._nothing()
            heard = [(session.rank, mine[0])]
            return merge_ranks(mine[0].key, heard, session.meter, calls=calls)
        merged = session.gather().merged(self._title, self._rows, session.meter, calls=calls)
        if not merged:
            raise self._nothing()
        if len(merged) > 1:
            raise self._several([leaf for _, _, leaf in merged])
        return next(iter(merged.values()))

    def _rows(self) -> list[StatsRows]:
        leaf = self._leaf()
        if leaf is None:
            return []
        key: Key = (self._name, self._kind, leaf)
        rows = self._session.rows(key, self._call)
        return [rows] if rows is not None else []

    def _leaf(self) -> str | None:
        """Return the one path that is meant, None if there is no tensor here."""
        leaves = self.leaves
        if len(leaves) > 1:
            raise self._several(leaves)
        there = self._session.leaves(self._name, self._kind)
        if not leaves and there and self._path:
            raise CaptureError(f"{self._title} does not exist; there are: {_listed(there)}")
        return leaves[0] if leaves else None

    def _find(self) -> tuple[str, HeldTensor, bool] | None:
        """Return this rank's tensor of the call that is meant: the last one that has it."""
        if self._session.statistics:
            raise CaptureError(
                'keep="stats" keeps no tensors: read .stats(), .history() or the plots, '
                'or capture with keep="last".'
            )
        leaf = self._leaf()
        if leaf is None:
            return None
        alike = self._session.inference.alike((self._name, self._kind, leaf))
        for call in reversed(self._session.calls(self._name, self._call)):
            if (self._kind, leaf) in call.tensors:
                return leaf, call.tensors[self._kind, leaf], alike
        return None

    def _find_or_explain(self) -> tuple[str, HeldTensor, bool] | None:
        """As `_find`, for a question to all ranks: a failure here is told to all of them."""
        found = self._find()
        session = self._session
        if found is None and (session.world_size == 1 or session.trouble()):
            raise self._nothing()
        return found

    def _nothing(self) -> CaptureError:
        return nothing(self._title, self._session.why_nothing(self._name, self._kind))

    def _several(self, leaves: Sequence[str]) -> CaptureError:
        return CaptureError(
            f"{self._title} holds several tensors: choose one of {_listed(leaves)}, "
            f'for example .{self._kind}["{leaves[0]}"]'
        )


def _listed(leaves: Sequence[str]) -> str:
    return ", ".join(f'["{leaf}"]' for leaf in leaves)
