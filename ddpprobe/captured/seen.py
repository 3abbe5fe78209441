"""The modules of a capture by name; opening and closing it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Self, final

from ddpprobe.captured import plots
from ddpprobe.captured.errors import UnknownName
from ddpprobe.captured.gathering import merge_ranks
from ddpprobe.captured.series import Table
from ddpprobe.captured.shelf import Shelf, nothing
from ddpprobe.captured.targets import close_names
from ddpprobe.captured.tensors import CapturedTensor

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ddpprobe.captured.opening import Opening


class _Tensors:
    """`.input`, `.output` and `.grad` of a module or of one of its calls."""

    def __init__(self, shelf: Shelf, name: str, call: int | None = None) -> None:
        self._shelf, self._name, self._call = shelf, name, call

    @property
    def input(self) -> CapturedTensor:
        """What the module was called with; `["0"]` by position, `["mask"]` by keyword."""
        return CapturedTensor(self._shelf, self._name, "input", "", self._call)

    @property
    def output(self) -> CapturedTensor:
        """What the module returned."""
        return CapturedTensor(self._shelf, self._name, "output", "", self._call)

    @property
    def grad(self) -> CapturedTensor:
        """The gradient of the loss with respect to the output; the last backward's, if several."""
        return CapturedTensor(self._shelf, self._name, "grad", "", self._call)


@final
class CapturedCall(_Tensors):
    """One call of a module.

    Attributes:
        index: its number on this rank, from 0.
    """

    def __init__(self, shelf: Shelf, name: str, call: int) -> None:
        super().__init__(shelf, name, call)
        self.index = call


@final
class CapturedModule(_Tensors):
    """One module; its own `.input`, `.output` and `.grad` are those of the last call.

    Attributes:
        name: its FQN without wrapper prefixes.
    """

    def __init__(self, shelf: Shelf, name: str) -> None:
        super().__init__(shelf, name)
        self.name = name

    @property
    def count(self) -> int:
        """How often the module was called on this rank while the capture was open."""
        site = self._shelf.sites.by_name.get(self._name)
        return site.count if site is not None else 0

    @property
    def calls(self) -> list[CapturedCall]:
        """The calls whose tensors are kept on this rank, oldest first."""
        kept = self._shelf.calls(self._name)
        return [CapturedCall(self._shelf, self._name, call.index) for call in kept]

    def __repr__(self) -> str:
        return f"<{self.name or '(root)'}: {self.count} calls here>"


@final
class Seen(Mapping[str, CapturedModule]):
    """A capture: a context manager, and what it has seen, by FQN.

    The names are those captured on any rank, in the same order on all of them, so that a loop over
    them may ask all ranks. What was taken stays readable after the capture is closed.
    """

    def __init__(self, shelf: Shelf, opening: Opening) -> None:
        self._shelf, self._opening = shelf, opening

    def open(self) -> Self:
        """Hang the hooks on the model: call it on all ranks, once.

        Raises:
            CaptureError: on every rank: nothing matches, a module is compiled, the options differ
                between ranks, or a rank did not come.
        """
        self._opening.open(self._shelf)
        return self

    def close(self) -> None:
        """Take every hook off; what was taken stays. Asks no other rank; may be called again."""
        self._opening.close()

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getitem__(self, name: str) -> CapturedModule:
        shelf = self._shelf
        shelf.gather()  # raises if this capture was never opened
        first = shelf.aliases.get(name, name)
        if first not in shelf.names:
            close = close_names(name, shelf.names) or "no module"
            raise UnknownName(f"{name!r} is not captured; captured are, among others: {close}")
        site = shelf.sites.by_name.get(first)
        if shelf.world_size == 1 and (site is None or not site.count):
            raise nothing(first or "(root)", shelf.why_nothing(first, "output"))
        return CapturedModule(shelf, first)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shelf.names)

    def __len__(self) -> int:
        return len(self._shelf.names)

    def __contains__(self, name: object) -> bool:
        return name in self._shelf.names or name in self._shelf.aliases

    def __repr__(self) -> str:
        return f"<capture of {len(self)} modules: {', '.join(map(repr, list(self)[:8]))}>"

    def stats(self, *, local: bool = False) -> Table:
        """Return the statistics of every captured tensor, over calls and ranks; prints as a table.

        Args:
            local: only of this rank's parts; otherwise call it on all ranks.
        """
        shelf = self._shelf
        gathering = shelf.gather()

        def mine() -> list[Any]:
            return [rows for key in shelf.held() if (rows := shelf.rows(key)) is not None]

        if local:
            merged = [
                merge_ranks(r.key, [(shelf.rank, r)], shelf.meter, calls=False) for r in mine()
            ]
            return Table(stats for one in merged for stats in one)
        found = gathering.merged("seen.stats()", mine, shelf.meter, calls=False)
        order = {name: i for i, name in enumerate(shelf.names)}
        keys = sorted(found, key=lambda key: order[key[0]])  # stable: kinds and leaves as they came
        return Table(stats for key in keys for stats in found[key])

    def plot_hist(self, kind: str = "output", *, local: bool = False) -> Figure:
        """Draw the histograms over the calls, an image per module, as one figure.

        Args:
            kind: input, output or grad.
            local: only of this rank's parts; otherwise call it on all ranks.
        """
        return plots.histogram_grid(self._histories(kind, local=local))

    def plot_stats(self, kind: str = "output", *, local: bool = False) -> Figure:
        """Draw mean, std and near_zero over the calls, a line per module, as one figure.

        Args:
            kind: input, output or grad.
            local: only of this rank's parts; otherwise call it on all ranks.
        """
        return plots.statistics_lines(self._histories(kind, local=local))

    def _histories(self, kind: str, *, local: bool) -> dict[str, list[Any]]:
        shelf = self._shelf

        def mine() -> list[Any]:
            found = (shelf.rows(key) for key in shelf.held() if key[1] == kind)
            return [rows for rows in found if rows is not None]

        if local:
            merged = {
                r.key: merge_ranks(r.key, [(shelf.rank, r)], shelf.meter, calls=True)
                for r in mine()
            }
        else:
            what = f"seen, every {kind}"
            merged = shelf.gather().merged(what, mine, shelf.meter, calls=True)
        return {f"{name or '(root)'} {leaf}".strip(): h for (name, _, leaf), h in merged.items()}
