"""Label values: names of modules and hosts come from strangers and are made safe here."""

from __future__ import annotations

import re

from ddpprobe.records import Anomaly

LABEL_BYTES = 200
EXEMPLAR_CHARACTERS = 128  # names and values together, a rule of OpenMetrics 1.0
ROOT = "(root)"  # to Prometheus an empty label is no label; `Site` writes it the same way


def label_value(value: object) -> str:
    """Return a label value as valid UTF-8 of at most `LABEL_BYTES` bytes, cut from the left.

    One lone surrogate or NUL in one label would make Prometheus refuse the whole scrape; they are
    written out. The end of a name tells sites apart, so the beginning goes.
    """
    data = str(value).replace("\0", "\\0").encode("utf-8", "backslashreplace")
    if len(data) > LABEL_BYTES:
        mark = "…"
        data = mark.encode() + data[len(data) - LABEL_BYTES + len(mark.encode()) :]
    return data.decode("utf-8", "ignore")


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
