"""On real ranks, too, a probe is a copy-safe hook: re-wrapping, copies, checkpoints, errors change
nothing.

Each way trains with a probe and without, and both must end with the same bits on every rank.
"""

from __future__ import annotations

import json
from pathlib import Path

SCRIPT = '''
import contextlib, copy, json, sys, time
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict, get_optimizer_state_dict, set_model_state_dict, set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel
import ddpprobe
from ddpprobe.testing import state_hash
from tests.rank.test_guest_manners import hooks_left

OUT, STEPS = sys.argv[1], 6
dist.init_process_group("gloo")
rank = dist.get_rank()
cpu = torch.device("cpu")


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 9), nn.LayerNorm(9), nn.ReLU(inplace=True), nn.Dropout(0.2),
                         nn.Linear(9, 3))


def batch(step):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(3 + rank, 4, generator=generator)


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model, optimizer, steps, after=lambda step: None):
    for step in steps:
        model(batch(step)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        after(step)
    return model, optimizer


def ddp_after_install(model, install):
    install(model)
    wrapped = DDP(model)
    return train(wrapped, adam(wrapped), range(STEPS))


def wrapped_anew(model, install):
    wrapped = DDP(model)
    install(wrapped)
    optimizer = adam(wrapped)
    train(wrapped, optimizer, range(3))
    again = DDP(wrapped.module, gradient_as_bucket_view=True)
    del wrapped
    return train(again, optimizer, range(3, STEPS))


def fsdp2_after_install(model, install):
    install(model)
    fully_shard(model[4])
    fully_shard(model)
    return train(model, adam(model), range(STEPS))


def fsdp1_after_install(model, install):
    install(model)
    wrapped = FSDP(model, use_orig_params=True, device_id=cpu)
    return train(wrapped, adam(wrapped), range(STEPS))


def copies_of_ddp(model, install):
    """An average of the module and a deep copy of the wrapper, both made in a sampled step."""
    wrapped = DDP(model)
    install(wrapped)
    optimizer = adam(wrapped)
    loss = wrapped(batch(0)).square().sum()
    average, twin = AveragedModel(wrapped.module), copy.deepcopy(wrapped)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    other = adam(twin)

    def after(step):
        average.update_parameters(wrapped.module)
        average(batch(step)).sum().backward()
        train(twin, other, [step])

    train(wrapped, optimizer, range(1, STEPS), after)
    with torch.no_grad():
        for mine, theirs, its in zip(
            wrapped.parameters(), average.module.parameters(), twin.parameters()
        ):
            mine.add_(theirs).add_(its)
    return wrapped, optimizer


def checkpoint_of_fsdp2(model, install):
    fully_shard(model[4])
    fully_shard(model)
    install(model)
    optimizer, kept = adam(model), {}

    def after(step):
        if step == 2:
            kept["model"] = copy.deepcopy(get_model_state_dict(model))
            kept["optimizer"] = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
            kept["keys"] = list(kept["model"])
        if step == 4:
            set_model_state_dict(model, kept["model"])
            set_optimizer_state_dict(model, optimizer, kept["optimizer"])

    train(model, optimizer, range(STEPS), after)
    assert kept["keys"] == list(net().state_dict()), kept["keys"]
    return model, optimizer


def uneven_ends(model, install):
    """Rank 1 has two batches more: DDP's Join lets rank 0 shadow them."""
    wrapped = DDP(model)
    install(wrapped)
    optimizer = adam(wrapped)
    with Join([wrapped]):
        train(wrapped, optimizer, range(4 + 2 * rank))
    return wrapped, optimizer


def error_in_a_step(model, install):
    wrapped = DDP(model)
    install(wrapped)
    optimizer = adam(wrapped)

    def throw(*_):
        raise ValueError("theirs")

    train(wrapped, optimizer, range(2))
    handle = model[2].register_forward_hook(throw)
    try:
        wrapped(batch(2))
    except ValueError as error:
        assert str(error) == "theirs"
    else:
        raise AssertionError("nothing was raised")
    handle.remove()
    return train(wrapped, optimizer, range(3, STEPS))


WAYS = [ddp_after_install, wrapped_anew, fsdp2_after_install, fsdp1_after_install, copies_of_ddp,
        checkpoint_of_fsdp2, uneven_ends, error_in_a_step]


def run(way, run_dir):
    probes = []

    def install(model):
        if run_dir:
            probes.append(ddpprobe.install(model, run_dir=run_dir, every=2, daemon="none"))

    model = net()
    torch.manual_seed(rank)
    model, optimizer = way(model, install)
    for probe in probes:
        probe.close()
    left = hooks_left(model)
    torch.manual_seed(rank)  # how long the shadowing took
    return state_hash(model, optimizer), left


found = {}
for way in WAYS:
    with_probe = run(way, f"{OUT}/{way.__name__}")
    bare = run(way, None)
    found[way.__name__] = {"same": with_probe[0] == bare[0], "left": with_probe[1]}
with open(f"{OUT}/found.{rank}", "w") as file:
    json.dump(found, file)
dist.barrier()
dist.destroy_process_group()
time.sleep(0.5)
'''


def test_training_ends_with_the_same_bits_on_every_rank(torchrun, tmp_path, records_of) -> None:
    script = tmp_path / "manners.py"
    script.write_text(SCRIPT)
    out = tmp_path / "o"
    out.mkdir()
    done = torchrun([script, out], env={"PYTHONPATH": str(Path(__file__).parents[2])})
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        found = json.loads((out / f"found.{rank}").read_text())
        assert {way: facts for way, facts in found.items() if not facts["same"]} == {}
        assert {way: facts["left"] for way, facts in found.items() if facts["left"]} == {}
        for way in found:
            steps = [r.step for r in records_of(out / way, rank) if r.sampled and not r.skipped]
            want = [0, 2] if (way, rank) == ("uneven_ends", 0) else [0, 2, 4]
            assert steps == want, (way, rank)
