"""Label values: names of modules and hosts come from strangers and are made safe here."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping
from typing import Any

from ddpprobe.records.step import Anomaly

LABEL_BYTES = 200
PATH_BYTES = 4096  # of a directory: what is cut cannot be typed
EXEMPLAR_CHARACTERS = 128  # names and values together, a rule of OpenMetrics 1.0
# Control, format (bidirectional overrides), lone surrogates, line and paragraph separators.
_UNSHOWN = {"Cc", "Cf", "Cs", "Zl", "Zp"}
ROOT = "(root)"  # to Prometheus an empty label is no label; `Site` writes it the same way


def label_value(value: object, most: int = LABEL_BYTES) -> str:
    r"""Return a label value as valid UTF-8 of at most `most` bytes, cut from the left.

    One lone surrogate or NUL in one label would make Prometheus refuse the whole scrape, and a
    control character would reach the terminals and pages that show it: they are written out, as
    `\x1b`. The end of a name tells sites apart, so the beginning goes.
    """
    text = str(value)
    if not text.isprintable():  # almost every one is
        text = "".join(_written_out(c) if unicodedata.category(c) in _UNSHOWN else c for c in text)
    data = text.encode()
    if len(data) > most:
        mark = "…"
        data = mark.encode() + data[len(data) - most + len(mark.encode()) :]
    return data.decode("utf-8", "ignore")


def ranks_label(ranks: Iterable[int]) -> str:
    """Return ranks in one word, as `8-15` or `0-3,6`: the label `rank` of what they have joined."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][-1] + 1:
            spans[-1][1:] = [rank]
        else:
            spans.append([rank])
    return ",".join("-".join(map(str, span)) for span in spans)


def run_label(identity: Mapping[str, Any]) -> str:
    """Return the value of the target label `run`: it tells a run from all others, and is readable.

    That is the run's id if it was given no name, else the name and the random end of the id. It
    comes to a series by discovery (`targets`, `/sd`), or in an export; no metric has it itself.

    Args:
        identity: `run_id` and `name`, as in run.json; "" comes of one without an id.
    """
    run_id, name = str(identity.get("run_id") or ""), str(identity.get("name") or "")
    if not run_id or name in {"", run_id}:
        return label_value(run_id)
    return label_value(f"{name}-{run_id.rpartition('-')[2]}")


def _written_out(character: str) -> str:
    return "\\0" if character == "\0" else character.encode("unicode_escape").decode()


def exemplar_labels(anomaly: Anomaly) -> dict[str, str]:
    """Return step, kind, rank and fqn of an anomaly, the name cut from the left to what fits."""
    known = {"step": anomaly.step, "kind": anomaly.kind, "rank": anomaly.rank}
    labels = {k: label_value(v)[:24] for k, v in known.items() if v is not None}
    room = EXEMPLAR_CHARACTERS - sum(len(k) + len(v) for k, v in labels.items()) - len("fqn")
    if anomaly.module is not None:
        # Escapes in an exemplar are valid, but not every parser of them agrees.
        fqn = re.sub(r'["\\\n{}]', "?", label_value(anomaly.module or ROOT))
        labels["fqn"] = fqn if len(fqn) <= room else "…" + fqn[len(fqn) - room + 1 :]
    return labels
