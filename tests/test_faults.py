"""A small sample of `python -m tests.faults`: kills, accidents, hostile runs, deaths, origins."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import pytest

from ddpprobe.reader.run import open_run
from ddpprobe.reader.verify.verify import verify

from .faults import __main__ as faults
from .faults import (
    campaign,
    death_plans,
    death_verdict,
    deaths,
    hostile,
    mutations,
    origin_plans,
    origin_verdict,
    origins,
    syscalls,
)
from .faults import zygote as zygotes
from .made_runs import Made


@pytest.mark.skipif(not shutil.which("strace"), reason="needs strace")
@pytest.mark.parametrize(
    ("act", "call", "number"),
    [
        (syscalls.train, "pwrite64", 9),
        (syscalls.train, "openat", 4),
        (syscalls.fold, "renameat", 30),
        (syscalls.fold, "unlink", 2),
    ],
)
def test_a_writer_killed_at_a_system_call_loses_nothing_it_acknowledged(
    tmp_path: Path, act: syscalls.Act, call: str, number: int
) -> None:
    made = Made(tmp_path / "run", ranks=1)
    if act is syscalls.fold:
        made.whole(syscalls.STEPS)
        made.close()
    assert syscalls.killed(act, made.path, call, number)
    said = made.path / "acknowledged"
    steps = set(map(int, said.read_text().split())) if said.exists() else set()
    steps = set(range(syscalls.STEPS)) if act is syscalls.fold else steps
    assert list(syscalls.problems(made.path, steps, whole=act is syscalls.fold)) == []


def test_no_accident_to_a_store_with_captures_is_silent(tmp_path: Path) -> None:
    done, problems = mutations.mutate(tmp_path, 10, seed=3)
    assert problems == []
    assert done.total() > 5


def test_no_group_loses_its_zarr_json_in_silence(tmp_path: Path) -> None:
    path = tmp_path / "run"
    mutations.make(path)
    whole = dict(mutations.values(open_run(path)))
    groups = [
        f for f in path.rglob("zarr.json") if json.loads(f.read_text()).get("consolidated_metadata")
    ]
    assert {"anomalies", "rank_00000", "merged"} < {f.parent.name for f in groups}
    for lost in groups:
        data = lost.read_bytes()
        lost.unlink()
        assert mutations.problem(path, whole) == "", lost.relative_to(path)
        lost.write_bytes(data)


def test_what_a_stranger_sends_is_read_without_harm_and_in_bounded_memory(tmp_path: Path) -> None:
    args = argparse.Namespace(oddities=4, seed=1, most=1)
    done, problems = faults.of_hostile(tmp_path, args)
    assert problems == []
    assert done.total() == 2 * (1 + args.most)


def test_every_hostile_case_has_a_name_of_its_own() -> None:
    names = [name for name, _ in hostile.cases(2)]
    assert len(names) == len(set(names)) > 100


def test_no_byte_of_the_list_of_captures_changes_unseen(tmp_path: Path) -> None:
    mutations.make(tmp_path / "run")
    log = tmp_path / "run/manifest/attempt_000.captures.log"
    data = log.read_bytes()
    for at in range(3, len(data), 11):
        log.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        report = verify(open_run(tmp_path / "run"))
        assert report.damage or report.notes, at


DEATH = death_plans.Plan(
    number=0, world=2, fault="signal", how="SIGSEGV", rank=1, step=3, phase="forward",
    daemon="alive", launcher="torchrun",
)  # fmt: skip
TRUE_END = {"state": "crashed", "ranks": [1], "how": "SIGSEGV", "step": 3, "phase": "forward"}
UNSEEN = {"state": "vanished", "ranks": [], "how": ""}
STOP = {"fault": "stop", "how": "SIGTERM", "rank": -1, "phase": ""}


@pytest.mark.parametrize(
    ("planned", "said", "verdict"),
    [
        ({}, {}, "right"),
        ({}, {"step": None, "phase": None}, "right"),
        ({}, {"how": "unknown"}, "undecided"),
        ({}, {"ranks": [0, 1]}, "undecided"),
        ({}, {"state": "unknown", "ranks": [0, 1]}, "undecided"),
        ({}, {"state": "unknown", "ranks": []}, "undecided"),
        ({}, {"ranks": [0]}, "wrong"),
        ({}, {"ranks": []}, "wrong"),
        ({}, {"ranks": None}, "wrong"),
        ({}, {"state": "unknown", "ranks": [0]}, "wrong"),
        ({}, {"how": "SIGKILL"}, "wrong"),
        ({}, {"how": "exit:1"}, "wrong"),
        ({}, {"step": 2}, "wrong"),
        ({}, {"phase": "backward"}, "wrong"),
        ({}, {"state": "ended", "ranks": []}, "wrong"),
        ({}, {"state": "running", "ranks": []}, "wrong"),
        ({}, {"state": "hung"}, "wrong"),
        ({}, UNSEEN, "wrong"),
        ({"daemon": "dead"}, UNSEEN, "undecided"),
        ({"daemon": "late"}, {"state": "vanished", "ranks": [0]}, "wrong"),
        ({"daemon": "late"}, {"state": "ended", "ranks": []}, "wrong"),
        ({"phase": "between"}, {"step": 4, "phase": "data"}, "right"),
        ({"phase": "between"}, {"step": 2, "phase": "data"}, "wrong"),
        ({"fault": "exception", "how": "KeyError"}, {"how": "KeyError"}, "right"),
        ({"fault": "exception", "how": "KeyError"}, {"how": "exit:1"}, "undecided"),
        ({"fault": "exception", "how": "KeyError"}, {"how": "RuntimeError"}, "wrong"),
        ({"fault": "exception", "how": "KeyError", "wrapped": True}, {"how": "exit:1"}, "right"),
        ({"fault": "exit", "how": "os._exit:5"}, {"how": "exit:5"}, "right"),
        ({"fault": "exit", "how": "os._exit:5"}, {"how": "exit:1"}, "wrong"),
        ({"fault": "hang", "how": "SIGSTOP"}, {"state": "hung", "how": "SIGKILL"}, "right"),
        ({"fault": "hang", "how": "SIGSTOP"}, {"how": "SIGKILL"}, "wrong"),
        ({"fault": "hang"}, {"state": "stopped", "ranks": []}, "wrong"),
        ({"fault": "hang", "daemon": "late"}, {"state": "stopped", "ranks": []}, "undecided"),
        (STOP, {"state": "stopped", "ranks": [], "how": "SIGTERM"}, "right"),
        (STOP, {"state": "stopped", "ranks": [], "how": "a handler of a signal"}, "right"),
        (STOP, {"state": "stopped", "ranks": [], "how": "SIGINT"}, "wrong"),
        (STOP, {"state": "stopped", "ranks": [], "how": "exit:3"}, "wrong"),
        (STOP, {"state": "stopped", "ranks": [0], "how": "SIGTERM"}, "wrong"),
        (STOP, {"state": "crashed", "ranks": [0], "how": "SIGTERM"}, "wrong"),
        (STOP, {"state": "unknown", "ranks": [1]}, "wrong"),
        ({**STOP, "fault": "node"}, UNSEEN, "right"),
        ({**STOP, "fault": "node"}, {"state": "ended", "ranks": []}, "wrong"),
        ({**STOP, "fault": "orderly"}, {"state": "ended", "ranks": []}, "right"),
        ({**STOP, "fault": "orderly"}, {"state": "crashed", "ranks": [0]}, "wrong"),
    ],
)  # fmt: skip
def test_what_is_said_of_a_death_is_judged(
    planned: dict[str, object], said: dict[str, object], verdict: str
) -> None:
    plan = dataclasses.replace(DEATH, **planned)  # type: ignore[arg-type]
    assert death_verdict.judge(plan, {**TRUE_END, **said})[0] == verdict


def test_a_campaign_of_deaths_fails_at_one_wrong_verdict_and_at_too_many_undecided_ones() -> None:
    def line(verdict: str, **planned: object) -> dict[str, object]:
        plan = dataclasses.replace(DEATH, **planned)  # type: ignore[arg-type]
        return {"plan": plan.as_json(), "verdict": verdict, "why": "said so"}

    killed = {"how": "SIGKILL"}  # from outside
    right = [line("right", **killed)] * 9
    assert deaths.problems(right) == []
    assert deaths.problems([*right, line("undecided", **killed)]) == []
    assert len(deaths.problems([*right, *[line("undecided", **killed)] * 2])) == 1
    assert deaths.problems([*right, *[line("undecided", daemon="dead", **killed)] * 5]) == []
    assert len(deaths.problems([*right, line("undecided")])) == 1  # it died of its own
    assert len(deaths.problems([*right, line("wrong", daemon="late", **killed)])) == 1
    assert len(deaths.problems([*right, line("void", **killed)])) == 1


def test_deaths_are_drawn_by_their_seed_and_of_every_sort() -> None:
    drawn = [death_plans.draw(1, number) for number in range(200)]
    assert drawn == [death_plans.draw(1, number) for number in range(200)]
    assert drawn != [death_plans.draw(2, number) for number in range(200)]
    assert {(p.fault, p.daemon) for p in drawn} >= {
        (fault, daemon)
        for fault in ("signal", "exception", "exit", "stop")
        for daemon in death_plans.DAEMONS
    }
    assert {p.fault for p in drawn} == set(death_plans.FAULTS)


@pytest.mark.parametrize(
    ("fault", "how", "world", "daemon"),
    [
        ("signal", "SIGKILL", 2, "stopped"),
        ("signal", "SIGKILL", 4, "dead"),
        ("signal", "SIGSEGV", 2, "dead"),
        ("exit", "os._exit:7", 4, "late"),
        ("exception", "KeyError", 2, "late"),
    ],
)
def test_a_single_rank_s_death_is_decided_where_no_daemon_saw_it(
    tmp_path: Path, zygote: zygotes.Zygote, fault: str, how: str, world: int, daemon: str
) -> None:
    plan = dataclasses.replace(
        DEATH, fault=fault, how=how, world=world, daemon=daemon, launcher="idle"
    )
    line = deaths.carry(zygote, plan.as_json(), tmp_path)
    assert (line["verdict"], line["why"]) == ("right", ""), line
    assert (line["end"]["ranks"], line["exit"]) == ([1], 1)


@pytest.fixture(scope="module")
def zygote() -> Iterator[zygotes.Zygote]:
    with zygotes.Zygote() as started:
        yield started


PAGE = {
    "detector": "nonfinite", "level": "page", "step": 8, "micro": 0, "rank": 1,
    "module": "blocks.1.up", "kind": "output", "phase": "forward", "first_cause": True,
    "message": "6 NaN of 256 elements",
}  # fmt: skip
UP = origin_plans.Origin("forward", "blocks.1.up")
BETWEEN = origin_plans.Origin("functional", "blocks.1")
LATE = "which one is not known, nor whether a parameter was so before it"


@pytest.mark.parametrize(
    ("origin", "sampled", "said", "verdict"),
    [
        (UP, True, {}, "right"),
        (UP, True, {"module": None}, "wrong"),
        (UP, True, {"rank": None}, "wrong"),
        (UP, True, {"module": "blocks.1.act"}, "wrong"),
        (UP, True, {"rank": 0}, "wrong"),
        (UP, True, {"step": 9}, "wrong"),
        (UP, True, {"micro": 1}, "wrong"),
        (UP, True, {"phase": "backward"}, "wrong"),
        (UP, True, {"first_cause": False}, "wrong"),
        (UP, True, {"level": "warn"}, "wrong"),
        (UP, True, {"detector": "grad_spike"}, "wrong"),
        (UP, False, {"step": 6}, "right"),
        (UP, False, {"step": 6, "module": None}, "undecided"),
        (UP, False, {"step": 6, "module": "head"}, "wrong"),
        (UP, False, {"step": 7, "module": None}, "wrong"),
        (origin_plans.Origin("functional", "blocks.1"), True, {"module": None}, "right"),
        (origin_plans.Origin("functional", "blocks.1"), True, {}, "wrong"),
        (
            origin_plans.Origin("functional", "blocks.1"), True,
            {"message": "6 NaN; born in it or between it and blocks.1.norm"}, "right",
        ),
        (origin_plans.Origin("grad", "blocks.1.up"), True, {"phase": "backward"}, "right"),
        (origin_plans.Origin("grad", "blocks.1.up"), True, {}, "wrong"),
        (
            origin_plans.Origin("exp_avg", "blocks.1.up"), True,
            {"phase": "step", "module": "blocks.1.up.weight", "kind": "param"}, "right",
        ),
        (
            origin_plans.Origin("exp_avg", "blocks.1.up"), True,
            {"phase": "step", "module": "blocks.1.up.weight", "kind": "optim_state"}, "right",
        ),
        (origin_plans.Origin("exp_avg", "blocks.1.up"), True, {"step": 9}, "wrong"),
        (origin_plans.Origin("logged_loss"), False, {"level": "info"}, "right"),
        (origin_plans.Origin("logged_loss"), True, {"level": "info"}, "wrong"),
        (origin_plans.Origin("nothing"), True, {}, "wrong"),
        (origin_plans.Origin("overflow", "blocks.1.up"), True, {"level": "info"}, "right"),
    ],
)  # fmt: skip
def test_what_is_said_of_an_origin_is_judged(
    origin: origin_plans.Origin, sampled: bool, said: dict[str, object], verdict: str
) -> None:
    plan = origin_plans.Plan(0, origin, "ddp", sampled)
    assert origin_verdict.judge(plan, [{**PAGE, **said}], 1)[0] == verdict


@pytest.mark.parametrize(
    ("sampled", "said", "status", "verdict"),
    [
        (False, [], 4, "undecided"),
        (False, [{"detector": "rank_lost"}], 1, "undecided"),
        (False, [], 0, "wrong"),
        (False, [{"step": 6, "module": "head"}], 1, "wrong"),
        (False, [{"step": 6}], 1, "right"),
        (True, [], 4, "wrong"),
        (True, [{"detector": "rank_lost"}], 1, "wrong"),
    ],
)
def test_a_number_that_a_kill_took_along_need_not_be_known_but_the_run_is_not_called_healthy(
    sampled: bool, said: list[dict[str, object]], status: int, verdict: str
) -> None:
    plan = origin_plans.Plan(0, dataclasses.replace(UP, then="kill"), "ddp", sampled)
    told = [{**PAGE, **one} for one in said]
    assert origin_verdict.judge(plan, told, status)[0] == verdict


@pytest.mark.parametrize(
    ("kind", "said", "verdict"),
    [
        ("lr_inf", {"step": 7, "module": None, "message": LATE}, "undecided"),
        ("lr_inf", {"step": 7, "module": None}, "wrong"),
        ("lr_inf", {"step": 8, "module": None, "message": LATE}, "wrong"),
        ("forward", {"step": 7, "module": None, "message": LATE}, "wrong"),
    ],
)
def test_far_away_what_an_optimizer_did_shows_a_step_later_if_that_is_said(
    kind: str, said: dict[str, object], verdict: str
) -> None:
    plan = origin_plans.Plan(0, origin_plans.Origin(kind), "ddp", sampled=False, far=True)
    assert origin_verdict.judge(plan, [{**PAGE, **said}], 1)[0] == verdict


def test_every_origin_is_there_on_sampled_steps_and_others_in_three_wrappers() -> None:
    plans = list(origin_plans.plans())
    names = [(p.origin.name, p.wrap, p.sampled) for p in plans]
    assert len(set(names)) == len(names)
    assert len({p.number for p in plans}) == len(plans)
    assert len(origin_plans.ORIGINS) >= 60
    assert origin_plans.UNSAMPLED_STEP % origin_plans.EVERY
    assert origin_plans.SAMPLED_STEP % origin_plans.EVERY == 0


def test_a_death_and_an_origin_are_carried_out_on_real_ranks_and_kept_as_lines(
    tmp_path: Path,
) -> None:
    def carry(zygote: zygotes.Zygote, plan: Mapping[str, Any], home: Path) -> campaign.Line:
        return (origins if "origin" in plan else deaths).carry(zygote, plan, home)

    results = tmp_path / "results.jsonl"
    origin = next(p for p in origin_plans.plans() if p.origin == UP and p.wrap == "one")
    between = origin_plans.Plan(1, BETWEEN, "one", sampled=True, far=True)
    plans = [plan.as_json() for plan in (DEATH, origin, between)]
    death, found, far = campaign.carry_out(plans, carry, tmp_path, results, 1)
    assert death["told"]["statuses"] == {"0": "SIGTERM", "1": "SIGSEGV"}
    assert (death["verdict"], death["exit"]) == ("right", 1), death
    assert (found["verdict"], found["exit"]) == ("right", 1), found
    assert (far["verdict"], far["exit"]) == ("right", 1), far
    # What was interrupted goes on: what is there is not run again.
    assert list(campaign.carry_out(plans, _not_to_be_called, tmp_path, results, 1)) == [
        death,
        found,
        far,
    ]
    assert deaths.table([death]) == {"signal, daemon alive: right": 1}
    assert origins.table([found]) == {"one, sampled: right": 1}


def test_a_run_that_did_not_come_about_is_told_as_such_and_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object) -> campaign.Line:
        raise RuntimeError("the zygote gave no answer")

    class Idle:
        """In place of a zygote, of which nobody wants anything here."""

        def close(self) -> None: ...

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(campaign, "Zygote", Idle)
    results, plans = tmp_path / "results.jsonl", [DEATH.as_json()]
    (void,) = campaign.carry_out(plans, gone, tmp_path, results, 1)
    assert void["verdict"] == "void"
    assert len(deaths.problems([void])) == 1
    right = {"verdict": "right", "why": ""}
    (line,) = campaign.carry_out(plans, lambda *_: right, tmp_path, results, 1)
    assert line["verdict"] == "right"


def _not_to_be_called(*_: object) -> campaign.Line:
    raise AssertionError("it was carried out again")
