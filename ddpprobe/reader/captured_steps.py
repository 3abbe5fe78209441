"""What was captured in a run: the store's events and the packs that are not folded yet, as one.

A daemon may fold and delete while we read. So packs are listed and opened first, the store after:
whatever went in between is in the store.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ddpprobe.errors import PackDamaged, StoreDamaged, TensorError
from ddpprobe.reader.tensors import (
    Captured,
    GlobalTensor,
    PartSource,
    RankTensor,
    StoredCall,
    site_of,
)
from ddpprobe.records.near_names import nearest
from ddpprobe.records.step import ROOT
from ddpprobe.rundir import paths
from ddpprobe.rundir.tensor_pack import Pack, TensorKey
from ddpprobe.store.captures import dtypes
from ddpprobe.store.captures.event import (
    CaptureEvent,
    Entry,
    captures_key,
    event_of,
    planned,
)
from ddpprobe.store.captures.packs import attempts_with_packs, open_packs, packs_of
from ddpprobe.store.captures.places import Box, HeldPart
from ddpprobe.store.captures.reader import StoredEvent, expired_steps, stored_steps
from ddpprobe.store.manifest import Lost, Manifest, manifest_path

if TYPE_CHECKING:
    from collections.abc import Sequence

_SITE = re.compile(r"(?P<fqn>.*):(?P<kind>[a-z_]+)(?:\[(?P<leaf>.*)\])?", re.DOTALL)
_PRINTED = re.compile(r"(?P<fqn>.*)\[(?P<leaf>.*)\]:(?P<kind>[a-z_]+)", re.DOTALL)  # of a `Site`
# Of the module's state, not of a call.
STATE = ("param", "grad", "buffer")
_SHOWN = 8
LOOKS = 5  # a daemon folds, or retention takes away, while we look


@dataclass(frozen=True, slots=True)
class _InStore:
    stored: StoredEvent
    entry: Entry
    part: int

    def read(self, inner: Box) -> NDArray[Any]:
        return self.stored.read(self.entry, self.part, inner)


@dataclass(frozen=True, slots=True)
class _InPack:
    pack: Pack
    index: int

    def read(self, inner: Box) -> NDArray[Any]:
        tensor = self.pack.tensors[self.index]
        whole = dtypes.view(self.pack.raw(self.index), tensor.dtype).reshape(tensor.shape)
        part: NDArray[np.generic] = whole[tuple(slice(a, b) for a, b in inner)]
        return part


@dataclass(frozen=True, slots=True)
class _Lasting:
    """A part that is found again where it went meanwhile: from its pack into the store."""

    step: CapturedStep
    key: TensorKey
    ranks: Sequence[int]
    source: PartSource

    def read(self, inner: Box) -> NDArray[Any]:
        source: PartSource = self.source
        for _ in range(LOOKS):
            try:
                return source.read(inner)
            except (StoreDamaged, PackDamaged, OSError):
                before, now = source, settled_step(self.step.run, *self.step.when)
                if now is None:
                    raise TensorError(_expired_text(self.step.when[1])) from None
                moved = now.source(self.key, self.ranks)
                if moved is None or type(moved) is type(before):
                    raise
                source = moved
        return source.read(inner)


class CapturedStep:
    """The captured tensors of one step.

    Attributes:
        run, when: where and which: (attempt, step).
        event: what there is; None if nothing can be read.
        lost: what is damaged.
    """

    def __init__(self, run: paths.RunDir, attempt: int, step: int) -> None:
        self.run, self.when = run, (attempt, step)
        pack_paths = packs_of(run, attempt).get(step, {})
        self._packs, self.lost = open_packs(run, attempt, step, pack_paths.items())
        self._stored = StoredEvent(run, attempt, step)
        self.lost += self._stored.lost
        self._at = {
            (rank, tensor.key): i
            for rank, pack in self._packs.items()
            for i, tensor in enumerate(pack.tensors)
        }
        self.event = self._event(attempt, step)
        self._kept = {
            (rank, entry.key): (entry, number)
            for entry in (self._stored.event.entries if self._stored.event else ())
            for number, part in enumerate(entry.plan.parts)
            for rank in part.ranks
        }

    @property
    def packs(self) -> list[Pack]:
        """The packs that are not folded, or stay what they are."""
        return list(self._packs.values())

    @property
    def size(self) -> int:
        """Bytes on the disk."""
        return self._stored.size + sum(pack.bytes for pack in self._packs.values())

    def bytes_of(self, key: TensorKey, held: HeldPart) -> NDArray[np.uint8] | None:
        """Return what a rank kept of a tensor, uint8 [bytes]; None if it is not here.

        Raises:
            StoreDamaged, PackDamaged, OSError: it is damaged.
        """
        entry, part = self._kept.get((held.rank, key), (None, 0))
        if entry is not None and self._stored.has(entry, part):
            # As numbers of the same size: what a reader takes for complex32 is not its bits.
            bits = replace(entry, key=replace(key, dtype=dtypes.bits_of(key.dtype)))
            whole = self._stored.read(bits, part, tuple((0, n) for n in held.shape))
            return np.ascontiguousarray(whole).reshape(-1).view(np.uint8)
        at = self._at.get((held.rank, key))
        return None if at is None else self._packs[held.rank].raw(at)

    def tensor(self, entry: Entry) -> GlobalTensor:
        """Return a tensor of the event."""
        sources: list[PartSource | None] = []
        for part in entry.plan.parts:
            found = self.source(entry.key, part.ranks)
            sources.append(found and _Lasting(self, entry.key, part.ranks, found))
        return GlobalTensor(entry.key, entry.held, entry.plan, sources)

    def find(self, site: str, micro: int, call: int) -> Entry:
        """Return the tensor of a site.

        Raises:
            TensorError: there is none, or it is one of several; the text names them.
        """
        forms = [match for form in (_SITE, _PRINTED) if (match := form.fullmatch(site))]
        if not forms:
            raise TensorError(f"{site!r}: write a site as fqn:kind, e.g. layers.0.attn:output")
        entries = self.event.entries if self.event else ()
        named = next(filter(None, (_named(entries, **form.groupdict()) for form in forms)), [])
        matching = [e for e in named if (e.key.micro, e.key.call) == (micro, call)]
        leaves = sorted({e.key.leaf for e in matching})
        if len(leaves) == 1:
            return matching[0]  # the same tensor may have been kept for several modules
        if leaves:
            sites = listed(list(dict.fromkeys(site_of(e.key) for e in matching)))
            raise TensorError(f"{site} is several tensors: {sites}; name one of them")
        if named:
            calls = sorted({(e.key.micro, e.key.call) for e in named})
            raise TensorError(f"{site}: of the (micro, call) {calls} only, not {(micro, call)}")
        near = nearest(site, (str(site_of(e.key)) for e in entries))
        raise TensorError(f"{site} was not captured at this step; nearest: {near or 'nothing was'}")

    def describe(self) -> Captured:
        """Say what there is."""
        event = self.event
        if event is None:
            raise TensorError("nothing of it can be read")
        headers = event.headers.values()
        dropped = sum(n for h in headers if isinstance(n := h.get("dropped"), int))
        reasons = {str(h.get("reason", "")): None for h in headers}
        return Captured(
            attempt=event.attempt,
            step=event.step,
            ranks=tuple(event.headers),
            modules=tuple(sorted({str(m) for h in headers for m in h["modules"]})),
            reason=", ".join(filter(None, reasons)),
            complete=not (event.missed or dropped or self.lost),
            dropped=dropped,
            bytes=self.size,
            sites=tuple(dict.fromkeys(site_of(e.key) for e in event.entries)),
        )

    def capsules(self, module: str) -> list[StoredCall]:
        """Return what each rank kept of each call of a module, ascending.

        Raises:
            TensorError: the module was not captured; the text says which were.
        """
        found = []
        for rank, header in (self.event.headers if self.event else {}).items():
            about = header["modules"].get(module)
            if isinstance(about, dict):
                found += self._capsules_of(rank, header, module, about)
        if self.event and not found and module not in (there := self.describe().modules):
            raise TensorError(not_captured(module, self.when[1], there))
        return found

    def _capsules_of(
        self, rank: int, header: Mapping[str, Any], module: str, about: Mapping[str, Any]
    ) -> list[StoredCall]:
        event = self.event
        if event is None:
            return []
        state = about.get("state")
        # A tensor that several captured modules have is kept under one of them.
        shared = set(map(str, state.values())) if isinstance(state, dict) else set()
        tensors = {
            entry.key: self.tensor(entry)
            for entry in event.entries
            if entry.key.module == module or (entry.key.kind in STATE and entry.key.fqn in shared)
        }
        mine = (k for k, t in tensors.items() if k.kind not in STATE and rank in t.ranks)
        return [
            StoredCall(
                event.attempt, event.step, rank, module, about, header, micro, call,
                _of_call(tensors, rank, micro, call),
            )
            for micro, call in sorted({(k.micro, k.call) for k in mine}) or [(0, 0)]
        ]  # fmt: skip

    def _event(self, attempt: int, step: int) -> CaptureEvent | None:
        stored = self._stored.event
        late = {r: p for r, p in self._packs.items() if stored and r not in stored.headers}
        if stored is None:
            return event_of(attempt, step, self._packs) if self._packs else None
        if not late:
            return stored
        more = event_of(attempt, step, late)
        held: dict[TensorKey, list[HeldPart]] = {e.key: list(e.held) for e in stored.entries}
        for entry in more.entries:
            both = (*held.get(entry.key, ()), *entry.held)
            held[entry.key] = sorted(both, key=lambda h: h.rank)
        headers = dict(sorted({**stored.headers, **more.headers}.items()))
        return planned(attempt, step, max(stored.world, more.world), headers, held)

    def source(self, key: TensorKey, ranks: Sequence[int]) -> PartSource | None:
        """Return where a part is that all of `ranks` hold."""
        for rank in ranks:
            entry, part = self._kept.get((rank, key), (None, 0))
            if entry is not None and self._stored.has(entry, part):
                return _InStore(self._stored, entry, part)
        for rank in ranks:
            if (rank, key) in self._at:
                return _InPack(self._packs[rank], self._at[rank, key])
        return None


def captured_attempts(run: paths.RunDir, attempts: Sequence[int]) -> list[int]:
    """Return the attempts that may have captured something: those known, and those of packs."""
    return sorted({*attempts, *attempts_with_packs(run)})


def damage_of_expiry(run: paths.RunDir, attempt: int) -> list[Lost]:
    """Return what is wrong with the list of captures that have expired: it is not believed then.

    What has expired may be listed as damaged, and what is there as captured, until it is mended.
    """
    key = captures_key(attempt)
    path = manifest_path(run, key)
    where = path.relative_to(run.path).as_posix()
    found = [Lost(where, None, why) for why in Manifest(path).damage]
    try:
        expired_steps(run, attempt)
    except StoreDamaged as error:
        found.append(Lost(f"run.zarr/{key}", None, str(error)))
    return found


def captured_steps(run: paths.RunDir, attempt: int) -> Iterator[CapturedStep]:
    """Yield what was captured in an attempt, ascending."""
    for step in sorted(_steps(run, attempt) - _expired(run, attempt)):
        found = settled_step(run, attempt, step)
        if found is not None:
            yield found


def settled_step(run: paths.RunDir, attempt: int, step: int) -> CapturedStep | None:
    """Return what was captured at a step; None if it has expired, maybe while we looked.

    What a fold or retention moved away under our eyes is not damaged: it is looked at again.
    """
    captured = CapturedStep(run, attempt, step)
    for _ in range(LOOKS):
        if step in _expired(run, attempt):
            return None
        if not captured.lost:
            break
        before, captured = captured.lost, CapturedStep(run, attempt, step)
        if captured.lost == before:
            break
    return captured


def captured_step(run: paths.RunDir, attempts: Sequence[int], step: int) -> CapturedStep:
    """Return what was captured at a step, in the last of `attempts` that captured it.

    Raises:
        TensorError: nothing was, it has expired, or it is damaged; the text says which.
    """
    there: dict[int, set[int]] = {}
    for attempt in sorted(attempts, reverse=True):
        if step in _expired(run, attempt):
            raise TensorError(_expired_text(step))
        there[attempt] = _steps(run, attempt) - _expired(run, attempt)
        if step in there[attempt]:
            captured = settled_step(run, attempt, step)
            if captured is None:
                raise TensorError(_expired_text(step))
            if captured.event is not None:
                return captured
            if captured.lost:
                raise TensorError(f"step {step}: {'; '.join(map(str, captured.lost))}")
    if any(step in _expired(run, attempt) for attempt in attempts):
        raise TensorError(_expired_text(step))  # while we looked
    steps = {s for found in there.values() for s in found}
    near = sorted(heapq.nsmallest(_SHOWN, steps, key=lambda s: abs(s - step)))
    others = f"these steps were: {near}" if steps else "no step was"
    # Of one attempt that somebody chose: another may have captured it.
    only = f" in attempt {attempts[0]}" if len(attempts) == 1 and attempts[0] else ""
    raise TensorError(f"step {step} was not captured{only}; {others}")


def not_captured(module: str, step: int, there: Sequence[str]) -> str:
    """Say that a module was not captured at a step, and which were, as one types them."""
    names = listed([name or "'' (the whole model)" for name in there]) or "none"
    were = "was" if len(there) == 1 else "were"
    return f"module {module!r} was not captured at step {step}; {names} {were}"


def _expired_text(step: int) -> str:
    return f"what was captured at step {step} has expired (max_bytes, max_age)"


def _state_of(event: CaptureEvent | None, module: str) -> set[str]:
    """Return the FQNs of a module's state, which may have been kept for one around or inside it."""
    told = [h["modules"].get(module) for h in (event.headers.values() if event else ())]
    states = [one.get("state") for one in told if isinstance(one, dict)]
    return {str(v) for state in states if isinstance(state, dict) for v in state.values()}


def _steps(run: paths.RunDir, attempt: int) -> set[int]:
    return {*packs_of(run, attempt), *stored_steps(run, attempt)}


def _expired(run: paths.RunDir, attempt: int) -> set[int]:
    try:
        return expired_steps(run, attempt)
    except StoreDamaged:
        return set()  # `damage_of_expiry` says what is wrong with it


def _of_call(
    tensors: Mapping[TensorKey, GlobalTensor], rank: int, micro: int, call: int
) -> dict[tuple[str, str, str], RankTensor]:
    """Return one call's tensors of a rank, and the module's state, whichever rank kept it."""
    of_call: dict[tuple[str, str, str], RankTensor] = {}
    for key, whole in sorted(tensors.items(), key=lambda item: replace(item[0], module="")):
        name = (key.kind, key.fqn, key.leaf)
        if key.kind in STATE:
            of_call[name] = RankTensor(rank if rank in whole.ranks else whole.ranks[0], whole)
        elif (key.micro, key.call) == (micro, call) and rank in whole.ranks:
            of_call[name] = RankTensor(rank, whole)
    return of_call


def _named(entries: Iterable[Entry], fqn: str, kind: str, leaf: str | None) -> list[Entry]:
    """Return the tensors of a site; a leaf of None is any, and `(root)` is the model itself."""
    of = ("", fqn) if fqn == ROOT else (fqn,)
    named = [e for e in entries if e.key.fqn in of and e.key.kind == kind]
    return [e for e in named if leaf is None or e.key.leaf == leaf]


def listed(names: Sequence[str]) -> str:
    """Return the first of some names, and how many more there are."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
