"""Whole tensors and merged statistics out of what each rank has captured."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from ddpprobe.errors import CaptureError
from ddpprobe.inspect.capture import assemble
from ddpprobe.inspect.capture.assemble import RankPart
from ddpprobe.inspect.capture.exchange import Exchange
from ddpprobe.inspect.capture.held_tensor import HeldTensor
from ddpprobe.inspect.capture.series import TensorMeter, TensorStats, align, read
from ddpprobe.rank.stats.dense import dtype_name
from ddpprobe.records.shard_spec import ShardSpec

Key = tuple[str, str, str]  # name, kind, leaf
Find = Callable[[], tuple[str, HeldTensor, bool] | None]  # leaf, tensor, concluded to be replicated


@dataclass(frozen=True, slots=True)
class StatsRows:
    """One tensor's statistics on this rank.

    Attributes:
        key: name, kind, leaf.
        dtype: of the tensor, without `torch.`.
        label: placement; primary: whether this rank's part counts in the merge.
        rows: wide rows [rows, width], float64 on the CPU, each of `stride` calls.
        calls: calls covered.
    """

    key: Key
    dtype: str
    label: str
    primary: bool
    rows: Tensor
    stride: int
    calls: int


@final
class Gathering:
    """Gathers for one capture. Each method is called on all ranks, in the same order.

    Args:
        exchange: the line to the other ranks.
        group: ranks of this rank's tensor-parallel computation, () if there is none.
    """

    def __init__(self, exchange: Exchange, group: Callable[[], tuple[int, ...]]) -> None:
        self._exchange, self._group = exchange, group

    def whole(self, what: str, find: Find, dim: int, tp: str | int | None) -> Tensor:
        """Return the whole tensor, on the device of this rank's part (or the CPU).

        Args:
            what: the tensor's name, for messages; equal on all ranks.
            find: returns this rank's leaf and tensor, and whether its tensor-parallel group is
                concluded to hold it alike; None if there is no tensor here; may raise.
            dim: along which plain tensors of different ranks are joined.
            tp: what the user says of plain tensors in a tensor-parallel group.

        Raises:
            CaptureError: parts do not fit, their layout is not known, or a rank did not ask.
        """
        mine, parts = self._parts(f"{what}.full(dim={dim}, tp={tp!r})", what, find, full=True)
        if self._exchange.world_size == 1 and mine is not None:
            return mine
        pieces = assemble.pieces(parts, tp, what)
        alike = [ranks for ranks, spec in pieces if spec and parts[ranks[0]].shard_spec is None]
        check = tp is None or tp == "replicated"  # concluded or said: neither is taken on trust
        wanted = set(assemble.needed(pieces)) | {r for ranks in alike for r in ranks if check}
        tensors = self._send(mine, {r: parts[r] for r in sorted(wanted & set(parts))})
        for ranks in alike if check else ():
            _must_be_equal({r: tensors[r] for r in ranks if r in tensors}, what)
        result = assemble.whole(pieces, tensors, dim, what)
        return result if mine is None else result.to(mine.device)

    def by_rank(self, what: str, find: Find) -> dict[int, Tensor]:
        """Return each rank's local tensor, by rank; ranks that have none are absent.

        Args:
            what: the tensor's name.
            find: as for `whole`.

        Raises:
            CaptureError: no rank has it, or a rank did not ask.
        """
        mine, parts = self._parts(f"{what}.by_rank()", what, find, full=False)
        if self._exchange.world_size == 1 and mine is not None:
            return {0: mine}
        tensors = self._send(mine, parts)
        return tensors if mine is None else {r: t.to(mine.device) for r, t in tensors.items()}

    def merged(
        self, what: str, find: Callable[[], Sequence[StatsRows]], meter: TensorMeter, *, calls: bool
    ) -> dict[Key, list[TensorStats]]:
        """Return statistics merged over the ranks, by tensor; with `calls` one per row of calls.

        Raises:
            CaptureError: no rank has any, or a rank did not ask.
        """
        mine: list[StatsRows] = []

        def part() -> dict[str, Any]:
            mine.extend(find())
            rows = [
                (*r.key, r.dtype, r.label, r.primary, r.stride, r.calls, len(r.rows)) for r in mine
            ]
            return {"rows": rows}

        answers = self._exchange.tell(f"{what} (statistics)", part)
        blocks = [r.rows.reshape(-1) for r in mine]
        flat = torch.cat(blocks) if blocks else torch.empty(0, dtype=torch.float64, device="cpu")
        counts = [[r[-1] for r in t["rows"]] for t in answers]
        width = meter.width
        sizes = {rank: 8 * width * sum(n) for rank, n in enumerate(counts) if sum(n)}
        got = self._exchange.send(flat.view(torch.uint8) if len(flat) else None, sizes)
        rows_of: dict[Key, list[tuple[int, StatsRows]]] = {}
        for rank, data in got.items():
            at = 0
            block = data.view(torch.float64).view(-1, width)
            for name, kind, leaf, dtype, label, primary, stride, n, length in answers[rank]["rows"]:
                piece, at = block[at : at + length], at + length
                key = (name, kind, leaf)
                rows = StatsRows(key, dtype, label, primary, piece, stride, n)
                rows_of.setdefault(key, []).append((rank, rows))
        return {key: merge_ranks(key, rows_of[key], meter, calls=calls) for key in rows_of}

    def _parts(
        self, asked: str, what: str, find: Find, *, full: bool
    ) -> tuple[Tensor | None, dict[int, RankPart]]:
        mine: list[Tensor] = []

        def part() -> dict[str, Any]:
            found = find()
            if found is None:
                return {"part": None}
            leaf, held, alike = found
            tensor = held.tensor(what)
            if full and held.applied and self._exchange.world_size > 1:
                raise CaptureError(
                    f"{what} is what apply= made of each rank's part, so there is no whole "
                    "to assemble. .by_rank() gives the results."
                )
            if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
                raise CaptureError(
                    f"{what} is a {tensor.layout} tensor of {tensor.dtype}, which ddpprobe does "
                    "not send. Capture with apply=torch.Tensor.to_dense, or use .local()."
                )
            mine.append(tensor)
            spec = held.shard_spec.to_json() if held.shard_spec is not None else None
            own = {"leaf": leaf, "shape": list(tensor.shape), "dtype": dtype_name(tensor.dtype)}
            among = {"shard_spec": spec, "group": list(self._group()), "alike": alike}
            return {"part": {**own, **among}}

        answers = [answer["part"] for answer in self._exchange.tell(asked, part)]
        held_by = {rank: answer for rank, answer in enumerate(answers) if answer is not None}
        parts = {rank: _part(answer) for rank, answer in held_by.items()}
        for field in ("leaf", "dtype"):
            values = {rank: answer[field] for rank, answer in held_by.items()}
            if len(set(values.values())) > 1:
                raise CaptureError(f"{what} has another {field} on other ranks: {values}")
        if not parts:
            raise CaptureError(f"{what} was captured on no rank")
        return (mine[0] if mine else None), parts

    def _send(self, mine: Tensor | None, parts: Mapping[int, RankPart]) -> dict[int, Tensor]:
        dtypes = {r: getattr(torch, p.dtype) for r, p in parts.items()}
        sizes = {r: math.prod(p.shape) * dtypes[r].itemsize for r, p in parts.items()}
        raw = None
        if mine is not None and self._exchange.rank in parts:
            plain = mine.detach().resolve_conj().resolve_neg().cpu().contiguous()
            raw = plain.reshape(-1).view(torch.uint8)
        got = self._exchange.send(raw, sizes)
        return {r: got[r].view(dtypes[r]).view(parts[r].shape) for r in parts}


def merge_ranks(
    key: Key, ranked: Sequence[tuple[int, StatsRows]], meter: TensorMeter, *, calls: bool
) -> list[TensorStats]:
    """Merge the rows that the ranks have of one tensor; with `calls` row by row, else to one."""
    labels = {rows.label for _, rows in ranked}
    label = next(
        (n for n in ("unknown", "partial", "local", "sharded") if n in labels), "replicated"
    )
    if label in ("unknown", "partial"):
        ranked = ranked[:1]  # values that cannot be merged: the lowest rank's, labelled
    stride = max(rows.stride for _, rows in ranked)
    count = max(rows.calls for _, rows in ranked)
    total: Tensor | None = None
    for _, rows in ranked:
        if not rows.primary and len(ranked) > 1:
            continue
        block = (
            align(meter, rows.rows, rows.stride, stride) if calls else meter.total(rows.rows)[None]
        )
        total = block if total is None else _add(meter, total, block)
    if total is None:
        return []
    about = (*key, ranked[0][1].dtype, label, tuple(rank for rank, _ in ranked))
    covered = [min(stride, count - i * stride) for i in range(len(total))] if calls else [count]
    return [read(row, meter, about, n) for row, n in zip(total, covered, strict=True)]


def _add(meter: TensorMeter, a: Tensor, b: Tensor) -> Tensor:
    """Merge blocks row by row; where one is longer, its rows stand alone."""
    short, long = sorted((a, b), key=len)
    return torch.cat((meter.merge(short, long[: len(short)]), long[len(short) :]))


def _must_be_equal(tensors: Mapping[int, Tensor], what: str) -> None:
    (first, like), *others = sorted(tensors.items())
    for rank, tensor in others:
        raw = [t.contiguous().view(-1).view(torch.uint8) for t in (like, tensor)]
        if like.shape != tensor.shape or not torch.equal(*raw):
            raise CaptureError(
                f"{what} is not replicated, as it should be: ranks {first} and {rank} hold "
                "different values. .by_rank() gives them; .full(tp=DIM) joins shards of a dim."
            )


def _part(answer: Mapping[str, Any]) -> RankPart:
    spec = ShardSpec.from_json(answer["shard_spec"]) if answer["shard_spec"] is not None else None
    return RankPart(
        tuple(answer["shape"]), str(answer["dtype"]), spec, tuple(answer["group"]),
        bool(answer["alike"]),
    )  # fmt: skip
