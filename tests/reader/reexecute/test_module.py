"""A module executed again from what was recorded of one call: what repeats, and why."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ddpprobe.errors import RunError
from ddpprobe.reader.captured_steps import not_captured
from ddpprobe.reader.reexecute import verdict as verdicts
from ddpprobe.reader.reexecute.call import Outcome, arguments, execute
from ddpprobe.reader.reexecute.model import build, fill, find
from ddpprobe.reader.reexecute.module import evidence
from ddpprobe.reader.reexecute.scene import Scene, scene_of, tensor_of
from ddpprobe.reader.reexecute.verdict import ExecutionVerdict, judge
from ddpprobe.reader.run import open_run
from ddpprobe.reader.tensors import StoredCall
from ddpprobe.records.step import COUNTS, VALUES, FirstBad, Site, StepRecord
from ddpprobe.rundir.tensor_pack import ITEM_SIZES
from ddpprobe.store.captures import dtypes

from ...made_runs import Made

CPU = torch.device("cpu")
UNKNOWN = {"forward": None, "backward": None}


class Net(nn.Module):
    """A linear layer, and after it whatever a test wants."""

    def __init__(
        self, then: Callable[[Tensor], Tensor], dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4, dtype=dtype)
        self.register_buffer("shift", torch.full((4,), 0.1, dtype=dtype))
        self.then = then

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self.up(x) + self.shift)


def net(then: Callable[[Tensor], Tensor], dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(1)
    return Net(then, dtype)


def recorded(module: nn.Module, x: Tensor, **changes: object) -> Scene:
    """Call a module as the run did, and keep what a capture keeps."""
    rng = torch.get_rng_state()
    y = module(x.clone())
    scene = Scene(
        module="mlp",
        kind="tests.Net",
        training=module.training,
        args={"tuple": [{"tensor": "0"}]},
        kwargs={"dict": {}},
        inputs={"0": x},
        outputs={"": y.detach().clone()},
        parameters={f"mlp.{n}": p.detach().clone() for n, p in module.named_parameters()},
        buffers={f"mlp.{n}": b.clone() for n, b in module.named_buffers()},
        grad_outputs={"": torch.ones_like(y)},
        rng={"cpu": rng},
    )
    return replace(scene, **changes)  # type: ignore[arg-type]


def again(
    module: nn.Module, scene: Scene, bad_before: dict[str, bool | None] | None = None
) -> ExecutionVerdict:
    """Execute a module that has forgotten everything, in its own types and in float64."""
    outcomes = []
    for double in (False, True):
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers()):
                tensor.zero_()
        fill(module, scene, CPU, double=double)
        outcomes.append(execute(module, scene, CPU, double=double))
    module.to(next(iter(scene.parameters.values()), torch.zeros(())).dtype)
    return judge(scene, outcomes[0], outcomes[1], bad_before=bad_before or UNKNOWN)


def x_of(seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)).to(dtype)


def negative_log(h: Tensor) -> Tensor:
    gate = torch.sigmoid(h)
    return gate * torch.log(h)  # h may be negative


def test_a_log_of_negative_numbers_repeats_and_is_named_with_its_line() -> None:
    module = net(negative_log)
    found = again(module, recorded(module, x_of()))
    assert (found.word, found.phase, found.double) == ("repeats", "forward", "bad maths")
    op = found.op
    assert op is not None
    assert op.line is not None
    assert (op.name, op.module) == ("aten.log.default", "mlp")
    assert op.line.text == "return gate * torch.log(h)  # h may be negative"
    assert (Path(op.line.file), op.line.function) == (Path(__file__), "negative_log")
    assert op.line.number == inspect.getsourcelines(negative_log)[1] + 2
    assert op.inputs[0].low < 0 < op.inputs[0].high
    assert op.inputs[0].shape == (3, 4)
    assert op.outputs[0].nan
    assert found.compared[0].bitwise


@pytest.mark.parametrize(
    ("then", "dtype", "name"),
    [
        (lambda h: torch.exp(h * 400).mean(), torch.float32, "aten.exp.default"),
        (lambda h: h * 6e4 * 6e4, torch.float16, "aten.mul.Tensor"),
        (lambda h: (h.double() * 1e300).float(), torch.float32, "aten._to_copy.default"),
    ],
    ids=["exp", "float16", "cast"],
)
def test_an_overflow_repeats_and_is_finite_in_float64(then, dtype: torch.dtype, name: str) -> None:
    module = net(then, dtype)
    found = again(module, recorded(module, x_of(dtype=dtype)))
    assert (found.word, found.double) == ("repeats", "overflow")
    assert found.op is not None
    assert (found.op.name, found.op.outputs[0].inf) != (name, 0)
    assert found.op.name == name


@pytest.mark.parametrize("bit", [30, 20])
def test_a_flipped_bit_is_not_reproducible(bit: int) -> None:
    module = net(torch.tanh)
    scene = recorded(module, x_of())
    scene.outputs[""].view(torch.int32)[1, 2] ^= 1 << bit
    found = again(module, scene)
    assert (found.word, found.phase, found.op) == ("not reproducible", "forward", None)
    assert found.why.startswith("1 of 12 elements of the output differ")
    assert found.double is None


def test_a_nan_that_no_operator_makes_is_not_reproducible() -> None:
    module = net(torch.tanh)
    scene = recorded(module, x_of())
    scene.outputs[""][0, 0] = torch.nan
    found = again(module, scene)
    assert (found.word, found.phase) == ("not reproducible", "forward")
    assert verdicts.SAYS[found.word].startswith("not reproducible: hardware, a race")


def test_a_healthy_call_agrees_bit_for_bit() -> None:
    module = net(torch.tanh)
    found = again(module, recorded(module, x_of()))
    assert (found.word, found.phase, found.op, found.notes) == ("agrees", None, None, ())
    assert found.compared[0].bitwise
    assert found.why == "the output is the recorded one bit for bit"


def test_what_rounding_explains_agrees_and_is_called_so() -> None:
    module = net(torch.tanh)
    scene = recorded(module, x_of())
    scene.outputs[""].view(torch.int32)[1, 2] ^= 1
    found = again(module, scene)
    assert (found.word, found.why) == ("agrees", "the output is the recorded one within rounding")
    assert found.compared[0].differing == 1


@pytest.mark.parametrize("where", ["input", "parameter", "gradient"])
def test_a_fault_that_came_in_is_not_the_modules(where: str) -> None:
    module = net(torch.sin)
    x = x_of()
    if where == "input":
        x[0, 0] = torch.nan
    if where == "parameter":
        module.up.weight.data[1, 1] = torch.inf
    scene = recorded(module, x)
    if where == "gradient":
        scene.grad_outputs[""][0, 0] = torch.nan
    found = again(module, scene)
    assert (found.word, found.op) == ("came in", None)
    assert where in found.why
    assert found.phase == ("backward" if where == "gradient" else "forward")


def test_a_mask_of_minus_infinity_is_nobodys_fault_until_it_masks_everything() -> None:
    def attend(h: Tensor, rows: int) -> Tensor:
        mask = torch.zeros(3, 4)
        mask[:rows] = -torch.inf
        mask[0, 0] = 0.0
        return nn.functional.softmax(h.masked_fill(h > 9, -torch.inf) + mask, dim=-1)

    module = net(lambda h: attend(h, 1))
    assert again(module, recorded(module, x_of())).word == "agrees"
    module = net(lambda h: attend(h, 2))
    found = again(module, recorded(module, x_of()))
    assert (found.word, found.double) == ("repeats", "bad maths")
    assert found.op is not None
    assert found.op.name == "aten._softmax.default"
    module = net(lambda h: torch.log(h - h).exp() + h)  # -inf, and zero again
    assert again(module, recorded(module, x_of(), grad_outputs={})).word == "agrees"


def test_dropout_is_repeated_from_the_recorded_random_state() -> None:
    module = net(lambda h: nn.functional.dropout(h, 0.5))
    scene = recorded(module, x_of())
    assert again(module, scene).why == "the output is the recorded one bit for bit"
    found = again(module, replace(scene, rng={}))
    assert found.word == "unclear"
    assert any("random numbers were drawn (aten.bernoulli_.float)" in n for n in found.notes)


def test_a_fault_of_the_backward_is_named_by_the_line_of_its_forward() -> None:
    def root(h: Tensor) -> Tensor:
        h = h * 0.0
        return torch.sqrt(h)  # its derivative at 0 is infinite

    module = net(root)
    scene = recorded(module, x_of())
    found = again(module, scene, {"forward": False, "backward": True})
    assert (found.word, found.phase, found.double) == ("repeats", "backward", "bad maths")
    assert found.op is not None
    assert found.op.line is not None
    assert (found.op.phase, found.op.node) == ("backward", "SqrtBackward0")
    assert found.op.name == "aten.div.Tensor"
    assert found.op.line.text.startswith("return torch.sqrt(h)")
    assert found.op.line.number == inspect.getsourcelines(root)[1] + 2
    assert again(module, scene, {"forward": False, "backward": False}).word == "only now"
    healthy = net(torch.tanh)
    found = again(healthy, recorded(healthy, x_of()), {"forward": False, "backward": True})
    assert (found.word, found.phase) == ("not reproducible", "backward")


def test_in_a_checkpointed_part_too() -> None:
    module = net(lambda h: checkpoint(negative_log, h, use_reentrant=False))
    found = again(module, recorded(module, x_of()))
    assert found.op is not None
    assert found.op.line is not None
    assert (found.op.phase, found.op.line.function) == ("forward", "negative_log")


def test_autocast_is_as_it_was() -> None:
    module = net(torch.tanh)
    state = {"cpu": "bfloat16"}
    with torch.autocast("cpu", torch.bfloat16):
        scene = recorded(module, x_of(), autocast=state)
    assert scene.outputs[""].dtype == torch.float32  # bfloat16 + float32
    found = again(module, scene)
    assert found.why == "the output is the recorded one bit for bit"
    assert found.compared[0].allowed > 1e-3  # for bfloat16 rounds on the way
    found = again(module, replace(scene, autocast={}))
    assert not found.compared[0].bitwise


def test_parameter_gradients_are_compared_where_they_are_this_calls_alone() -> None:
    module = net(torch.tanh)
    scene = recorded(module, x_of())
    module(x_of()).backward(torch.ones(3, 4))
    scene = replace(scene, gradients={"mlp.up.weight": module.up.weight.grad.clone()})
    found = again(module, scene)
    assert [(c.kind, c.name, c.bitwise) for c in found.compared] == [
        ("output", "", True), ("grad", "mlp.up.weight", True)
    ]  # fmt: skip


class _WithLoss(nn.Module):
    """Logits and the loss that is computed from them, as models of transformers return."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        logits = self.up(x)
        half = (logits * 1e4).half().float()  # overflows at a gradient that is counted twice
        return {"logits": logits, "half": half, "loss": half.sum() * 4e4}


@pytest.mark.parametrize("seen", [("loss",), ("logits", "loss"), ("logits", "half", "loss")])
def test_the_gradient_of_an_output_holds_what_came_by_another_one(seen: tuple[str, ...]) -> None:
    torch.manual_seed(1)
    module, x = _WithLoss(), x_of()
    made = module(x)
    for output in made.values():
        output.retain_grad()
    made["loss"].backward()
    scene = replace(
        recorded(nn.Identity(), x),
        outputs={leaf: made[leaf].detach() for leaf in seen},
        grad_outputs={leaf: made[leaf].grad for leaf in seen},
        parameters={f"mlp.{n}": p.detach().clone() for n, p in module.named_parameters()},
        gradients={f"mlp.{n}": p.grad for n, p in module.named_parameters()},
    )
    found = again(module, scene)
    assert (found.word, len(found.compared)) == ("agrees", len(seen) + 2)
    assert all(c.bitwise for c in found.compared)


def test_gradients_that_differ_beside_outputs_that_agree_are_no_all_clear() -> None:
    module = net(torch.tanh)
    scene = recorded(module, x_of())
    module(x_of()).sum().backward()
    gradients = {f"mlp.{n}": 2 * p.grad for n, p in module.named_parameters() if p.grad is not None}
    found = again(module, replace(scene, gradients=gradients))
    assert (found.word, found.phase) == ("unclear", "backward")
    assert found.why.startswith("the output is the recorded one bit for bit, but the gradient of")
    assert ", and 1 more do: a part of it came by another way" in found.why


def test_a_module_that_has_two_names_is_filled_by_the_one_that_was_recorded() -> None:
    module = net(torch.tanh)
    module.twin = module.up
    scene = recorded(module, x_of())
    assert "mlp.twin.weight" not in scene.parameters
    assert again(module, scene).word == "agrees"


def test_a_module_of_torchs_own_is_named_by_torchs_line() -> None:
    torch.manual_seed(0)
    large = nn.Linear(4, 4)
    large.weight.data *= 10
    scene = recorded(large, torch.full((3, 4), 3e38))
    found = again(nn.Linear(4, 4), scene)
    assert found.op is not None
    assert found.op.line is not None
    assert found.op.line.file.endswith("linear.py")
    assert (found.word, found.double) == ("repeats", "overflow")


def test_what_a_module_writes_into_and_casts_by_itself_is_no_obstacle() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(4, 4)
            self.mask = torch.eye(4)  # no buffer

        def forward(self, x: Tensor, *, scale: float, more: list[Tensor]) -> dict[str, Tensor]:
            x += 1
            wide = x.float() @ torch.ones(4, 4, dtype=torch.float32)
            return {"y": torch.log(self.up(wide.to(x.dtype)) * scale) + more[0] * self.mask[0]}

    torch.manual_seed(0)
    module = Odd()
    x, extra = x_of(), x_of(1)
    made = module(x.clone(), scale=-1.0, more=[extra])["y"].detach()
    scene = recorded(
        nn.Identity(), x, kind="Odd", outputs={"y": made}, inputs={"0": x, "more.0": extra},
        kwargs={"dict": {"scale": {"value": -1.0}, "more": {"list": [{"tensor": "more.0"}]}}},
        parameters={f"mlp.{n}": p.detach().clone() for n, p in module.named_parameters()},
        grad_outputs={},
    )  # fmt: skip
    found = again(module, scene)
    assert (found.word, found.double) == ("repeats", "bad maths")
    assert found.compared[0].bitwise


def test_the_process_is_as_it_was_before() -> None:
    module = net(lambda h: nn.functional.dropout(h, 0.5))
    scene = recorded(module, x_of())
    before = torch.get_rng_state()
    again(module, scene)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_default_dtype() == torch.float32
    assert not torch.is_autocast_enabled("cpu")
    assert not torch.is_anomaly_enabled()
    assert module.up.weight.grad is None


def test_arguments_are_rebuilt_from_data_alone() -> None:
    tensors = {"0": torch.zeros(1), "1.a": torch.ones(2)}
    tree = {"tuple": [
        {"tensor": "0"}, {"dict": {"a": {"tensor": "1.a"}, "b": {"value": None}}},
        {"list": [{"value": 3}, {"float": "-inf"}, {"value": "os.system"}]},
    ]}  # fmt: skip
    first, second, third = arguments(tree, tensors)
    assert first is tensors["0"]
    assert second == {"a": tensors["1.a"], "b": None}
    assert third == [3, -float("inf"), "os.system"]


@pytest.mark.parametrize(
    ("tree", "says", "code"),
    [
        ({"tuple": [{"opaque": "train.Mask"}]}, "an argument was a train.Mask", 2),
        ({"tuple": [{"tensor": "1"}]}, "the input '1' was not recorded", 2),
        ({"tuple": {"a": 1}}, "not recorded as this ddpprobe writes them", 3),
        (["tuple"], "not recorded as this ddpprobe writes them", 3),
    ],
)
def test_arguments_that_cannot_be_rebuilt_are_said(tree: object, says: str, code: int) -> None:
    with pytest.raises(RunError, match=says) as caught:
        arguments(tree, {"0": torch.zeros(1)})
    assert caught.value.exit_code == code


def test_arguments_nested_without_end_are_refused() -> None:
    tree: object = {"value": 1}
    for _ in range(900):
        tree = {"list": [tree]}
    with pytest.raises(RunError, match="nested too deeply"):
        arguments(tree, {})


MODEL = """
import torch
from torch import nn
torch.manual_seed(0)
def model(): return nn.Sequential(nn.Linear(4, 4), nn.Tanh())
def meta():
    with torch.device("meta"): return model()
def fails(): return {}["key"]
def wrong(): return 3
number = 3
"""


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of a user's module in the working directory."""
    name = f"user_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODEL)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("{}", "expected pkg.mod:fn"),
        ("nowhere_at_all:fn", "importing nowhere_at_all raised ModuleNotFoundError.*all'$"),
        ("{}:modle", "no function 'modle' in user_.*did you mean model"),
        ("{}:number", "no function 'number'"),
        ("{}:wrong", "returned int, not an nn.Module"),
        ("{}:fails", r"fails\(\) raised KeyError at .*user_.*\.py:8: 'key'"),
    ],
)
def test_what_is_wrong_with_a_build_is_said(user: str, spec: str, says: str) -> None:
    with pytest.raises(RunError, match=says) as caught:
        build(spec.format(user))
    assert caught.value.exit_code == 2


def test_a_script_that_trains_when_it_is_imported_is_told_what_to_change(
    tmp_path: Path, user: str
) -> None:
    (tmp_path / f"{user}.py").write_text("raise ValueError('RANK expected')")
    with pytest.raises(RunError, match="RANK expected. The file is imported: what trains belongs"):
        build(f"{user}:model")


def test_the_module_is_found_in_the_model_or_is_what_was_built(user: str) -> None:
    scene = recorded(nn.Linear(4, 4), x_of(), kind="torch.nn.modules.linear.Linear")
    model = build(f"{user}:model")
    assert find(model, replace(scene, module="0")) is model[0]
    assert find(model[0], replace(scene, module="layers.7.fc")) is model[0]
    with pytest.raises(
        RunError, match="has no module '7' and is no .*Linear itself; there is 0, 1"
    ):
        find(model, replace(scene, module="7"))


def test_what_does_not_fit_the_run_is_said(user: str) -> None:
    scene = recorded(nn.Linear(4, 4), x_of())
    with pytest.raises(RunError, match=r"weight has shape \[3, 4\] .* and \[4, 4\] in the run"):
        fill(nn.Linear(4, 3), scene, CPU, double=False)
    with pytest.raises(
        RunError, match="parameter mlp.0.weight of the built model was not recorded"
    ):
        fill(nn.Sequential(nn.Linear(4, 4)), scene, CPU, double=False)
    notes = fill(nn.Linear(4, 4, bias=False), scene, CPU, double=False)
    assert notes == ["the run had mlp.bias, which was not built"]
    with pytest.raises(
        RunError, match=r"mlp \(Linear\): the forward raised RuntimeError: mat1 and mat2"
    ):
        execute(nn.Linear(4, 4), replace(scene, inputs={"0": torch.ones(3, 5)}), CPU)
    built = build(f"{user}:meta")[0]
    fill(built, scene, CPU, double=False)
    assert torch.equal(built.weight, scene.parameters["mlp.weight"])


def test_an_outcome_without_a_recorded_output_is_unclear() -> None:
    scene = replace(recorded(net(torch.tanh), x_of()), outputs={})
    found = judge(scene, Outcome(outputs={"": torch.ones(1)}), None, bad_before=UNKNOWN)
    assert found.word == "unclear"


class OneRecord:
    """A run of which one rank left one record."""

    def __init__(self, record: StepRecord) -> None:
        self._record = record

    def records(self, rank: int, attempt: int, *, after: int) -> Iterator[StepRecord]:
        assert (rank, attempt, after) == (0, 0, 6)
        return iter([self._record])


def test_of_a_rank_whose_records_are_gone_nothing_is_known_before(tmp_path: Path) -> None:
    run = open_run(Made(tmp_path / "run").whole(2).close().path)
    stored_call = StoredCall(0, 7, 5, "mlp", {}, {}, 0, 0, {})
    assert set(evidence(run, stored_call).values()) == {None}
    assert set(evidence(run, replace(stored_call, attempt=3, rank=0)).values()) == {None}


@pytest.mark.parametrize(
    ("bad", "first_micro", "expected"),
    [
        ("mlp:output", 0, (True, False)),
        ("mlp.up.weight:grad_local", 0, (False, True)),
        ("mlp:grad_output", 0, (False, False)),  # came from behind it
        ("head:output", 0, (False, False)),
        ("mlp:output", 1, (False, False)),  # of a later micro-batch
        (None, None, (False, False)),
    ],
)
def test_a_ranks_own_record_says_what_was_bad_before(
    bad: str | None, first_micro: int | None, expected: tuple[bool, bool]
) -> None:
    names = ("mlp:output", "mlp:grad_output", "mlp.up.weight:grad_local", "head:output")
    sites = tuple(Site(*name.split(":")) for name in names)
    counts = np.zeros((4, len(COUNTS)), np.int64)
    values = np.zeros((4, len(VALUES)))
    counts[[names.index(bad)] if bad else [], COUNTS.index("nan")] = 3
    first = None if first_micro is None else FirstBad(7, first_micro, "forward", 0, 0)
    record = StepRecord(0, 7, (0,), 0, sites=sites, counts=counts, values=values, first_bad=first)
    stored_call = StoredCall(0, 7, 0, "mlp", {}, {}, 0, 0, {})
    told = evidence(OneRecord(record), stored_call)
    assert (told["forward"], told["backward"]) == expected
    alarm = replace(record, sampled=False)
    assert set(evidence(OneRecord(alarm), stored_call).values()) == {None}
    later = replace(stored_call, micro=1)
    unknown = first_micro == 0
    assert (evidence(OneRecord(record), later)["forward"] is None) == unknown


def test_a_compiled_module_is_watched_operator_by_operator() -> None:
    compiled = net(torch.compile(negative_log, backend="eager"))
    plain = net(negative_log)
    found = again(compiled, recorded(plain, x_of()))
    assert found.op is not None
    assert found.op.line is not None
    assert (found.op.name, found.op.line.function) == ("aten.log.default", "negative_log")


class Part:
    """A captured tensor that one rank holds, or that is spread over two."""

    def __init__(self, array: NDArray[Any], *, spread: bool = False, dtype: str = "") -> None:
        self.dtype = dtype or str(array.dtype)
        self.layout = {"kind": "flat" if spread else "replicated"}
        self._mine = array[: len(array) // 2] if spread else array
        self.shape, self.whole = self._mine.shape, array

    def read(self) -> NDArray[Any]:
        return self._mine


def capsule_of(x: Part, w: Part, state: dict[str, str], **call: object) -> StoredCall:
    told = {
        "micro": 0, "call": 0, "rng": "before", "autocast": {}, "inputs_changed": False,
        "args": {"tuple": [{"tensor": "0"}]}, "kwargs": {"dict": {}}, **call,
    }  # fmt: skip
    about = {"class": "tests.Net", "training": True, "state": state, "calls": [told]}
    tensors = {("input", "mlp", "0"): x, ("param", "embed.weight", ""): w}
    return StoredCall(0, 7, 0, "mlp", about, {"world_size": 1}, 0, 0, tensors)


@pytest.mark.parametrize(
    ("modules", "says"),
    [
        (("", "mlp"), "; '' (the whole model), mlp were"),
        (("",), "; '' (the whole model) was"),  # --module '' is what can be typed
        (("mlp",), "; mlp was"),
        ((), "; none were"),
    ],
)
def test_what_was_captured_is_listed_as_one_types_it(modules: tuple[str, ...], says: str) -> None:
    told = not_captured("head", 7, modules)
    assert told == f"module 'head' was not captured at step 7{says}"


ONES = np.ones((4, 2), np.float32)
STATE = {"a.weight": "embed.weight", "b.weight": "embed.weight"}


def test_a_tied_parameter_kept_once_is_whole_at_each_of_its_places() -> None:
    scene = scene_of(capsule_of(Part(ONES), Part(ONES, spread=True), STATE))
    assert {n: tuple(p.shape) for n, p in scene.parameters.items()} == {
        "mlp.a.weight": (4, 2), "mlp.b.weight": (4, 2)
    }  # fmt: skip
    assert scene.notes == ()


def test_what_fsdp_cast_is_concluded_from_the_inputs() -> None:
    half = Part(ONES.astype(np.float16))
    for x, spread, autocast, expected in [
        (half, True, {}, torch.float16),
        (half, False, {}, torch.float32),  # no FSDP
        (half, True, {"cpu": "float16"}, torch.float32),
        (Part(ONES), True, {}, torch.float32),
    ]:
        stored_call = capsule_of(x, Part(ONES, spread=spread), STATE, autocast=autocast)
        scene = scene_of(stored_call)
        assert {p.dtype for p in scene.parameters.values()} == {expected}
        assert bool(scene.notes) == (expected == torch.float16)


def test_the_built_model_takes_the_types_of_the_run() -> None:
    half = net(torch.tanh, torch.float16)
    scene = recorded(half, x_of(dtype=torch.float16))
    found = again(net(torch.tanh), scene)
    assert found.why == "the output is the recorded one bit for bit"


@pytest.mark.parametrize(
    ("call", "says", "code"),
    [
        ({"args": None}, "the arguments of mlp were not kept", 2),
        ({"micro": 5}, "the arguments of mlp were not kept", 2),
        ({"autocast": {"cpu": "int4"}}, "an autocast type that this ddpprobe does not know", 3),
        ({"autocast": {"cpu": [1]}}, "an autocast type that this ddpprobe does not know", 3),
    ],
)
def test_a_capsule_that_cannot_be_called_is_said(
    call: dict[str, object], says: str, code: int
) -> None:
    with pytest.raises(RunError, match=says) as caught:
        scene_of(capsule_of(Part(ONES), Part(ONES), STATE, **call))
    assert caught.value.exit_code == code


@pytest.mark.filterwarnings("ignore:ComplexHalf")  # torch's, of complex32
def test_every_type_that_is_captured_comes_back_bit_for_bit() -> None:
    for name in ITEM_SIZES:
        kind = getattr(torch, name)
        bits = torch.arange(32, dtype=torch.uint8).repeat(2)
        made = (bits % 2 if name == "bool" else bits).view(kind)
        array = np.array([1 + 2j, 3], np.complex64) if name == "complex32" else None
        if array is not None:
            assert tensor_of(array, name).tolist() == [1 + 2j, 3]
            continue
        raw = made.view(torch.uint8).numpy()
        found = tensor_of(raw.view(dtypes.dtype_of(name)), name)
        assert found.dtype == kind
        assert torch.equal(found.view(torch.uint8), made.view(torch.uint8))
    with pytest.raises(RunError, match="of type 'load'"):
        tensor_of(ONES, "load")
