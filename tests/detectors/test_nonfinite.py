"""The first non-finite value is paged once, with its step, rank, module and phase."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from ddpprobe.detectors.nonfinite import NonFinite
from ddpprobe.records.step import (
    COUNTS,
    SEVERAL,
    STATE_KINDS,
    VALUES,
    Anomaly,
    FirstBad,
    Site,
    StepRecord,
)
from tests.detectors import made_records

WITNESS = FirstBad(412, 1, "backward", 7, 5, "layers.17.attn.wo", "grad_output", "", 3, 0, 0, 4096)


def record(step: int, bad: FirstBad | None = None, **changes: object) -> StepRecord:
    base = StepRecord(0, step, tuple(range(8)), 10**9 * step, first_bad=bad)
    return replace(base, **changes)  # type: ignore[arg-type]


def run(*records: StepRecord) -> list[Anomaly]:
    return made_records.run(NonFinite(), records)


def bad_at(step: int, rank: int = 0) -> StepRecord:
    return record(step, replace(WITNESS, step=step, rank=rank))


def test_the_verdict_carries_the_witness_unchanged() -> None:
    (page,) = run(record(411), record(412, WITNESS))
    assert (page.level, page.step, page.micro, page.rank) == ("page", 412, 1, 5)
    assert (page.module, page.kind, page.phase) == ("layers.17.attn.wo", "grad_output", "backward")
    assert dict(page.values) == {"nan": 3, "pos_inf": 0, "neg_inf": 0, "numel": 4096}
    assert page.first_cause
    assert page.sampled
    assert page.wall_time_ns == 412 * 10**9
    assert page.message == "3 NaN of 4096 elements"


def test_clean_records_say_nothing() -> None:
    assert run(*(record(step) for step in range(50))) == []


def test_an_unsampled_step_pages_without_a_module() -> None:
    (page,) = run(record(413, FirstBad(413, 0, "forward", 0, 2), sampled=False))
    assert (page.rank, page.module, page.kind, page.phase) == (2, None, None, "forward")
    assert not page.sampled
    assert page.message.startswith(
        "non-finite local tensor; which one is not known, as this step was not sampled"
    )
    assert "every=1 (DDPPROBE_EVERY=1)" in page.message


def test_what_several_ranks_have_at_the_same_place_blames_none_of_them() -> None:
    several = replace(WITNESS, rank=SEVERAL)
    (page,) = run(record(412, several))
    assert (page.rank, page.module) == (None, "layers.17.attn.wo")
    assert page.message == "3 NaN of 4096 elements; on several ranks at once, none of them first"
    losses = {rank: {"loss": math.nan} for rank in range(8)}
    (page,) = run(record(412, several, scalars=losses))
    assert (page.rank, page.micro, page.phase) == (None, 1, "forward")


def test_a_bad_loss_is_no_witness_of_another_ranks() -> None:
    losses = {rank: {"loss": math.nan if rank < 2 else 1.0} for rank in range(8)}
    (page,) = run(record(412, WITNESS, scalars=losses))  # of rank 5, whose loss is fine
    assert (page.rank, page.phase, page.micro) == (None, "forward", 0)
    alone = {rank: {"loss": math.nan if rank == 2 else 1.0} for rank in range(8)}
    (page,) = run(record(412, replace(WITNESS, rank=SEVERAL), scalars=alone))
    assert (page.rank, page.phase, page.micro) == (2, "forward", 0)


def test_a_witness_shipped_with_a_later_record_keeps_its_own_step() -> None:
    (page,) = run(record(420, FirstBad(412, 0, "backward", 3, 1)))
    assert (page.step, page.sampled) == (412, False)


def test_a_step_that_never_ended_is_real() -> None:
    (page,) = run(record(412, WITNESS, partial=True))
    assert page.level == "page"


def test_what_follows_from_the_origin_is_not_repeated() -> None:
    assert len(run(*(bad_at(step, rank=step % 8) for step in range(100, 2000)))) == 1


@pytest.mark.parametrize(("quiet", "pages"), [(99, 1), (100, 2)])
def test_it_fires_again_only_after_a_hundred_quiet_steps(quiet: int, pages: int) -> None:
    # The last bad step is 11, so `quiet` steps lie between it and the next one.
    assert len(run(bad_at(10), bad_at(11), bad_at(12 + quiet))) == pages


def test_a_restart_forgets_the_episode() -> None:
    assert len(run(bad_at(10), replace(bad_at(11), attempt=1))) == 2


def test_a_step_the_scaler_skipped_is_information_and_opens_no_episode() -> None:
    skipped = [replace(bad_at(step), skipped=True) for step in range(3)]
    first, second = run(*skipped, bad_at(4))
    assert (first.level, first.first_cause) == ("info", False)
    assert "GradScaler skipped" in first.message
    assert (second.level, second.step, second.first_cause) == ("page", 4, True)


def test_a_forward_fault_in_a_skipped_step_is_a_page_at_once() -> None:
    # The scale is not in the forward, so no scaler mends it.
    bad = replace(WITNESS, step=3, phase="forward", kind="output")
    (page,) = run(record(3, bad, skipped=True))
    assert (page.level, page.step) == ("page", 3)
    assert "skipped" not in page.message
    (page,) = run(record(3, skipped=True, scalars={0: {"loss": math.nan}}))
    assert page.level == "page"


def test_a_skipped_step_with_a_bad_parameter_is_a_page() -> None:
    counts, values = rows(nan=2)
    sites = (Site("head.weight", "param", placement="replicated"),)
    (page,) = run(
        record(3, replace(WITNESS, step=3), skipped=True, sites=sites, counts=counts, values=values)
    )
    assert page.level == "page"


def rows(nan: int) -> tuple[np.ndarray, np.ndarray]:
    counts, values = np.zeros((1, len(COUNTS)), np.int64), np.zeros((1, len(VALUES)))
    counts[0, :2] = 10, nan
    return counts, values


@pytest.mark.parametrize(("ranks", "blamed"), [((0, 1), None), ((0,), 0)])
def test_what_was_reduced_names_no_rank_unless_there_is_one(
    ranks: tuple[int, ...], blamed: int | None
) -> None:
    kind = "grad"
    witness = FirstBad(5, 0, "step", 9, 0, "fc.weight", kind, "", 1, 0, 0, 10)
    (told,) = run(record(5, witness, ranks=ranks))
    counts, values = rows(nan=1)
    sites = (Site("fc.weight", kind, placement="replicated"),)
    (seen,) = run(record(5, ranks=ranks, sites=sites, counts=counts, values=values))
    for page in (told, seen):
        assert (page.rank, page.module, page.kind, page.phase) == (
            blamed,
            "fc.weight",
            kind,
            "step",
        )


def norms(reduced: dict[int, float], local: float = 1.0) -> dict[int, dict[str, float]]:
    return {rank: {"grad_norm_local": local, "grad_norm": norm} for rank, norm in reduced.items()}


@pytest.mark.parametrize(
    ("changes", "blamed"),
    [
        ({}, 2),
        ({"missing": (3,)}, None),  # nobody knows of that one
        ({"partial": True}, None),
        ({"scalars": norms({0: 1.0, 1: math.nan, 2: math.nan})}, None),
        ({"scalars": norms({0: 1.0, 1: 1.0, 2: math.nan}, local=math.nan)}, None),
        ({"scalars": {**norms({0: 1.0, 2: math.nan}), 1: {}}}, None),
        ({"scalars": norms({0: 1.0, 1: math.nan, 2: 1.0})}, None),  # not the one of the witness
    ],
)
def test_a_reduction_that_goes_bad_on_one_rank_alone_names_it(
    changes: dict[str, object], blamed: int | None
) -> None:
    witness = FirstBad(5, 0, "step", 9, 2, "fc.weight", "grad", "", 1, 0, 0, 10)
    base = {"ranks": (0, 1, 2), "scalars": norms({0: 1.0, 1: 1.0, 2: math.nan})}
    (page,) = run(record(5, witness, **(base | changes)))
    assert (page.rank, page.module, page.phase) == (blamed, "fc.weight", "step")
    said = "every local gradient was finite before the reduction, on rank 2 alone"
    assert (said in page.message) == (changes in ({}, {"missing": (3,)}, {"partial": True}))


def state(step: int, kind: str = "param", rank: int = 1) -> FirstBad:
    leaf = "exp_avg" if kind == "optim_state" else ""
    return FirstBad(step, 0, "step", 0, rank, "fc.weight", kind, leaf, 1, 0, 0, 10)


def looked(step: int, bad: FirstBad | None = None, **changes: object) -> StepRecord:
    scalars = {rank: {"state_tensors": 3.0} for rank in (0, 1)}
    return replace(record(step, bad, ranks=(0, 1), scalars=scalars), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", STATE_KINDS)
def test_what_a_step_left_behind_is_told_with_its_rank_and_since_when(kind: str) -> None:
    (page,) = run(looked(4), looked(5, state(5, kind)))
    assert (page.level, page.step, page.rank, page.kind) == ("page", 5, 1, kind)
    assert "at the end of the step, and was finite at the end of step 4" in page.message
    assert ("born in the optimizer's step" in page.message) == (kind != "buffer")
    (page,) = run(looked(1), looked(5, state(5, kind)))
    assert "finite at the end of step 1" in page.message
    assert "born" not in page.message  # in one of four steps
    (page,) = run(looked(5, state(5, kind, rank=SEVERAL)))
    assert page.rank is None
    assert "on several ranks" in page.message
    (page,) = run(looked(5, state(5, kind), missing=(2,)))
    assert page.rank is None
    (page,) = run(looked(5, state(5, kind), skipped=True))  # which no scaler mends
    assert page.level == "page"


def test_a_parameter_that_was_bad_before_the_forward_is_of_the_step_before() -> None:
    (page,) = run(looked(5), record(8, state(7), ranks=(0, 1), sampled=False))
    assert (page.step, page.rank, page.kind, page.phase) == (7, 1, "param", "step")
    assert "before the forward of step 8 began" in page.message
    assert "after the backward of step 7" in page.message
    assert "finite at the end of step 5" in page.message
    (page,) = run(looked(7), record(8, state(7), ranks=(0, 1)))
    assert "finite at the end of step 7: born between the two" in page.message
    loss = {0: {"loss": math.nan}}  # it follows
    (page,) = run(record(8, state(7), ranks=(0, 1), scalars=loss))
    assert page.step == 7


def test_a_parameter_that_came_bad_is_said_to_have_come_so() -> None:
    (page,) = run(record(0, replace(state(0), phase="forward", order=-1), ranks=(0, 1)))
    assert (page.rank, page.phase) == (1, "forward")
    assert "before the first step" in page.message


@pytest.mark.parametrize("micro", [1, 2])
def test_a_parameter_that_a_later_micro_batch_found_bad_is_of_its_own_step(micro: int) -> None:
    found = replace(state(5), phase="forward", order=-1, micro=micro)
    (page,) = run(record(5, found, ranks=(0, 1)))
    assert f"before the forward of micro-batch {micro} began" in page.message


def test_in_a_run_of_one_rank_a_reduction_is_on_no_rank_alone() -> None:
    witness = FirstBad(5, 0, "step", 9, 0, "fc.weight", "grad", "", 1, 0, 0, 10)
    (page,) = run(record(5, witness, ranks=(0,), scalars=norms({0: math.nan})))
    assert page.message.endswith("every local gradient was finite before the reduction")


@pytest.mark.parametrize(("bad_gradients", "pages"), [(0, [5, 6]), (1, [5])])
def test_an_infinity_that_went_no_further_explains_no_other(
    bad_gradients: int, pages: list[int]
) -> None:
    sites = (Site("mask", "output"), Site("fc.weight", "grad_local"), Site("fc.weight", "param"))
    counts = np.zeros((3, len(COUNTS)), np.int64)
    counts[:, [COUNTS.index("numel"), COUNTS.index("observed")]] = 10, 1
    counts[:, COUNTS.index("pos_inf")] = 1, bad_gradients, 0
    bad = [FirstBad(5, 0, "forward", 0, 0, "mask", "output", "", 0, 1, 0, 10)]
    bad.append(replace(bad[0], step=6, fqn="other"))
    changes = {"sites": sites, "counts": counts, "values": np.zeros((3, len(VALUES)))}
    scalars = {rank: {"loss": 1.0} for rank in range(8)}
    made = [record(one.step, one, scalars=scalars, **changes) for one in bad]
    assert [page.step for page in run(*made)] == pages


def test_an_input_that_no_module_put_out_is_between_two_modules() -> None:
    (page,) = run(record(5, replace(WITNESS, phase="forward", kind="input", step=5)))
    assert page.module == "layers.17.attn.wo"
    assert "between it and the module before, in the code of layers.17.attn," in page.message


def test_rows_of_local_tensors_alone_are_no_witness() -> None:
    # A masked -Inf in some output is the hooks' business: they decide what is a witness.
    counts, values = rows(nan=1)
    assert run(record(5, sites=(Site("mask", "output"),), counts=counts, values=values)) == []


def losses(*values: float) -> dict[int, dict[str, float]]:
    return {rank: {"loss": value} for rank, value in enumerate(values)}


def test_a_bad_loss_without_a_witness_is_a_forward_fault_of_its_rank() -> None:
    (page,) = run(record(9, scalars=losses(1.0, math.inf, 1.0)))
    assert (page.phase, page.module, page.kind, page.rank) == ("forward", None, None, 1)
    assert dict(page.values) == {"nan": 0, "pos_inf": 1, "neg_inf": 0, "numel": 1}
    assert page.message == "non-finite loss (+Inf)"


def test_a_loss_that_is_bad_on_several_ranks_blames_none() -> None:
    (page,) = run(record(9, scalars=losses(1.0, math.nan, math.nan)))
    assert page.rank is None


def test_a_bad_loss_outranks_the_backward_it_caused_and_keeps_its_rank() -> None:
    witness = replace(WITNESS, step=9, rank=1)
    (page,) = run(record(9, witness, scalars=losses(math.nan, math.nan)))
    assert (page.phase, page.module, page.rank, page.micro) == ("forward", None, 1, 1)
    assert "then layers.17.attn.wo:grad_output in backward" in page.message


def test_a_forward_witness_outranks_the_loss_it_caused() -> None:
    witness = replace(WITNESS, step=9, phase="forward", kind="output", rank=2)
    (page,) = run(record(9, witness, scalars=losses(math.nan, math.nan)))
    assert (page.module, page.rank) == ("layers.17.attn.wo", 2)


def test_a_bad_loss_of_a_step_that_was_not_sampled_is_told_with_its_step_and_rank() -> None:
    detector = NonFinite()
    fine = {"loss": 1.0, "loss@-1": 1.0, "loss@-2": 1.0}
    assert detector.update(StepRecord(0, 10, (0, 1), 0, scalars={0: fine, 1: fine})) == []
    bad = {**fine, "loss@-2": math.inf, "loss@-1": math.nan}
    (page,) = detector.update(StepRecord(0, 20, (0, 1), 0, scalars={0: fine, 1: bad}))
    assert (page.level, page.step, page.rank, page.phase) == ("page", 18, 1, "forward")
    assert (page.sampled, page.values["pos_inf"]) == (False, 1)
    assert page.message == "non-finite loss (+Inf)"
    assert detector.update(StepRecord(0, 30, (0, 1), 0, scalars={0: fine, 1: bad})) == []


def test_what_began_in_an_earlier_step_goes_on_until_the_last_step_that_shows_it() -> None:
    """The weights are bad since step 80; a record that brings only losses shows it no other way."""
    since = replace(WITNESS, step=80, phase="step", kind="param")
    told = [record(step, since) for step in range(80, 240, 40)]
    losses = {rank: {"loss@-1": math.nan, "loss": math.nan} for rank in range(8)}
    (page,) = run(*told, record(239, sampled=False, scalars=losses))
    assert page.step == 80
