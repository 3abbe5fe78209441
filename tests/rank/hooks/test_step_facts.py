"""A sampled step says how the loop is set up, and which data it was given."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import ddpprobe
from ddpprobe.rank.hooks import step_facts
from ddpprobe.rank.hooks.step_facts import DIGEST_BYTES, INPUTS, add_input
from ddpprobe.rank.hooks.step_rows import StepRows
from ddpprobe.rank.stats.checksum import checksum
from ddpprobe.rank.topology.describe import describe
from ddpprobe.rank.torch_private import sharding
from ddpprobe.records.step import (
    DIGEST,
    FIRST_DECAY,
    INPUT_ELEMENTS,
    LEARNING_RATE,
    MOMENT_DECAY,
    OPTIMIZER_STEPS,
    OPTION,
    STALE,
    TRAINABLE,
    TRAINING,
    WEIGHT_DECAY,
)

from ... import far
from ..topology.wrapped_models import WRAPPED, on_rank


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(4, 4), nn.Dropout(0.1), nn.Linear(4, 1)

    def forward(self, data: torch.Tensor, *, extra: torch.Tensor | None = None) -> torch.Tensor:
        return self.last(self.drop(self.first(data))) + (0 if extra is None else extra)


def facts_of(
    *optimizers: object,
    facts: step_facts.OptimizerFacts | None = None,
    rows: StepRows | None = None,
) -> tuple[dict[str, float], dict[str, float]]:
    """Return what is told of optimizers that step one after the other, and what is in the rows.

    Without their options, which `options_of` returns.
    """
    facts, rows = facts or step_facts.OptimizerFacts(), rows or StepRows(torch.device("cpu"), 0)
    for optimizer in optimizers:
        facts.add(optimizer, describe(Model()), None, rows, optimizers[0])
    told = facts.tell(rows, alone=False)
    told = {name: x for name, x in told.items() if not name.startswith(OPTION)}
    return told, rows.fetch().result(0, partial=True).scalars


def options_of(
    *optimizers: object, facts: step_facts.OptimizerFacts | None = None
) -> dict[str, float]:
    """Return what is told of the options of optimizers that step one after the other."""
    facts, rows = facts or step_facts.OptimizerFacts(), StepRows(torch.device("cpu"), 0)
    for optimizer in optimizers:
        facts.add(optimizer, describe(Model()), None, rows, optimizers[0])
    told = facts.tell(rows, alone=False)
    return {name.removeprefix(OPTION): x for name, x in told.items() if name.startswith(OPTION)}


@pytest.fixture(params=["near", "far"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "far":
        far.pretend(monkeypatch)


@pytest.mark.usefixtures("device")
def test_rate_modes_and_trained_parameters_are_those_of_the_step(
    tmp_path: Path, records_of
) -> None:
    model = Model()
    groups = [{"params": model.first.parameters(), "lr": 0.5}, {"params": model.last.parameters()}]
    optimizer = torch.optim.SGD(groups, lr=0.25)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    with ddpprobe.install(model, run_dir=tmp_path / "r", every=1, daemon="none") as probe:
        for step in range(4):
            model.train(step != 1)
            model.first.weight.requires_grad = step != 2
            model(torch.randn(2, 4)).sum().backward()
            if step == 3:
                probe.log(lr=7.0)
            optimizer.step()
            scheduler.step()
    told = [r.scalars[0] for r in records_of(tmp_path / "r")]
    assert [s[LEARNING_RATE] for s in told] == [0.5, 0.25, 0.125, 7.0]
    assert [s[TRAINING] for s in told] == [1.0, 0.0, 1.0, 1.0]
    assert [s[TRAINABLE] for s in told] == [4.0, 4.0, 3.0, 4.0]


def test_of_the_passes_of_a_step_the_last_one_tells_what_is_in_training_mode(
    tmp_path: Path, records_of
) -> None:
    """An attack on the inputs in evaluation mode comes before the pass that is learned from."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ddpprobe.install(model, run_dir=tmp_path, every=1, daemon="none"):
        for step in range(4):
            model.eval()
            for _ in range(2):
                x = torch.ones(3, 4, requires_grad=True)
                torch.autograd.grad(model(x).square().mean(), x)
            model.train(step != 3)
            model(x.detach()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    said = [r.scalars[0][TRAINING] for r in records_of(tmp_path)]
    assert said == [1.0, 1.0, 1.0, 0.0]


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("kind", "more", "counts"),
    [
        (torch.optim.AdamW, {}, [0, 1, 2, 0, 1]),
        (torch.optim.Adam, {"fused": True}, [0, 1, 2, 0, 1]),
        (torch.optim.Adagrad, {}, [0, 1, 2, 0, 1]),
        (torch.optim.SGD, {"momentum": 0.9}, [0, None, None, 0, None]),
    ],
)
def test_the_steps_that_an_optimizer_has_counted_are_told_before_each(
    kind: type[torch.optim.Optimizer], more: dict[str, object], counts: list[int | None],
    tmp_path: Path, records_of,
) -> None:  # fmt: skip
    model = Model()
    optimizer = kind(model.parameters(), lr=0.01, **more)
    with ddpprobe.install(model, run_dir=tmp_path / "r", every=1, daemon="none"):
        for step in range(5):
            model(torch.randn(2, 4)).sum().backward()
            if step == 3:
                optimizer.state.clear()
                if kind is torch.optim.Adagrad:  # it makes its state when it is built
                    optimizer = kind(model.parameters(), lr=0.01)
            optimizer.step()
    said = [r.scalars[0].get(OPTIMIZER_STEPS) for r in records_of(tmp_path / "r")]
    assert said == counts


@pytest.mark.parametrize(
    ("kind", "more", "first", "second"),
    [
        (torch.optim.AdamW, {"betas": (0.9, 0.95)}, 0.9, 0.95),
        (torch.optim.RMSprop, {"alpha": 0.9, "momentum": 0.5}, 0.5, 0.9),
        (torch.optim.Adadelta, {"rho": 0.8}, None, 0.8),
        (torch.optim.SGD, {"momentum": 0.9}, 0.9, None),
        (torch.optim.SGD, {}, 0.0, None),
        (torch.optim.Adagrad, {}, None, None),
    ],
)
def test_how_much_of_the_moments_a_step_keeps_is_told_where_all_groups_agree(
    kind: type[torch.optim.Optimizer], more: dict[str, object],
    first: float | None, second: float | None,
) -> None:  # fmt: skip
    some, others = ([nn.Parameter(torch.ones(1))] for _ in range(2))
    one, other = kind(some, lr=0.1, **more), kind(others, lr=0.1, **more)
    for all_ in ([one], [one, other]):
        told = facts_of(*all_)[0]
        assert (told.get(FIRST_DECAY), told.get(MOMENT_DECAY)) == (first, second)
    odd = torch.optim.Adam(others, lr=0.1, betas=(0.8, 0.5))
    assert {FIRST_DECAY, MOMENT_DECAY}.isdisjoint(facts_of(one, odd)[0])


def test_the_largest_weight_decay_of_all_groups_is_told_if_all_are_numbers() -> None:
    weights = [nn.Parameter(torch.ones(1)) for _ in range(3)]
    groups = [{"params": weights[:1], "weight_decay": 0.1}, {"params": weights[1:2]}]
    one = torch.optim.AdamW(groups, lr=0.1, weight_decay=0.0)
    other = torch.optim.SGD(weights[2:], lr=0.1, weight_decay=0.5)
    assert facts_of(one)[0][WEIGHT_DECAY] == 0.1
    assert facts_of(one, other)[0][WEIGHT_DECAY] == facts_of(other, one)[0][WEIGHT_DECAY] == 0.5
    other.param_groups[0]["weight_decay"] = torch.tensor(0.5)
    assert WEIGHT_DECAY not in facts_of(one, other)[0]
    other.param_groups[0].pop("weight_decay")
    assert facts_of(one, other)[0][WEIGHT_DECAY] == 0.1


@pytest.mark.parametrize(
    "betas", [None, 0.9, (0.9,), (0.98, 0.92, 0.99), (0.9, torch.tensor(0.99))]
)
def test_betas_that_mean_something_else_are_no_decay(betas: object) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    optimizer.param_groups[0]["betas"] = betas
    assert MOMENT_DECAY not in facts_of(optimizer)[0]


@pytest.mark.parametrize(
    ("kind", "more", "want"),
    [
        (torch.optim.AdamW, {"eps": 1e-6}, {"eps": 1e-6, "amsgrad": 0.0, "maximize": 0.0}),
        (torch.optim.Adam, {"maximize": True, "amsgrad": True}, {
            "eps": 1e-8, "amsgrad": 1.0, "maximize": 1.0,
        }),
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}, {
            "nesterov": 1.0, "dampening": 0.0, "maximize": 0.0,
        }),
        (torch.optim.SGD, {"dampening": 0.5}, {"nesterov": 0.0, "dampening": 0.5, "maximize": 0.0}),
        (torch.optim.RMSprop, {"centered": True}, {"eps": 1e-8, "centered": 1.0, "maximize": 0.0}),
        (torch.optim.Adadelta, {"rho": 0.8}, {"eps": 1e-6, "rho": 0.8, "maximize": 0.0}),
        (torch.optim.NAdam, {"decoupled_weight_decay": True}, {
            "eps": 1e-8, "decoupled_weight_decay": 1.0, "maximize": 0.0,
        }),
    ],
)  # fmt: skip
def test_options_that_no_schedule_changes_are_told(
    kind: type[torch.optim.Optimizer], more: dict[str, object], want: dict[str, float]
) -> None:
    told = options_of(kind([nn.Parameter(torch.ones(1))], lr=0.1, **more))
    if "decoupled_weight_decay" not in want:  # the version of torch decides which kinds have it
        told.pop("decoupled_weight_decay", None)
    assert told == want


def test_an_option_is_told_where_all_groups_that_have_it_agree() -> None:
    first, second, third = ([nn.Parameter(torch.ones(1))] for _ in range(3))
    groups = [{"params": first}, {"params": second, "eps": 1e-3}]
    odd = torch.optim.Adam(groups, lr=0.1)
    same = torch.optim.Adam([{"params": first}, {"params": second}], lr=0.1)
    assert "eps" not in options_of(odd)
    assert options_of(odd)["amsgrad"] == 0.0
    assert options_of(same)["eps"] == 1e-8
    sgd = torch.optim.SGD(third, lr=0.1, nesterov=True, momentum=0.9)
    both = options_of(same, sgd)
    assert (both["eps"], both["nesterov"], both["maximize"]) == (1e-8, 1.0, 0.0)
    climbs = torch.optim.SGD(third, lr=0.1, maximize=True)
    assert "maximize" not in options_of(same, climbs)


# The last one has nothing that a host could read.
NOT_PLAIN = [(1e-30, 1e-3), None, "1e-8", torch.tensor(1e-8), torch.empty((), device="meta")]


@pytest.mark.parametrize("eps", NOT_PLAIN, ids=range(len(NOT_PLAIN)))
def test_an_option_that_is_no_plain_number_is_not_told(eps: object) -> None:
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(1))], lr=0.1)
    optimizer.param_groups[0]["eps"] = eps
    assert options_of(optimizer).keys() & {"eps", "amsgrad"} == {"amsgrad"}
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "eps": 1e-8})
    assert "eps" not in options_of(optimizer)


@pytest.mark.skipif(not hasattr(torch.optim, "Adafactor"), reason="this torch has none")
def test_the_two_eps_of_adafactor_are_not_one() -> None:
    told = options_of(torch.optim.Adafactor([nn.Parameter(torch.ones(1))]))
    assert told == {"maximize": 0.0}


def test_what_lies_on_another_device_or_is_gathered_in_its_own_way_is_not_compared() -> None:
    class Scaled(torch.Tensor):
        """As a tensor of fp8 has a class of its own."""

    here, there = torch.ones(2), torch.ones(2, device="meta")
    assert step_facts._are_comparable(here, nn.Parameter(here))
    assert not step_facts._are_comparable(there, here)
    assert not step_facts._are_comparable(here.as_subclass(Scaled), here)
    assert not step_facts._are_comparable(here, here.as_subclass(Scaled))


@pytest.mark.parametrize(
    ("rank", "gathered", "changed", "told"),
    [(0, False, False, 0.0), (0, True, False, 0.0), (0, True, True, 1.0),
     (3, False, False, 0.0), (3, True, False, None)],
)  # fmt: skip
def test_no_number_of_stale_units_is_told_where_none_that_is_gathered_can_be_compared(
    rank: int, gathered: bool, changed: bool, told: float | None
) -> None:
    """Two rows of a weight are dealt out to four ranks: the last one has none of them."""
    rows = StepRows(torch.device("cpu"), 0)
    with on_rank(rank), torch.no_grad():
        model = fully_shard(nn.Linear(4, 2))
        shard = model.weight.to_local()
        if gathered:
            model.unshard()  # nothing is sent here, so this rank's row is put there by hand
            model.weight[: len(shard)] = shard + changed
        step_facts.add_stale_units(describe(model), rows)
    assert rows.fetch().result(0, partial=False).scalars.get(STALE) == told


@pytest.mark.parametrize("wrapper", ["fsdp2", "fsdp2+tp"])
def test_units_that_are_stale_are_counted_under_tensor_parallelism_too(wrapper: str) -> None:
    told = []
    with on_rank(0), torch.no_grad():
        model = WRAPPED[wrapper]()
        for unit in (model, model[0]):
            unit.unshard()
        pairs = list(sharding.gathered(model, step_facts._are_comparable))
        for change in (0, 1):
            for part, shard in pairs:  # nothing is sent here, so it is put there by hand
                part.copy_(shard)
                shard.add_(change)
            rows = StepRows(torch.device("cpu"), 0)
            step_facts.add_stale_units(describe(model), rows)
            told.append(rows.fetch().result(0, partial=False).scalars[STALE])
    assert told == [0.0, 2.0]


def test_of_two_optimizers_the_first_one_tells(tmp_path: Path, records_of) -> None:
    model = Model()
    first, later = (
        torch.optim.Adam(part.parameters(), lr=0.01) for part in (model.first, model.last)
    )
    with ddpprobe.install(model, run_dir=tmp_path / "r", every=1, daemon="none"):
        for step in range(4):
            model(torch.randn(2, 4)).sum().backward()
            first.step()
            if step > 1:
                later.step()
    said = [r.scalars[0].get(OPTIMIZER_STEPS) for r in records_of(tmp_path / "r")]
    assert said[:3] == [0.0, 1.0, 2.0]


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("way", ["args", "kwargs"])
def test_equal_inputs_have_equal_digests_and_others_have_not(
    way: str, tmp_path: Path, records_of
) -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    one = torch.randn(5, 4)
    flipped = one.clone()
    flipped[4, 3] += 1e-6
    with ddpprobe.install(model, run_dir=tmp_path / "r", every=1, daemon="none"):
        for data in (one, flipped, one[:4], one.clone()):
            for micro in (data, torch.randn(5, 4)):  # the first micro-batch tells
                out = model(micro) if way == "args" else model(data=micro, extra=torch.zeros(1))
                out.sum().backward()
            optimizer.step()
    digests = [r.scalars[0][DIGEST] for r in records_of(tmp_path / "r")]
    assert digests[0] == digests[3]
    assert len(set(digests)) == 3
    assert all(d == int(d) and 0 < d < 2**52 for d in digests)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8, torch.bfloat16])
def test_tokens_and_masks_have_digests_too(dtype: torch.dtype) -> None:
    def digest(data: torch.Tensor) -> float:
        rows = StepRows(torch.device("cpu"), 0)
        add_input(((), {"ids": data}), rows)
        return rows.fetch().result(0, partial=False).scalars[DIGEST]

    one = torch.arange(3 * 7).reshape(3, 7).remainder(2).to(dtype)
    two = one.clone()
    two[2, 6] = 1
    assert digest(one) == digest(one.clone())
    assert digest(one) != digest(two)


def test_a_digest_is_of_the_first_few_tensors_in_their_order() -> None:
    """The first may be a mask, or a coefficient that stays as it is."""

    def digest(*given: object) -> float:
        rows = StepRows(torch.device("cpu"), 0)
        add_input((given, {}), rows)
        return rows.fetch().result(0, partial=False).scalars[DIGEST]

    alpha, one, two = torch.tensor(0.5), torch.randn(3, 2), torch.randn(3, 2)
    assert digest(alpha, one) == digest(alpha.clone(), {"x": one.clone()})
    assert len({digest(alpha, one), digest(alpha, two), digest(one, alpha), digest(one)}) == 4
    assert digest(one, one.to_sparse()) == digest(one)  # nothing is known of that
    rest = [torch.zeros(1)] * (INPUTS - 1)
    assert digest(one, *rest, two) == digest(one, *rest, alpha)


def test_a_digest_is_the_upper_bits_of_the_checksum() -> None:
    for seed in range(20):
        data = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))
        rows, word = StepRows(torch.device("cpu"), 0), torch.zeros((), dtype=torch.int64)
        add_input(((data,),), rows)
        checksum(data.view(-1), word)
        found = rows.fetch().result(0, partial=False).scalars[DIGEST]
        assert found == (word.item() % 2**64) >> 12


def _digests(rows: StepRows) -> list[float]:
    """One of each input: between its size, how far samples differ, and five numbers of them."""
    return rows.fetch().rows[1::8, 0].tolist()


@pytest.mark.parametrize("large", [False, True])
def test_what_is_not_contiguous_has_the_digest_of_its_elements(large: bool) -> None:
    """Most language models are given all tokens but the last of each row."""
    tokens = torch.arange((700 if large else 3) * 101).reshape(-1, 101)
    pictures = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    scaled = tokens.float().t()
    rows = StepRows(torch.device("cpu"), 0)
    for data in (tokens[:, :-1], pictures, scaled):
        assert not data.is_contiguous()
        add_input(((data,),), rows)
        add_input(((data.contiguous(),),), rows)
    digests = _digests(rows)
    assert digests[::2] == digests[1::2]
    assert len(set(digests)) == 3


def test_of_a_large_input_the_beginning_is_read() -> None:
    many = torch.zeros(DIGEST_BYTES // 4 + 1)
    rows = StepRows(torch.device("cpu"), 0)
    add_input(((many,),), rows)
    many[-1] = 1.0
    add_input(((many[:-1],),), rows)
    many[-2] = 1.0
    add_input(((many,),), rows)
    first, same, other = _digests(rows)
    assert first == same != other


def test_how_much_a_step_is_given_is_told(tmp_path: Path, records_of) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ddpprobe.install(model, run_dir=tmp_path / "r", every=1, daemon="none"):
        for rows in (8, 8, 2):
            for more in range(2):  # micro-batches: the first one is counted
                model(torch.ones(rows + more, 4)).sum().backward()
            optimizer.step()
    assert [r.scalars[0][INPUT_ELEMENTS] for r in records_of(tmp_path / "r")] == [32, 32, 8]


def test_an_input_without_elements_or_of_another_kind_has_no_digest(
    tmp_path: Path, records_of
) -> None:
    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, data: object) -> torch.Tensor:
            return self.layer(torch.ones(2, 4))

    model = Takes()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ddpprobe.install(model, run_dir=tmp_path / "r", every=1, daemon="none"):
        for data in (torch.ones(0), torch.eye(3).to_sparse(), torch.ones(3, device="meta"), "text"):
            model(data).sum().backward()
            optimizer.step()
    assert all(DIGEST not in r.scalars[0] for r in records_of(tmp_path / "r"))


def test_a_learning_rate_that_is_a_tensor_is_told_unless_the_script_tells_its_own() -> None:
    weights = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    groups = [{"params": [weights[0]], "lr": torch.tensor(0.25)}, {"params": [weights[1]]}]
    for logged, want in ((None, 0.25), (0.5, 0.5)):
        rows = StepRows(torch.device("cpu"), 0)
        optimizer = torch.optim.SGD(groups, lr=3.0)
        if logged is not None:
            rows.add_scalar(LEARNING_RATE, logged)
        told, in_rows = facts_of(optimizer, rows=rows)
        assert LEARNING_RATE not in told
        assert in_rows == {LEARNING_RATE: want, OPTIMIZER_STEPS: 0.0}
    both = [torch.optim.SGD([weights[0]], lr=0.1), torch.optim.SGD([weights[1]], lr=0.2)]
    assert facts_of(*both)[0][LEARNING_RATE] == facts_of(*both[::-1])[0][LEARNING_RATE] == 0.2
    assert LEARNING_RATE not in facts_of(torch.optim.SGD(groups, lr=3.0), *both)[0]
    assert facts_of(object())[0] == {}


def test_the_facts_of_a_step_before_are_forgotten() -> None:
    facts, weight = step_facts.OptimizerFacts(), nn.Parameter(torch.ones(1))
    for rate, beta in ((0.5, 0.9), (0.1, 0.8)):
        facts.begin_step()
        betas = (rate, beta)
        optimizer = torch.optim.Adam([weight], lr=rate, betas=betas, eps=rate, weight_decay=beta)
        assert facts_of(optimizer, facts=facts)[0] == {
            LEARNING_RATE: rate, FIRST_DECAY: rate, MOMENT_DECAY: beta, WEIGHT_DECAY: beta,
        }  # fmt: skip
        assert options_of(optimizer, facts=facts)["eps"] == rate


def test_the_modes_of_a_model_are_shares_of_its_modules_and_a_count_of_its_parameters() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.ReLU())
    model[0].eval().requires_grad_(False)
    assert step_facts.modes(describe(model)) == {TRAINING: 0.75, TRAINABLE: 2.0}
    assert step_facts.modes(describe(nn.Linear(2, 2))) == {TRAINING: 1.0, TRAINABLE: 2.0}


class Holder(nn.Module):
    """Is only asked for its `training_step`, as a LightningModule on one device."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Model() for _ in range(parts)])

    def training_step(self, data: torch.Tensor) -> torch.Tensor:
        return sum((part(data).sum() for part in self.parts), torch.zeros(()))


@pytest.mark.parametrize(("parts", "told"), [(1, True), (2, False)])
def test_a_part_that_is_all_that_is_called_is_given_the_data_of_its_model(
    parts: int, told: bool, tmp_path: Path, records_of
) -> None:
    model, alone = Holder(parts), Model()
    for at, (net, step) in enumerate([(model, model.training_step), (alone, alone)]):
        optimizer = torch.optim.SGD(net.parameters(), 0.0)
        probe = ddpprobe.install(net, every=1, run_dir=tmp_path / str(at), daemon="none")
        for number in range(4):
            step(torch.full((2, 4), float(number))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        probe.close()
    held, root = ([r.scalars[0] for r in records_of(tmp_path / str(at))] for at in range(2))
    assert [DIGEST in scalars for scalars in held] == [False, told, told, told]  # found in step 0
    for name in (DIGEST, INPUT_ELEMENTS) if told else ():
        assert [s[name] for s in held[1:]] == [s[name] for s in root[1:]]
