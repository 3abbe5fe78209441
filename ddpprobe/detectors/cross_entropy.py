"""`cross_entropy`: the labels of a loss over classes, or what a sample weighs in it, are wrong."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ddpprobe.detectors.class_labels import ClassLabels
from ddpprobe.detectors.enough_looks import EnoughLooks
from ddpprobe.detectors.extra_activation import ExtraActivation
from ddpprobe.detectors.logits import MESSAGES, LogitsShape
from ddpprobe.detectors.loss import mean
from ddpprobe.detectors.own_mean import APART, OwnMean
from ddpprobe.detectors.rank_scalars import (
    labels_seen,
    looks_with,
    loss_scale_of,
    micro_batches_of,
    scalars,
)
from ddpprobe.detectors.settings import above_zero, at_least
from ddpprobe.detectors.sites_of_kind import Floats
from ddpprobe.detectors.sound_steps import SoundStepsDetector
from ddpprobe.detectors.telling import Telling
from ddpprobe.records.rank_names import ranks_text
from ddpprobe.records.step import (
    CLASS_LABELLED,
    CLASS_LOOKED,
    CLASS_OF_ALL,
    CLASS_POWER,
    CLASS_RIGHT,
    CLASS_ROWS,
    CLASS_SURE,
    CLASS_WEIGHT,
    LABEL_BITS,
    Anomaly,
    StepRecord,
)

FEWER, FAR_APART = 5, 40  # looks that are enough if they lie over so many steps
NOW = 2  # looks at which a weight is another one
STEADY = 0.05  # as a share: a weight in the loss that hardly varies
COUNTING = 3  # looks at which no row is ignored any more
SAME, OF = 5, 6  # looks with one label, of so many
ANSWERED = 5  # looks over which ranks are compared
HALF, FAR = 0.5, 6.0  # of what the others answer rightly; standard deviations of a share
TIMES_WRONG = 3.0  # as often as before, and as the others, where it comes at once
# How unlikely the absence of a label must be, of dozens that are looked at again and again; and how
# many times longer than any before.
BY_CHANCE, LONGER = 1e-7, 4
NAMED, REMEMBERED = 4, 256  # labels in a message; looks
MORE_UNKNOWN = 0.25  # rows of which no label is known, of those of a class (all alike)
FAVOURED = 0.5  # power of its share by which a label weighs, in the mean of the ranks
# What a rank says, all of it, of a cross-entropy.
_NEEDED = {CLASS_ROWS, CLASS_WEIGHT, CLASS_LABELLED, CLASS_LOOKED, CLASS_RIGHT, CLASS_OF_ALL}
# Of texts of unlike length the short ones may well be answered otherwise: so many times as many
# rows, of one rank at one of the looks, are no more compared.
UNLIKE = 1.5
LARGEST = 700.0  # the logarithm of a number that a float64 still holds
_KINDS = (
    "weight", "labelled", "one label", "right", "gone", "favoured", "opposed", "ignored", "few",
    "extra", "own mean", *MESSAGES
)  # fmt: skip


class CrossEntropy(SoundStepsDetector):
    """Warns when a loss over classes weighs its samples anew, or has labels that cannot be meant.

    The gradient of logits shows what each row weighs in a cross-entropy, and its label. Thirteen
    things are told: what the loss takes for logits are probabilities already (a softmax twice), or
    numbers between 0 and 1 (a sigmoid before it); no logit is negative (a ReLU after the last
    layer); an activation lies between the model and a loss that has its own, a binary one among
    them; the rows that it ignores are those of a class; half of the classes or more never come; a
    row weighs many times what it did (a sum in place of a mean, a loss that is not divided by the
    micro-batches any more); each rank's loss is the mean of its own rows, of which ranks have
    unlike many; rows that had no label, as padding has none, have one; each batch holds samples of
    one class, and the next batches those of another (nobody shuffles); a label does not come any
    more, and none in its place; rows weigh the more, the more rows have their label (weights of
    classes that are to be inverse to their shares), on all ranks or on some; one rank answers
    rightly far more seldom than all others, or all at once more seldom than these and than it did
    (it numbers the classes in another order, or reads other data).

    Args:
        ratio: how many times the weight that a row had.
        looks: sampled steps before it that are compared with.
        quiet_steps: steps without it after which one of these is told again.
    """

    name = "cross_entropy"
    title = "The labels or the weights of a loss over classes"

    def __init__(self, *, ratio: float = 1.5, looks: int = 8, quiet_steps: int = 1000) -> None:
        above_zero(ratio=ratio)
        at_least(1, looks=looks)
        at_least(0, quiet_steps=quiet_steps)
        self._ratio, self._looks, self._quiet = math.log(ratio), looks, quiet_steps
        self._enough = EnoughLooks(max(2, looks), FEWER, FAR_APART)
        self._reset()

    def _reset(self) -> None:
        self._weights: deque[Floats] = deque(maxlen=self._looks + NOW)
        self._order: tuple[int, ...] = ()  # ranks, of these
        self._known = 0  # looks in a row at which the weight is known
        self._labelled: deque[tuple[float, float]] = deque(maxlen=self._looks + COUNTING)
        self._labels: deque[frozenset[int]] = deque(maxlen=OF)
        self._sorted = False
        self._seen = _LabelsSeen()
        self._favoured = 0  # looks in a row
        self._opposed: dict[int, int] = {}  # those of each rank, while another one does otherwise
        self._extra, self._logits = ExtraActivation(), LogitsShape()
        self._class_labels, self._own_mean = ClassLabels(self._enough), OwnMean()
        self._right: deque[dict[int, tuple[float, float, float]]] = deque(
            maxlen=self._looks + ANSWERED
        )
        self._told = {kind: Telling(self._quiet) for kind in _KINDS}

    def _look(self, record: StepRecord) -> list[Anomaly]:
        """Take the next record; an anomaly for each of these."""
        ranks = {rank: said for rank, said in record.scalars.items() if _NEEDED & said.keys()}
        known = bool(ranks) and all(map(_is_known, ranks.values()))
        if record.skipped or record.missing:
            return []
        some = [*self._look_at_extra(record), *self._look_at_own_mean(record)]
        if not known:
            self._known = 0 if ranks else self._known
            return some
        self._known += 1
        looks = (
            some,
            self._look_at_weights(record, ranks),
            self._look_at_labelled(record),
            self._look_at_labels(record),
            self._look_at_gone(record),
            self._look_at_favoured(record),
            self._look_at_opposed(record),
            self._look_at_answers(record, ranks),
            self._look_at_outputs(record, ranks),
            self._look_at_class_labels(record, ranks),
        )
        return [anomaly for look in looks for anomaly in look]

    def _look_at_extra(self, record: StepRecord) -> Iterator[Anomaly]:
        self._extra.take(record)
        told = self._extra.told(record.step, self._enough)
        if told is not None and self._told["extra"].due(record.step):
            looks, what = told
            message = f"the gradients of {looks} sampled steps show that {what}"
            yield self._verdict(record, message, {"looks": looks}, "backward")

    def _look_at_own_mean(self, record: StepRecord) -> Iterator[Anomaly]:
        sizes = self._own_mean.take(record)
        if sizes is not None and self._told["own mean"].due(record.step):
            message = (
                f"each rank's loss is the mean of its own rows, and at {sizes.looks} of the last "
                f"{sizes.of} sampled steps one was given {APART:g} x as much as another or more "
                f"({sizes.fewest:.0f} and {sizes.most:.0f} numbers now): a row of the smaller "
                f"batch counts for {sizes.most / sizes.fewest:.3g} x one of the larger; unless "
                "that is meant, divide the sum by the rows of all micro-batches and ranks "
                "(num_items_in_batch of transformers)"
            )
            yield self._verdict(record, message, sizes._asdict(), "backward", level="info")

    def _look_at_weights(
        self, record: StepRecord, ranks: Mapping[int, Mapping[str, float]]
    ) -> Iterator[Anomaly]:
        order, logs = _weights(record, ranks)
        if order != self._order:
            self._order = order
            self._weights.clear()
        self._weights.append(np.vstack((logs.mean(0), logs)))  # [all and each rank, 6]
        # Of two losses in one output (labelled rows, and what a model has labelled itself) now one
        # is told and now the other, with looks between that fit neither.
        if len(self._weights) < self._looks + NOW or self._known <= NOW:
            return
        looks = np.stack(self._weights)
        before, now = looks[: self._looks], looks[self._looks :]
        up, down = now.min(0) - before.max(0), before.min(0) - now.max(0)
        spread = np.maximum(np.ptp(before, 0), np.ptp(now, 0))
        moved = (up >= self._ratio).all(1) | (down >= self._ratio).all(1)
        moved &= spread.min(1) <= math.log1p(STEADY)
        those = np.flatnonzero(moved[1:])
        alone = order[those[0]] if len(those) == 1 < len(order) else None
        if not moved[0] and alone is None:
            return
        at = 0 if alone is None else 1 + int(those[0])
        steady = int(spread[at].argmin())
        times = np.median(now, 0)[at, steady] - np.median(before, 0)[at, steady]
        ratio = math.exp(min(times, LARGEST))
        if self._told["weight"].due(record.step):
            of = "the output" if alone is None else f"the output of rank {alone} alone"
            message = (
                f"at the last {NOW} sampled steps a row of {of} weighs {ratio:.3g} x what it did "
                f"in the loss at the {self._looks} before; neither the size of the batch nor the "
                "number of micro-batches explains it: look at what the loss is divided by (a sum "
                "or a mean, micro-batches), and at its weight among other losses"
            )
            yield self._verdict(record, message, {"ratio": ratio}, "backward", alone)

    def _look_at_labelled(self, record: StepRecord) -> Iterator[Anomaly]:
        shares = scalars(record, CLASS_LABELLED)
        sure = scalars(record, CLASS_SURE)  # they may have none, as of logits that exploded
        self._labelled.append((min(shares) - max(sure, default=0.0), max(shares)))
        if len(self._labelled) < self._looks + COUNTING:
            return
        lows, highs = np.array(self._labelled).T
        low, high = lows[: self._looks].min(), highs[: self._looks].max()
        now = lows[self._looks :].min()
        # Of few rows all may have a label by chance: so it is further to 1 than the shares ever lay
        # from each other.
        if now < 1 or 1 - high < max(high - low, 0.01):
            return
        if self._told["labelled"].due(record.step):
            message = (
                f"all rows of the output have a label in the loss at each of the last {COUNTING} "
                f"sampled steps, and at {self._looks} before them {_percent(1 - high)} % or more "
                "were ignored: if these were padding or a prompt, they are learned now; look at "
                "what labels such places are given, and which the loss ignores"
            )
            yield self._verdict(record, message, {"labelled": high}, "forward")

    def _look_at_labels(self, record: StepRecord) -> Iterator[Anomaly]:
        labels = scalars(record, CLASS_OF_ALL)
        self._labels.append(frozenset(map(int, labels)) if min(labels) >= 0 else frozenset())
        looks = [labels for labels in self._labels if labels]
        classes: frozenset[int] = frozenset().union(*looks)
        # The classes are seen to change now and then: between, the data are as sorted as before.
        self._sorted = len(looks) >= SAME and (self._sorted or len(classes) > 1)
        if not self._sorted:
            return
        if self._told["one label"].due(record.step):
            message = (
                f"at {len(looks)} of the last {len(self._labels)} sampled steps all samples of a "
                f"rank's batch have one label, and over time {len(classes)} labels: the data are "
                "sorted by class, and nobody shuffles them"
            )
            values = {"looks": len(looks), "classes": len(classes)}
            yield self._verdict(record, message, values, "forward")

    def _look_at_gone(self, record: StepRecord) -> Iterator[Anomaly]:
        unknown = 1.0 - min(scalars(record, CLASS_LABELLED))
        gone = self._seen.take(record.step, labels_seen(record), self._looks, unknown)
        if gone and self._told["gone"].due(record.step):
            since = min(since for _, since in gone)
            names = ", ".join(str(label) for label, _ in gone[:NAMED])
            more = f" and {len(gone) - NAMED} more" if len(gone) > NAMED else ""
            looked = max(scalars(record, CLASS_LOOKED))
            message = (
                f"none of the {looked:.0f} rows of a rank that are looked at in a sampled step has "
                f"had label {names}{more} since step {since} (of labels from {LABEL_BITS} on, the "
                "remainder is counted), far longer than by chance where samples are drawn at "
                "random: look whether part of the data is lost, or cannot be read"
            )
            values = {"labels": len(gone), "label": gone[0][0], "since": since}
            yield self._verdict(record, message, values, "forward")

    def _look_at_favoured(self, record: StepRecord) -> Iterator[Anomaly]:
        # Of the few rows of one rank a power is a rough estimate, and none where all are alike.
        powers = [power for power in scalars(record, CLASS_POWER) if math.isfinite(power)]
        power = mean(powers) if powers else 0.0
        self._favoured = self._favoured + 1 if power >= FAVOURED else 0
        if self._favoured >= self._looks and self._told["favoured"].due(record.step):
            message = (
                f"at the last {self._favoured} sampled steps rows weigh the more in the loss, the "
                f"more rows have their label (as its share to the power of {power:.2g}): weights "
                "of classes are meant to be the inverse of their shares, and rare ones are learned "
                "by nobody so"
            )
            yield self._verdict(record, message, {"power": power}, "backward")

    def _look_at_opposed(self, record: StepRecord) -> Iterator[Anomaly]:
        """Look for ranks that favour frequent labels, while others favour rare ones."""
        powers = {r: float(said.get(CLASS_POWER, math.nan)) for r, said in record.scalars.items()}
        usual = min((power for power in powers.values() if power <= -FAVOURED), default=None)
        found = [r for r, power in powers.items() if power >= FAVOURED and usual is not None]
        self._opposed = {rank: self._opposed.get(rank, 0) + 1 for rank in found}
        ranks = sorted(rank for rank, looks in self._opposed.items() if looks >= self._looks)
        if ranks and usual is not None and self._told["opposed"].due(record.step):
            power = max(powers[rank] for rank in ranks)
            message = (
                f"at the last {self._looks} sampled steps rows weigh the more in the loss on "
                f"{ranks_text(tuple(ranks))}, the more rows have their label (as its share to the "
                f"power of {power:.2g}), and the less on another one ({usual:.2g}): look at the "
                "weights of classes that each rank has made"
            )
            alone = ranks[0] if len(ranks) == 1 else None
            values = {"power": power, "others": usual}
            yield self._verdict(record, message, values, "backward", alone)

    def _look_at_answers(
        self, record: StepRecord, ranks: Mapping[int, Mapping[str, float]]
    ) -> Iterator[Anomaly]:
        self._right.append({rank: _answers(said) for rank, said in ranks.items()})
        if len(self._right) < ANSWERED or any(each.keys() != ranks.keys() for each in self._right):
            return
        order = sorted(ranks)
        found = np.array([[each[rank] for rank in order] for each in self._right])
        right, rows = found[-ANSWERED:, :, :2].sum(0).T  # [ranks]
        shares = right / np.maximum(rows, 1)
        lowest = int(shares.argmin())
        others = np.delete(shares, lowest)
        sizes = found[-ANSWERED:, :, 2]
        if not len(others) or not rows[lowest] or sizes.max() > UNLIKE * sizes.min():
            return
        usual, low = float(others.min()), float(shares[lowest])
        before, past = found[:-ANSWERED, lowest, :2].sum(0)  # 0 of none
        was = min(usual, before / past) if past >= rows[lowest] else math.nan
        apart = usual >= HALF and low <= HALF * usual
        sudden = was >= HALF and 1 - low >= TIMES_WRONG * (1 - was)
        deviation = math.sqrt(max(usual * (1 - usual), 0.05) / float(rows[lowest]))
        if not (apart or sudden) or min(usual, was if sudden else usual) - low < FAR * deviation:
            return
        if self._told["right"].due(record.step):
            # Of two nobody knows which of them is right, unless one was as the other before.
            rank = order[lowest] if sudden or len(order) > 2 else None
            at_once = f", and {_percent(was)} % before" if sudden else ""
            message = (
                f"rank {order[lowest]} answers {_percent(low)} % of its samples with their label"
                f"{at_once}, {_others(order, lowest)} {_percent(usual)} % or more, over {ANSWERED} "
                "sampled steps: look whether it numbers the classes as the others do, and which "
                "data it reads"
            )
            values = {"right": low, "others": usual}
            yield self._verdict(record, message, values, "forward", rank)

    def _look_at_outputs(
        self, record: StepRecord, ranks: Mapping[int, Mapping[str, float]]
    ) -> Iterator[Anomaly]:
        self._logits.take(record, ranks)
        kind, looks = self._logits.kind, self._logits.looks
        span = record.step - self._logits.since
        enough = kind and self._enough.reached(looks, span, differ=False)
        if enough and self._told[kind].due(record.step):
            message = f"at the last {looks} sampled steps {MESSAGES[kind]}"
            yield self._verdict(record, message, {"looks": looks}, "forward")

    def _look_at_class_labels(
        self, record: StepRecord, ranks: Mapping[int, Mapping[str, float]]
    ) -> Iterator[Anomaly]:
        found = self._class_labels.take(record, ranks)
        if found is not None and self._told[found.kind].due(record.step):
            yield self._verdict(record, str(found), found.values, "forward")

    def _verdict(
        self, record: StepRecord, message: str, values: Mapping[str, float], phase: str,
        rank: int | None = None, *, level: str = "warn",
    ) -> Anomaly:  # fmt: skip
        return self.anomaly(record, level, message, values, phase=phase, kind="output", rank=rank)


class _LabelsSeen:
    """How often each label has come, and since when it has not."""

    def __init__(self) -> None:
        self._looks = 0  # of all ranks together: each has drawn its own samples
        self._seen = np.zeros(LABEL_BITS, np.int64)  # of these, those at which each label came
        self._unseen = np.zeros(LABEL_BITS, np.int64)  # of these, since it came for the last time
        self._came = np.zeros(LABEL_BITS, np.int64)  # steps at which some rank had it
        self._absent = np.zeros(LABEL_BITS, np.int64)
        self._longest = np.zeros(LABEL_BITS, np.int64)
        self._since = np.zeros(LABEL_BITS, np.int64)
        self._told = np.zeros(LABEL_BITS, np.bool_)
        self._last: deque[NDArray[np.bool_]] = deque(maxlen=REMEMBERED)
        self._unknown: deque[float] = deque(maxlen=REMEMBERED)

    def take(
        self, step: int, bits: Sequence[int], fewest: int, unknown: float
    ) -> list[tuple[int, int]]:
        """Take what the ranks have seen; return (label, since) of those that are gone as of now.

        Args:
            step: of the look.
            bits: of each rank, one for each label that has come.
            fewest: steps at which a label must have come.
            unknown: share of the rows of which no label is known.
        """
        if not any(bits):
            return []
        seen = looks_with(bits)
        here = seen > 0
        fresh = ~here & (self._absent == 0)
        self._since[fresh] = step
        before = self._looks - self._unseen  # looks, those at which it came among them
        self._looks += len(bits)
        self._seen += seen
        self._unseen = np.where(here, 0, self._unseen + len(bits))
        self._came += here
        ended = here & (self._came > 1)  # the first one says nothing of how often it comes
        self._longest = np.where(ended, np.maximum(self._longest, self._absent), self._longest)
        self._absent = np.where(here, 0, self._absent + 1)
        self._told &= ~here
        self._last.append(here)
        self._unknown.append(unknown)
        gone = ~here & ~self._told & (self._came >= fewest)
        gone &= self._absent > np.maximum(LONGER * self._longest, FEWER - 1)
        if gone.any():
            chance = _of_absence(*(each[gone] for each in (self._seen, before, self._unseen)))
            gone[np.flatnonzero(gone)] = chance <= BY_CHANCE
        self._told |= gone
        labels = [int(label) for label in np.flatnonzero(gone)]
        return [
            (one, int(self._since[one]))
            for one in labels
            if not (self._may_be_unknown(one) or self._is_another_task(one))
        ]

    def _may_be_unknown(self, label: int) -> bool:
        """Whether its rows may be among those whose label is not known, as these have become more.

        A label is seen by a row's gradient, which is zero where the answer is right to the last
        bit: always this one, of logits that exploded, or a class that is learned by heart.
        """
        absent = int(self._absent[label])
        unknown = list(self._unknown)
        before, now = unknown[-2 * absent : -absent], unknown[-absent:]
        classes = max(int((self._came > 1).sum()), 1)
        return bool(before) and mean(now) - mean(before) > MORE_UNKNOWN / classes

    def _is_another_task(self, label: int) -> bool:
        """Whether, since a label is gone, others come that did not come before."""
        looks, absent = np.stack(self._last), int(self._absent[label])
        before, now = looks[-2 * absent : -absent], looks[-absent:]
        return bool(((now.mean(0) >= HALF) & ~before.any(0)).any()) if len(before) else False


def _of_absence(
    came: NDArray[np.int64], looks: NDArray[np.int64], absent: NDArray[np.int64]
) -> Floats:
    """Return the probability that labels stay away for so many looks in a row.

    If nothing else is known than that each came at some of the looks before: the rule of
    succession, (b + 1) / (n + 2) for the next look when it was away at b of n, for one after the
    other.
    """
    found = [
        math.exp(math.lgamma(n - c + 1 + k) + math.lgamma(n + 2) - math.lgamma(n - c + 1)
                 - math.lgamma(n + 2 + k))
        for c, n, k in zip(came.tolist(), looks.tolist(), absent.tolist(), strict=True)
    ]  # fmt: skip
    return np.array(found)


def _percent(share: float) -> str:
    return f"{100 * share:.2g}" if share < 0.995 else "100"


def _is_known(said: Mapping[str, float]) -> bool:
    """Whether a rank's loss is a cross-entropy, and it says all that is looked at."""
    sizes = (said.get(name, math.nan) for name in (CLASS_ROWS, CLASS_WEIGHT, CLASS_LABELLED))
    shares = (said.get(name, math.nan) for name in (CLASS_RIGHT, CLASS_OF_ALL))
    looked = 0 <= said.get(CLASS_LOOKED, math.nan) < math.inf
    return looked and all(0 < one < math.inf for one in sizes) and all(map(math.isfinite, shares))


def _weights(
    record: StepRecord, ranks: Mapping[int, Mapping[str, float]]
) -> tuple[tuple[int, ...], Floats]:
    """Return ranks, and logarithms of what a row weighs [ranks, 6], without a GradScaler's scale.

    Of a row, times all rows, times those with a label, and these times the micro-batches: whatever
    a loss is divided by, one of them stays when that changes.
    """
    order = tuple(sorted(ranks))
    names = CLASS_WEIGHT, CLASS_ROWS, CLASS_LABELLED
    logs = np.log([[float(ranks[rank][name]) for name in names] for rank in order])
    logs[:, 0] -= math.log(loss_scale_of(record))
    micros = math.log(micro_batches_of(record))
    one = logs.cumsum(1)
    return order, np.concatenate((one, one + micros), 1)


def _answers(said: Mapping[str, float]) -> tuple[float, float, float]:
    """Return how many rows were answered rightly, of how many that were looked at, and of all."""
    rows = said[CLASS_LOOKED] * said[CLASS_LABELLED]
    return rows * said[CLASS_RIGHT], rows, said[CLASS_ROWS] * said[CLASS_LABELLED]


def _others(order: Sequence[int], lowest: int) -> str:
    return "all others" if len(order) > 2 else f"rank {order[1 - lowest]}"
