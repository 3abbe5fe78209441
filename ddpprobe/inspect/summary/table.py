"""A summary as plain text: aligned columns, none that says nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_WIDTHS = {"module": 44, "type": 26, "input": 30, "output": 30, "sharding": 44}
_NUMBERS = {"params", "on this rank", "calls", "FLOPs"}


def render(summary: Mapping[str, Any]) -> str:
    """Return the table of a `Summary.to_dict()`, without a line end."""
    rows, totals = summary["rows"], summary["totals"]
    columns = {
        "module": [row["fqn"] or "(root)" for row in rows],
        "type": [row["type"] for row in rows],
        "input": [_shapes(row["input_shapes"]) for row in rows],
        "output": [_shapes(row["output_shapes"]) for row in rows],
        "params": [_params(row) for row in rows],
        "on this rank": [_count(row["params_local"]) for row in rows],
        "dtype": [row["dtype"] for row in rows],
        "trainable": [_trainable(row) for row in rows],
        "sharding": [row["placement"] for row in rows],
        "calls": [str(row["calls"] or "") for row in rows],
        "FLOPs": [
            _scaled(row["flops"], "kMGTPE", 1000).strip() if row["flops"] else "" for row in rows
        ],
    }
    if totals["params"] == totals["params_local"]:
        del columns["on this rank"]
    if all(row["calls"] < 2 for row in rows):
        del columns["calls"]
    shown = {name: cells for name, cells in columns.items() if any(cells)}
    lines = _aligned(
        [list(shown), *zip(*shown.values(), strict=True)],
        [_WIDTHS.get(name, 30) for name in shown],
        [name in _NUMBERS for name in shown],
    )
    rule = "-" * max(map(len, lines))
    return "\n".join(
        [lines[0], rule, *lines[1:], rule, *_total_lines(totals), *_more_lines(summary)]
    )


def shorten(text: str, width: int) -> str:
    """Return `text`, or its two ends with "..." between them, in at most `width` characters."""
    if len(text) <= width:
        return text
    kept = width - 3
    return f"{text[: kept - kept // 2]}...{text[len(text) - kept // 2 :]}"


def _aligned(
    rows: Sequence[Sequence[str]], limits: Sequence[int], right: Sequence[bool]
) -> list[str]:
    cells = [[shorten(c, limit) for c, limit in zip(row, limits, strict=True)] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if flush else cell.ljust(width)
            for cell, width, flush in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in cells
    ]


def _shapes(shapes: Sequence[Sequence[int]]) -> str:
    texts = ["[" + ", ".join(map(str, shape)) + "]" for shape in shapes]
    whole = " ".join(texts)
    return whole if len(whole) <= _WIDTHS["output"] else f"{texts[0]} and {len(texts) - 1} more"


def _count(number: int) -> str:
    return f"{number:,}" if number else ""


def _params(row: Mapping[str, Any]) -> str:
    return _count(row["params_global"]) or ("tied" if row["parameters"] else "")


def _trainable(row: Mapping[str, Any]) -> str:
    flags = {parameter["trainable"] for parameter in row["parameters"]}
    return {(): "", (True,): "yes", (False,): "no"}.get(tuple(flags), "in part")


def _total_lines(totals: Mapping[str, int]) -> list[str]:
    def line(name: str, whole: int, local: int, unit: str) -> str:
        here = f", {local:,}{unit} on this rank" if local != whole else ""
        return f"{name}: {whole:,}{unit}{here}"

    def bytes_line(name: str, whole: int, local: int) -> str:
        here = f", {_bytes(local)} on this rank" if local != whole else ""
        return f"{name} in bytes: {_bytes(whole)}{here}"

    frozen = totals["params"] - totals["trainable"]
    params = line("params", totals["params"], totals["params_local"], "")
    lines = [
        f"{params} ({totals['trainable']:,} trainable, {frozen:,} frozen)",
        bytes_line("params", totals["param_bytes"], totals["param_bytes_local"]),
    ]
    if totals["buffers"]:
        lines.append(line("buffers", totals["buffers"], totals["buffers_local"], ""))
        lines.append(bytes_line("buffers", totals["buffer_bytes"], totals["buffer_bytes_local"]))
    return lines


def _more_lines(summary: Mapping[str, Any]) -> list[str]:
    """Say what one forward takes, and what trains the model."""
    lines, flops = [], summary["totals"]["flops"]
    if flops:
        lines.append(f"forward: {flops:,} FLOPs ({_scaled(flops, 'kMGTPE', 1000)}FLOPs)")
    if summary["uncounted"]:
        lines.append(f"not counted in FLOPs: {', '.join(summary['uncounted'])}")
    for one in summary["optimizers"]:
        rates = ", ".join(dict.fromkeys("?" if r is None else f"{r:g}" for r in one["lr"]))
        state = one["state_bytes_local"]
        held = f"state {_bytes(state)} on this rank" if state else "no state before its first step"
        foreign = f", {one['foreign']} of them not the model's" if one["foreign"] else ""
        lines.append(
            f"optimizer: {one['type']}, lr {rates}, {one['tensors']} parameters{foreign}; {held}"
        )
    if summary["left_out"]:
        names = ", ".join(summary["left_out"][:5])
        more = ", ..." if len(summary["left_out"]) > 5 else ""
        lines.append(f"trainable, and in no optimizer: {names}{more}")
    if summary["loss"]:
        lines.append(f"loss: {summary['loss']}")
    return lines


def _bytes(number: int) -> str:
    return f"{number:,}" if number < 1024 else f"{number:,} ({_scaled(number, 'KMGTPE', 1024)}iB)"


def _scaled(number: float, prefixes: str, base: int) -> str:
    """Return a number with the prefix of its size, after which a unit may follow: 1.23 M."""
    shown = float(number)
    for prefix in ("", *prefixes):
        if shown < base or prefix == prefixes[-1]:
            break
        shown /= base
    return f"{shown:.2f} {prefix}" if prefix else f"{number:g} "
