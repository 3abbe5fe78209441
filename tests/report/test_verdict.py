"""What the report says first, of every mixture of findings, losses and deaths."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ddpprobe.reader.completeness import Completeness, RankShare
from ddpprobe.records.step import Anomaly
from ddpprobe.report.captured_cause import CapturedCause
from ddpprobe.report.numbers import Labels
from ddpprobe.report.rows import RunSites
from ddpprobe.report.story import Story
from ddpprobe.report.verdict import judge

PAGE = Anomaly(
    "nonfinite", "page", 3, 1, 0, "a.b", "output", "forward", first_cause=True, message="3 NaN",
    values={}, sampled=True,
)  # fmt: skip
WARNING = replace(PAGE, detector="grad_spike", level="warn", first_cause=False, message="odd")
WHOLE = Completeness((RankShare(0, 0, 8, 8, 7, 7, "closed"),), {0: 1}, live=False)
STEPS = {"first": 0, "last": 7}
ENDED = {
    "attempt": 0, "steps": STEPS, "end": {"state": "ended", "how": "", "message": "as it must"}
}  # fmt: skip
PART = Completeness((RankShare(0, 0, 5, 8, 4, 7, "closed"),), {0: 1}, live=False)


def story(*anomalies: Anomaly, info: dict[str, Any] | None = None, **changes: Any) -> Story:
    plain = {"path": "run", "attempts": [ENDED], "first_death": None, "steps": STEPS}
    made = Story(
        {**plain, "state": "ended", **(info or {})}, list(anomalies), RunSites(), [], Labels(),
        [], [], [], held=WHOLE, records=8,
    )  # fmt: skip
    for name, value in changes.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    ("anomalies", "changes", "tone", "headline"),
    [
        ((), {}, "good", "No anomalies in 8 recorded steps"),
        ((), {"records": 1}, "good", "No anomalies in 1 recorded step"),
        ((), {"lost": ["a chunk"]}, "warn", "Nothing found in 8 recorded steps"),
        ((), {"held": PART}, "warn", "Nothing found in what is held: 5 of 8 sampled steps"),
        ((WARNING,), {}, "warn", "No page, 1 weaker anomaly in 8 recorded steps"),
        ((WARNING,), {"lost": ["a chunk"]}, "warn", "No page, 1 weaker anomaly in 8 recorded"),
        ((PAGE,), {"lost": ["a chunk"]}, "bad", "First non-finite tensor: output of a.b on rank 0"),
        ((PAGE,), {"held": PART}, "bad", "First non-finite tensor: output of a.b on rank 0"),
        ((), {"records": 0, "lost": ["a chunk"]}, "warn", "Nothing could be read"),
    ],
)
def test_lost_data_is_never_good_and_never_hides_a_finding(
    anomalies: tuple[Anomaly, ...], changes: dict[str, Any], tone: str, headline: str
) -> None:
    verdict = judge(story(*anomalies, **changes))
    assert verdict.tone == tone
    assert verdict.headline.startswith(headline)
    assert len(verdict.findings) == sum(a.first_cause for a in anomalies)


def test_a_weaker_anomaly_stands_alone_only_where_there_is_no_first_cause() -> None:
    other = replace(WARNING, step=1, attempt=0)  # before the cause, so not one of its consequences
    assert judge(story(WARNING)).alone == ["step 3, rank 0: a.b:output: odd"]
    assert judge(story(other, PAGE)).alone == []


def test_without_a_first_cause_it_is_said_how_to_look_closer_at_the_first_anomaly() -> None:
    (command,) = judge(story(WARNING)).commands
    assert command.startswith("ddpprobe trace ")
    assert command.endswith("--site a.b:output --rank 0 --steps 0:23")
    assert judge(story(WARNING, PAGE)).commands == []
    assert judge(story()).commands == []


# ---- how the run ended

KILLED = {"state": "crashed", "how": "SIGKILL", "message": "rank 0 died (SIGKILL) in step 7"}
ASKED = {"state": "stopped", "how": "SIGTERM", "message": "stopped from outside: by Ctrl-C"}
ALL_KILLED = {"state": "unknown", "how": "SIGKILL", "message": "all ranks were killed"}
UNSEEN = {"state": "unknown", "how": "unknown", "message": "how it ended is not known"}
LOST = replace(PAGE, detector="rank_lost", module=None, kind=None, message=KILLED["message"])


def aftermath(end: dict[str, str], *anomalies: Anomaly) -> list[str]:
    attempts = [{"attempt": 0, "steps": STEPS, "end": end}]
    return judge(story(*anomalies, info={"attempts": attempts})).aftermath


@pytest.mark.parametrize(
    ("end", "text"),
    [
        (KILLED, "crashed: rank 0 died (SIGKILL) in step 7."),
        (ASKED, "stopped from outside: by Ctrl-C."),
        (ALL_KILLED, "unknown: all ranks were killed."),
    ],
)
def test_an_end_of_which_there_is_something_to_say_is_told(end: dict[str, str], text: str) -> None:
    assert aftermath(end, PAGE) == [text, "The last step is 7."]


def test_an_end_is_not_told_twice_nor_where_nothing_is_known() -> None:
    assert aftermath(KILLED, LOST) == ["The last step is 7."]
    assert aftermath(ASKED, replace(WARNING, message=ASKED["message"])) == ["The last step is 7."]
    assert aftermath(UNSEEN) == ["The last step is 7."]


def test_a_rank_lost_between_two_steps_is_not_said_to_be_in_the_optimizer() -> None:
    inside, between = judge(story(LOST)), judge(story(replace(LOST, phase="step")))
    what = "The job was lost on rank 0 at step 3"
    assert inside.headline == f"{what}, micro-batch 1, in the forward pass"
    assert between.headline == what
    assert (between.findings[0].where.micro, between.findings[0].where.phase) == (None, "")


def test_what_was_found_behind_the_backward_is_not_laid_to_the_optimizer_nor_a_micro_batch() -> (
    None
):
    weight = replace(PAGE, module="a.b.weight", kind="param", phase="step")
    found = judge(story(weight))
    where = "parameter a.b.weight on rank 0 at step 3, after the backward pass"
    assert found.headline == f"First non-finite tensor: {where}"
    assert found.findings[0].where.micro is None


def test_of_several_attempts_it_is_said_whose_cause_it_is_and_how_the_last_one_went() -> None:
    well = {"attempt": 1, "steps": STEPS, "end": {"state": "ended", "how": "", "message": "all"}}
    attempts = [{"attempt": 0, "steps": STEPS, "end": KILLED}, well]
    lost = replace(LOST, attempt=0, phase="step")
    for state, last in (
        ("ended", "Attempt 1 came to its end, at step 7."),
        ("running", "Attempt 1 is under way, at step 7."),
        ("crashed", "The last step of attempt 1 is 7."),
    ):
        found = judge(story(lost, info={"attempts": attempts, "state": state}))
        assert found.headline == "The job was lost on rank 0 at step 3 of attempt 0"
        assert found.aftermath[-1] == last


@pytest.mark.parametrize(
    ("recorded", "reached", "began", "said"),
    [
        (20, 29, 0, ["Attempt 1 came to its end, at step 29."]),
        (20, None, None, ["Attempt 1 came to its end, at step 20."]),
        (None, 3, 2, ["Attempt 1 came to its end, at step 3."]),
        (None, 2, None, []),  # it may have been before it
        (None, None, None, []),
    ],
)
def test_the_last_step_is_the_newest_attempts_though_an_earlier_one_came_further(
    recorded: int | None, reached: int | None, began: int | None, said: list[str]
) -> None:
    """Whoever begins again from a checkpoint, or from nothing, is behind for a while."""
    first = {**ENDED, "steps": {"first": 0, "last": 40}}
    second = {**ENDED, "attempt": 1, "steps": {"first": recorded, "last": recorded}}
    shares = (
        RankShare(0, 0, 5, 5, 40, 44, "died"),
        RankShare(1, 0, 3, 3, recorded, reached, "closed", began=began),
    )
    info = {"attempts": [first, second], "steps": {"first": 0, "last": 40}}
    held = Completeness(shares, {0: 1, 1: 1}, live=False)
    assert judge(story(info=info, held=held)).aftermath == said


def test_of_weights_that_stand_still_the_rows_of_their_parameters_are_shown() -> None:
    still = replace(PAGE, detector="frozen_param", kind="update", phase="step")
    for module, site in (("a.b", "'a.b*:update'"), ("", "'*:update'")):
        (finding,) = judge(story(replace(still, module=module))).findings
        assert f"--site {site}" in finding.commands[0]


def test_what_was_captured_of_the_guilty_module_can_be_executed_again() -> None:
    assert [c.split()[1] for c in judge(story(PAGE)).findings[0].commands] == ["trace"]
    kept = CapturedCause("a.b", 2, ())
    finding = judge(story(PAGE, captured=[kept])).findings[0]
    assert finding.commands[1] == (
        "ddpprobe replay run --step 3 --module a.b --rank 0 --build YOUR_MODULE:FUNCTION"
    )
    assert finding.inputs == "Its inputs were finite (captured)."


@pytest.mark.parametrize(
    ("kept", "said"),
    [
        (CapturedCause("a.b", 1, ()), "Its input was finite (captured)."),
        (CapturedCause("a.b", 2, ("input[1]",)), "input[1] was not finite (captured)."),
        (CapturedCause("a.b", 0, ()), ""),
    ],
)
def test_inputs_are_called_finite_only_if_they_were_looked_at(
    kept: CapturedCause, said: str
) -> None:
    assert judge(story(PAGE, captured=[kept])).findings[0].inputs == said
