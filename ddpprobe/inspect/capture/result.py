"""The modules of a capture by name; opening and closing it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Self, final

from ddpprobe.errors import CaptureError, UnknownName
from ddpprobe.inspect.capture import plots
from ddpprobe.inspect.capture.gathering import merge_ranks
from ddpprobe.inspect.capture.series import StatsTable
from ddpprobe.inspect.capture.session import CaptureSession, nothing
from ddpprobe.inspect.capture.sites import KINDS
from ddpprobe.inspect.capture.targets import close_names
from ddpprobe.inspect.capture.tensors import CapturedTensor

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

    from ddpprobe.inspect.capture.opening import Opening


class _Tensors:
    """`.input`, `.output` and `.grad` of a module or of one of its calls."""

    def __init__(self, session: CaptureSession, name: str, call: int | None = None) -> None:
        self._session, self._name, self._call = session, name, call

    @property
    def input(self) -> CapturedTensor:
        """What the module was called with; `["0"]` by position, `["mask"]` by keyword."""
        return CapturedTensor(self._session, self._name, "input", "", self._call)

    @property
    def output(self) -> CapturedTensor:
        """What the module returned."""
        return CapturedTensor(self._session, self._name, "output", "", self._call)

    @property
    def grad(self) -> CapturedTensor:
        """The gradient of the loss with respect to the output; the last backward's, if several."""
        return CapturedTensor(self._session, self._name, "grad", "", self._call)


@final
class CapturedCall(_Tensors):
    """One call of a module.

    Attributes:
        index: its number on this rank, from 0.
    """

    def __init__(self, session: CaptureSession, name: str, call: int) -> None:
        super().__init__(session, name, call)
        self.index = call


@final
class CapturedModule(_Tensors):
    """One module; its own `.input`, `.output` and `.grad` are those of the last call.

    Attributes:
        name: its FQN without wrapper prefixes.
    """

    def __init__(self, session: CaptureSession, name: str) -> None:
        super().__init__(session, name)
        self.name = name

    @property
    def count(self) -> int:
        """How often the module was called on this rank while the capture was open."""
        site = self._session.sites.by_name.get(self._name)
        return site.count if site is not None else 0

    @property
    def calls(self) -> list[CapturedCall]:
        """The calls whose tensors are kept on this rank, oldest first."""
        kept = self._session.calls(self._name)
        return [CapturedCall(self._session, self._name, call.index) for call in kept]

    @property
    def stored(self) -> Tensor | dict[str, Tensor] | None:
        """This rank's part of the last output, or of each tensor in it; None without a call.

        Raises:
            CaptureError: keep="stats"; or copy=False and it was changed in place since.
        """
        output = self.output
        if len(output.leaves) < 2:
            return output.local() if output.leaves else None
        return {leaf: output[leaf].local() for leaf in output.leaves}

    def __repr__(self) -> str:
        return f"<{self.name or '(root)'}: {self.count} calls here>"


@final
class Capture(Mapping[str, CapturedModule]):
    """A capture: a context manager, and what it has seen, by FQN, or by position: `seen[0]`.

    The names are those captured on any rank, in the same order on all of them, so that a loop over
    them may ask all ranks. What was taken stays readable after the capture is closed.
    """

    def __init__(self, session: CaptureSession, opening: Opening) -> None:
        self._session, self._opening = session, opening

    def open(self) -> Self:
        """Hang the hooks on the model: call it on all ranks, once.

        Raises:
            CaptureError: on every rank: nothing matches, a module is compiled, the options differ
                between ranks, or a rank did not come.
        """
        self._opening.open(self._session)
        return self

    def close(self) -> None:
        """Take every hook off; what was taken stays. Asks no other rank; may be called again."""
        self._opening.close()

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getitem__(self, name: str | int) -> CapturedModule:
        session = self._session
        session.gather()  # raises if this capture was never opened
        if isinstance(name, int):
            if not -len(self) <= name < len(self):
                raise UnknownName(
                    f"there is no module {name} of {len(self)} captured ones, numbered from 0"
                )
            name = session.names[name]
        if not isinstance(name, str):
            raise UnknownName(f"give the name of a captured module, or its number, got {name!r}")
        first = session.aliases.get(name, name)
        if first not in session.names:
            close = close_names(name, session.names) or "no module"
            raise UnknownName(f"{name!r} is not captured; captured are, among others: {close}")
        site = session.sites.by_name.get(first)
        if session.world_size == 1 and (site is None or not site.count):
            raise nothing(first or "(root)", session.why_nothing(first, "output"))
        return CapturedModule(session, first)

    @property
    def stored(self) -> list[Tensor | dict[str, Tensor] | None]:
        """This rank's `CapturedModule.stored` of each module, in order. Asks no other rank."""
        return [CapturedModule(self._session, name).stored for name in self]

    def __iter__(self) -> Iterator[str]:
        return iter(self._session.names)

    def __len__(self) -> int:
        return len(self._session.names)

    def __contains__(self, name: object) -> bool:
        return name in self._session.names or name in self._session.aliases

    def __repr__(self) -> str:
        return f"<capture of {len(self)} modules: {', '.join(map(repr, list(self)[:8]))}>"

    def stats(self, *, local: bool = False) -> StatsTable:
        """Return the statistics of every captured tensor, over calls and ranks; prints as a table.

        Args:
            local: only of this rank's parts; otherwise call it on all ranks.
        """
        session = self._session
        gathering = session.gather()

        def mine() -> list[Any]:
            return [rows for key in session.held() if (rows := session.rows(key)) is not None]

        if local:
            merged = [
                merge_ranks(r.key, [(session.rank, r)], session.meter, calls=False) for r in mine()
            ]
            return StatsTable(stats for one in merged for stats in one)
        found = gathering.merged("seen.stats()", mine, session.meter, calls=False)
        order = {name: i for i, name in enumerate(session.names)}
        keys = sorted(found, key=lambda key: order[key[0]])  # stable: kinds and leaves as they came
        return StatsTable(stats for key in keys for stats in found[key])

    def plot_hist(self, kind: str = "output", *, local: bool = False) -> Figure:
        """Draw the histograms over the calls, an image per module, as one figure.

        Args:
            kind: input, output or grad.
            local: only of this rank's parts; otherwise call it on all ranks.

        Raises:
            CaptureError: there is no such kind, nothing of it was captured, or matplotlib is not
                installed.
        """
        return plots.histogram_grid(self._histories(kind, local=local))

    def plot_stats(self, kind: str = "output", *, local: bool = False) -> Figure:
        """Draw mean, std and near_zero over the calls, a line per module, as one figure.

        Args:
            kind: input, output or grad.
            local: only of this rank's parts; otherwise call it on all ranks.

        Raises:
            CaptureError: there is no such kind, nothing of it was captured, or matplotlib is not
                installed.
        """
        return plots.statistics_lines(self._histories(kind, local=local))

    def _histories(self, kind: str, *, local: bool) -> dict[str, list[Any]]:
        if kind not in KINDS:
            raise CaptureError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
        session = self._session

        def mine() -> list[Any]:
            found = (session.rows(key) for key in session.held() if key[1] == kind)
            return [rows for rows in found if rows is not None]

        if local:
            merged = {
                r.key: merge_ranks(r.key, [(session.rank, r)], session.meter, calls=True)
                for r in mine()
            }
        else:
            what = f"seen, every {kind}"
            merged = session.gather().merged(what, mine, session.meter, calls=True)
        return {f"{name or '(root)'} {leaf}".strip(): h for (name, _, leaf), h in merged.items()}
