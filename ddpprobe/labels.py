"""Label values: names of modules and hosts come from strangers and are made safe here."""

from __future__ import annotations

import re
import unicodedata

from ddpprobe.records import Anomaly

LABEL_BYTES = 200
EXEMPLAR_CHARACTERS = 128  # names and values together, a rule of OpenMetrics 1.0
# Control, format (bidirectional overrides), lone surrogates, line and paragraph separators.
_UNSHOWN = {"Cc", "Cf", "Cs", "Zl", "Zp"}
ROOT = "(root)"  # to Prometheus an empty label is no label; `Site` writes it the same way


def label_value(value: object) -> str:
    r"""Return a label value as valid UTF-8 of at most `LABEL_BYTES` bytes, cut from the left.

    One lone surrogate or NUL in one label would make Prometheus refuse the whole scrape, and a
    control character would reach the terminals and pages that show it: they are written out, as
    `\x1b`. The end of a name tells sites apart, so the beginning goes.
    """
    text = str(value)
    if not text.isprintable():  # almost every one is
        text = "".join(_written_out(c) if unicodedata.category(c) in _UNSHOWN else c for c in text)
    data = text.encode()
    if len(data) > LABEL_BYTES:
        mark = "…"
        data = mark.encode() + data[len(data) - LABEL_BYTES + len(mark.encode()) :]
    return data.decode("utf-8", "ignore")


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
