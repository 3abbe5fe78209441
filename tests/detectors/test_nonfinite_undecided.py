"""What of a non-finite value is not known is said, and what may be another fault is told."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from ddpprobe.detectors.nonfinite import NonFinite
from ddpprobe.records.step import (
    LOSS_OF_BAD,
    SEVERAL,
    UNORDERED,
    UNREAD_INPUT,
    Anomaly,
    FirstBad,
    Site,
    StepRecord,
)
from tests.detectors import made_records
from tests.detectors.made_records import Row

OUT, LAST, ROOT = Site("a", "output"), Site("b", "output"), Site("", "output")
GRADS = (Site("a", "grad_output"), Site("b", "grad_output"), Site("", "grad_output"))
WEIGHTS = (Site("a.weight", "grad_local"), Site("a.weight", "grad"))
SITES = (OUT, LAST, ROOT, *GRADS, *WEIGHTS)
FINE = {0: {"loss": 1.0}, 1: {"loss": 1.0}}


def sampled(step: int, *bad: Site, first: FirstBad | None = None, **changes: object) -> StepRecord:
    rows: dict[Site, Row] = {site: {"rms": 1.0, "nan": 9 * (site in bad)} for site in SITES}
    given = {"scalars": FINE, "first_bad": first, "ranks": 2} | changes
    return made_records.record(step, rows=rows, **given)  # type: ignore[arg-type]


def unsampled(step: int, rank: int = 1, **changes: object) -> StepRecord:
    """A NaN in the forward of a step that does not name the module."""
    bad = FirstBad(step, 0, "forward", 1, rank, nan=32, numel=32)
    bad = replace(bad, **changes)  # type: ignore[arg-type]
    whose = (0, 1) if rank == SEVERAL else (rank,)
    return StepRecord(0, step, whose, step, sampled=False, first_bad=bad)


def run(*records: StepRecord) -> list[Anomaly]:
    return made_records.run(NonFinite(), records)


def told(*records: StepRecord) -> list[tuple[int, int | None]]:
    return [(a.step, a.rank) for a in run(*records) if a.level == "page"]


NEAREST = {"phase": "backward", "fqn": "b.bias", "kind": "grad_local"}


@pytest.mark.parametrize("changes", [{}, {"nan": 0, "numel": 0}, {"phase": "backward"}, NEAREST])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_nan_behind_a_clean_sampled_step_is_another_one(
    changes: dict[str, object], rank: int
) -> None:
    late = {**FINE, 1: {"loss": 1.0, "loss@-7": math.nan}}
    stream = [sampled(10), unsampled(13, **changes), sampled(20, scalars=late)]
    assert told(*stream, unsampled(27, rank, **changes)) == [(13, 1), (27, rank)]


@pytest.mark.parametrize(
    ("rank", "kind", "says"),
    [(1, "output", True), (0, "output", False), (SEVERAL, "output", True),
     (1, "grad_output", False)],
)  # fmt: skip
def test_a_module_of_which_nobody_knows_what_it_was_given_may_have_been_given_it(
    rank: int, kind: str, says: bool
) -> None:
    phase = "forward" if kind == "output" else "backward"
    first = FirstBad(5, 0, phase, 0, rank, "a", kind, "", 9, 0, 0, 100)
    scalars = {**FINE, 1: {"loss": 1.0, UNREAD_INPUT: 1.0}}
    (page,) = run(sampled(5, Site("a", kind), first=first, scalars=scalars))
    assert ("it was given so" in page.message) is says


def test_what_is_bad_in_each_step_is_told_once_on_whatever_rank() -> None:
    stream = [unsampled(s, s % 2) for s in range(13, 60)]
    bad = [sampled(s, OUT, first=FirstBad(s, 0, "forward", 0, 0, "a", "output", "", 9, 0, 0, 100))
           for s in range(20, 60, 10)]  # fmt: skip
    both = {r.step: r for r in [*stream, *bad]}
    assert told(*(both[s] for s in sorted(both))) == [(13, 1)]


def test_a_rank_that_is_bad_now_and_then_is_told_ever_more_rarely() -> None:
    stream = [r for s in range(0, 2000, 10) for r in (sampled(s), unsampled(s + 3))]
    assert told(*stream) == [(s, 1) for s in (3, 13, 23, 43, 83, 163, 323, 643, 1283)]


@pytest.mark.parametrize("changes", [{"nan": 0, "neg_inf": 4}])
def test_a_mask_that_comes_on_each_rank_in_another_step_is_told_once(
    changes: dict[str, object],
) -> None:
    stream = [unsampled(13, 0, **changes), sampled(20), unsampled(27, 1, **changes)]
    assert told(*stream) == [(13, 0)]


UNDECIDED = "no finite loss of this step is known"
GRADIENT = FirstBad(20, 0, "backward", 8, 1, "", "grad_output", "", 9, 0, 0, 100)


@pytest.mark.parametrize(
    ("scalars", "known"),
    [({}, False), (FINE, True), ({0: {"loss": 1.0}}, False), ({1: {"loss": 1.0}}, True)],
)
@pytest.mark.parametrize("rank", [1, SEVERAL])
def test_a_bad_gradient_of_the_output_is_the_loss_or_its_backward(
    scalars: dict[int, Row], known: bool, rank: int
) -> None:
    (page,) = run(sampled(20, GRADS[2], first=replace(GRADIENT, rank=rank), scalars=scalars))
    assert (page.module, page.kind, page.phase) == ("", "grad_output", "backward")
    known = known if rank == 1 else len(scalars) == 2
    assert (UNDECIDED in page.message) == (not known)


@pytest.mark.parametrize(
    ("fqn", "sites", "bad", "undecided"),
    [
        ("b", SITES, GRADS[1:2], False),
        ("b", SITES, GRADS[1:], True),  # what the model returns is the very tensor of its last one
        ("b", (*GRADS[:2], *WEIGHTS), GRADS[1:2], True),  # the model's own is not observed
        ("a", (*GRADS[:2], *WEIGHTS), GRADS[:1], False),
        ("a.weight", SITES, WEIGHTS, False),
        ("a.weight", WEIGHTS, WEIGHTS, True),
    ],
)
def test_a_gradient_behind_a_finite_one_is_of_the_backward(
    fqn: str, sites: tuple[Site, ...], bad: tuple[Site, ...], *, undecided: bool
) -> None:
    kind = "grad_local" if fqn == "a.weight" else "grad_output"
    rows: dict[Site, Row] = {site: {"rms": 1.0, "nan": 9 * (site in bad)} for site in sites}
    first = replace(GRADIENT, fqn=fqn, kind=kind)
    (page,) = run(made_records.record(20, rows=rows, first_bad=first, ranks=2))
    assert (UNDECIDED in page.message) == undecided


@pytest.mark.parametrize("loss", [None, 1.0])
def test_of_an_unsampled_step_the_loss_comes_with_the_word_of_it(loss: float | None) -> None:
    for changes in (NEAREST, {"phase": "backward"}):
        told = {1: {} if loss is None else {LOSS_OF_BAD: loss}}
        (page,) = run(replace(unsampled(17, **changes), scalars=told))
        assert (page.step, page.rank, page.phase) == (17, 1, "backward")
        assert (UNDECIDED in page.message) == (loss is None)


def test_a_loss_that_is_known_to_be_bad_is_the_origin() -> None:
    bad = replace(unsampled(17, **NEAREST), scalars={1: {LOSS_OF_BAD: math.nan}})
    (page,) = run(bad)
    assert (page.step, page.rank, page.phase, page.module) == (17, 1, "forward", None)
    assert page.message == "non-finite loss (NaN); then b.bias:grad_local in backward"


MASK = FirstBad(20, 0, "forward", 0, SEVERAL, "a", "output", "", 0, 0, 9, 100)
MAY = "; finite at step 10, so it may have been so since step 11"


def masked(step: int, *more: Site, **changes: object) -> StepRecord:
    return sampled(step, OUT, *more, first=MASK, **changes)


@pytest.mark.parametrize(
    ("stream", "said"),
    [
        ([sampled(10), masked(20)], MAY),
        ([sampled(19), masked(20)], ""),  # every=1
        ([sampled(10), masked(20, scalars={0: {"loss": math.inf}})], ""),
        ([sampled(10), masked(20, ROOT)], ""),  # what is looked at in each step
        ([sampled(10), masked(20, WEIGHTS[0])], ""),
        ([sampled(10), masked(20, WEIGHTS[1])], ""),
        ([sampled(10), masked(20, GRADS[0])], MAY),
        ([sampled(10), masked(20, partial=True)], ""),
        ([sampled(10, partial=True), masked(20)], ""),
        ([sampled(10, attempt=1), masked(20, attempt=2)], ""),
        ([masked(20)], ""),
        ([sampled(10, OUT), masked(20)], ""),
        (
            [made_records.record(10, rows={LAST: {}}, ranks=2), masked(20)],
            "; not looked at since step 10, so it may have been so earlier",
        ),
    ],
)  # fmt: skip
def test_what_no_unsampled_step_would_show_may_be_older(
    stream: list[StepRecord], said: str
) -> None:
    page = [a for a in run(*stream) if a.module == "a" and a.step == 20][-1]
    assert page.message.startswith("9 -Inf of 100 elements")
    assert page.message.partition(" elements")[2].partition("; on several")[0] == said


@pytest.mark.parametrize(("kept", "said"), [(True, MAY), (False, "")])
def test_a_reduced_gradient_that_spoiled_no_weight_may_be_older(kept: bool, said: str) -> None:
    witness = FirstBad(20, 0, "step", 9, 0, "a.weight", "grad", "", 1, 0, 0, 10)
    weight = Site("a.weight", "param")

    def made(step: int, bad: int) -> StepRecord:
        rows: dict[Site, Row] = {WEIGHTS[1]: {"nan": bad}, weight: {"nan": bad * (not kept)}}
        return made_records.record(step, FINE, rows, first_bad=witness if bad else None)

    (page,) = run(made(10, 0), made(20, 1))
    assert page.message == f"1 NaN of 10 elements{said}"


def test_of_stages_whose_order_is_not_known_it_is_said_that_one_was_first_and_not_which() -> None:
    bad = FirstBad(4, 1, "forward", UNORDERED, SEVERAL)
    seen = sampled(4, OUT, LAST, first=bad)
    for record in (seen, StepRecord(0, 4, (0, 1), 4, sampled=False, first_bad=bad)):
        (page,) = run(record)
        assert (page.level, page.rank, page.module, page.micro) == ("page", None, None, 1)
        assert (
            "on several stages of a pipeline: which of them was first is not known" in page.message
        )
        assert "at once" not in page.message


HUGE = "; before it the output of fc reached 4e+37, and was at most 2 at step 10: look there first"


@pytest.mark.parametrize(
    ("reached", "last", "said"),
    [
        (4e37, {}, HUGE),
        (1999.0, {}, ""),
        (4e37, {"nan": 1}, ""),  # it was no clean look
        (4e37, {"max": 0.0}, ""),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["output", "input"])
def test_what_grew_beyond_all_measure_before_a_nan_is_named_with_it(
    reached: float, last: Row, said: str, kind: str
) -> None:
    huge, small = Site("fc", "output"), Site("first", "output")
    origin, behind = Site("norm", kind), Site("out", "output")
    first = FirstBad(11, 0, "forward", 3, 1, "norm", kind, "", 9, 0, 0, 10)

    def made(step: int, fc: Row, nan: int) -> StepRecord:
        rows: dict[Site, Row] = {
            small: {"max": 1.0}, huge: fc, origin: {"max": 1.0, "nan": nan},
            behind: {"max": 1e30 if nan else 1.0},
        }  # fmt: skip
        bad = first if nan else None
        return made_records.record(step, FINE, rows, first_bad=bad, ranks=2)

    stream = [made(10, {"max": 2.0, **last}, 0), made(11, {"max": reached}, 9)]
    page = run(*stream)[-1]
    assert page.module == "norm"
    assert page.message.partition("; before it the")[0] + said == page.message
