"""What the head takes from another node: words of that node's own ranks, within bounds.

Frames are checksummed and pushes need a secret, which tells of accidents and of strangers. A node
of the job may be broken, or lie: here it can do so about its own ranks only. Every bound lies far
beyond what a healthy node says.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain

from ddpprobe.daemon.requests import Request
from ddpprobe.records.events import Ended, Told
from ddpprobe.records.fate import Fate, RaisedError, Reason
from ddpprobe.records.identity_cache import IdentityCache
from ddpprobe.records.rank_names import numbers_text
from ddpprobe.records.step import KINDS, PLACEMENTS, SEVERAL, FirstBad, Site, StepRecord

# Ahead of the head's own ranks. DDP keeps ranks within one step of each other, a pipeline within
# its stages, local SGD within one period, of hundreds of steps; ten thousand are another job.
AHEAD_STEPS = 10_000
MOST_ELEMENTS = 1 << 48  # in one count: 2 ** 15 ranks add up to what an int64 holds
MOST_ORDER = 1 << 62
MAX_SITES = 1 << 16  # that one node may name in an attempt beyond those that are known
MAX_NAME = 4096  # characters, of a module, a parameter or a number
MAX_NUMBERS = 1 << 14  # of one rank and step
MAX_WISH_STEPS = 32  # half of the captures that scripts can have in one attempt
_TABLES = 64  # as many as the decoder keeps
MAX_WISHES = 4096  # the ranks of a node ask for the same steps


class Claims:
    """Whose ranks are whose: by the roster, else the rank is of the first node to speak for it.

    Args:
        world_size: of the job.
        own: the head's own ranks, which are nobody else's; no roster names them.
        roster: ranks by node; None: there is none.
    """

    def __init__(
        self, world_size: int, own: Iterable[int], roster: Mapping[str, frozenset[int]] | None
    ) -> None:
        self.world_size = world_size
        self.rostered = roster is not None
        self._own = frozenset() if self.rostered else frozenset(own)
        listed = (roster or {}).items()
        self._owner = {rank: node for node, ranks in listed for rank in ranks}

    def hold(self, node: str, ranks: Iterable[int]) -> bool:
        """Whether a node may speak for all of these ranks."""
        return all(
            0 <= rank < self.world_size
            and rank not in self._own
            and self._owner.get(rank, None if self.rostered else node) == node
            for rank in ranks
        )

    def note(self, node: str, ranks: Iterable[int]) -> None:
        """Remember for whom a node has spoken."""
        if not self.rostered:
            self._owner.update(dict.fromkeys(ranks, node))


class KnownSites:
    """The sites that are known; what one node may add to them is bounded."""

    def __init__(self) -> None:
        self._known: set[tuple[str, str, str]] = set()
        self._last: dict[str, tuple[Site, ...]] = {}  # the table a node used last, by its name
        self._added: dict[str, int] = {}

    def take(self, node: str, sites: tuple[Site, ...]) -> bool:
        """Account for a table; False if the node has named too many."""
        if self._last.get(node) is sites:
            return True
        new = _keys_of(sites) - self._known
        added = self._added.get(node, 0) + len(new)
        if added > MAX_SITES:
            return False
        self._known |= new
        self._added[node], self._last[node] = added, sites
        return True


def fault_of_ranks(delivery: StepRecord | Ended | Request | Told, node: str, claims: Claims) -> str:
    """Say for which ranks a node may not speak, "" if it may for all of them."""
    if isinstance(delivery, Request):
        ranks: tuple[int, ...] = (delivery.rank,)
    elif isinstance(delivery, Told):
        ranks = (delivery.fate.rank,)
    else:
        ranks = delivery.ranks
    if not claims.hold(node, ranks):
        return f"it speaks for ranks that are not its own: {numbers_text(ranks)}"
    if not ranks or len(set(ranks)) < len(ranks):
        return f"it names no rank, or one of them twice: {numbers_text(ranks)}"
    return ""


def fault_of_step(delivery: StepRecord | Request, horizon: float) -> str:
    """Say why a step cannot be, "" if it can; `horizon` is where most of the job is."""
    if 0 <= delivery.step <= horizon + AHEAD_STEPS:
        return ""
    return f"step {delivery.step}, while the job is at {horizon}"


def fault_of_fate(fate: Fate, node: str) -> str:
    """Say what in the end of a rank its node's daemon would not say, "" if it may be taken.

    In which order processes ended only a daemon's own eyes have seen (`Fate.witness`): another
    one's name there would order these ends among those of its ranks.
    """
    if fate.node != node or (fate.witness and not fate.witness.startswith(f"{node}/")):
        return "an end of a rank that another node's daemon has seen"
    said = _texts_of(fate.error) if fate.error is not None else ()
    if max(map(len, (fate.how, fate.witness, fate.launcher, *said))) > MAX_NAME:
        return f"an end of a rank with a text of more than {MAX_NAME} characters"
    clock = fate.clock
    numbers = (fate.time_ns, fate.order, *((clock.steps, clock.micro, clock.step) if clock else ()))
    return "" if max(numbers) < MOST_ORDER else "an end of a rank with a number that cannot be"


def _texts_of(error: RaisedError | Reason) -> Iterator[str]:
    yield from (error.type, error.message, error.where, error.script, error.group)
    if isinstance(error, RaisedError):
        yield error.behind
        for reason in filter(None, (error.cause, error.handled)):
            yield from _texts_of(reason)


def fault_of_wish(taken: Collection[int], step: int) -> str:
    """Say why a node that has wished for captures at the steps `taken` may have no more."""
    steps = set(taken)
    if len(taken) < MAX_WISHES and (step in steps or len(steps) < MAX_WISH_STEPS):
        return ""
    return "its scripts ask for more captures than one node may"


def fault_of_numbers(record: StepRecord) -> str:
    """Say what in a record no rank of ours would write, "" if it can be merged."""
    return next(filter(None, _faults_of_numbers(record)), "")


def _faults_of_numbers(record: StepRecord) -> Iterator[str]:
    ranks = set(record.ranks)
    whole = all(type(rank) is int for rank in (*record.ranks, *record.missing))
    strangers = ranks.isdisjoint(record.missing) and ranks.issuperset(record.scalars)
    if not whole or list(record.ranks) != sorted(ranks) or not strangers:
        yield "its parts name other ranks than the record does"
    if record.counts.size and not 0 <= record.counts.min() <= record.counts.max() <= MOST_ELEMENTS:
        yield "a count of elements that cannot be"
    if not 0 <= record.wall_time_ns < MOST_ORDER:
        yield f"a time that cannot be: {record.wall_time_ns}"
    if record.first_bad is not None and not _is_witness(record.first_bad, record):
        yield "a first non-finite tensor of another rank or step, or with numbers that cannot be"
    for told in record.scalars.values():
        if len(told) > MAX_NUMBERS or any(len(name) > MAX_NAME for name in told):
            yield f"more than {MAX_NUMBERS} numbers of one rank, or a name that is too long"
        if any(isinstance(value, int) and abs(value) >= 2**63 for value in told.values()):
            yield "a number that does not fit into 64 bits"
    yield _fault_of_table(record.sites)
    yield _fault_of_digests(record)


def _is_witness(bad: FirstBad, record: StepRecord) -> bool:
    counts = (bad.nan, bad.pos_inf, bad.neg_inf, bad.numel)
    texts = (bad.fqn or "", bad.leaf)
    return (
        (bad.rank in record.ranks or bad.rank == SEVERAL)
        and all(0 <= count <= MOST_ELEMENTS for count in counts)
        and -1 <= bad.step <= record.step  # a later one would make the detectors deaf until then
        and -1 <= bad.micro < MOST_ELEMENTS
        and abs(bad.order) <= MOST_ORDER
        and all(len(text) <= MAX_NAME for text in texts)
    )


def _fault_of_digests(record: StepRecord) -> str:
    own = sum(1 << rank for rank in record.ranks)
    held = chain.from_iterable(held.values() for held in record.digests.values())
    if any(mask & ~own for mask in held):
        return "checksums of ranks that it does not name"
    longest = max(map(len, chain.from_iterable(record.digests)), default=0)
    if len(record.digests) > MAX_SITES or longest > MAX_NAME:
        return "too many parameters, or a name that is too long"
    return ""


def _make_fault_of_table(sites: tuple[Site, ...]) -> str:
    if len({site.key for site in sites}) < len(sites):
        return "a site that stands twice in one table"
    for site in sites:
        if site.kind not in KINDS or site.placement not in PLACEMENTS:
            return f"a site of kind {site.kind!r:.40} and placement {site.placement!r:.40}"
        if max(map(len, (site.fqn, site.leaf, site.dtype))) > MAX_NAME:
            return f"a name of a site with more than {MAX_NAME} characters"
    return ""


def _make_keys_of(sites: tuple[Site, ...]) -> frozenset[tuple[str, str, str]]:
    return frozenset(site.key for site in sites)


_fault_of_table = IdentityCache(_make_fault_of_table, _TABLES)
_keys_of = IdentityCache(_make_keys_of, _TABLES)
