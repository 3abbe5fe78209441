"""The example that the README shows: it trains, it resumes, and watching it changes nothing."""

from __future__ import annotations

import argparse
import importlib.util
import math
import re
import subprocess
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "launch" / "train_gpt.py"
SMALL = ["--layers", "2", "--dim", "32", "--length", "32", "--batch", "4", "--hash"]


@pytest.fixture(scope="module")
def script():
    """Return the script as a module: its model and its data."""
    spec = importlib.util.spec_from_file_location("train_gpt", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def train(torchrun, tmp_path):
    """Run the script with a wrapper: two ranks, or one process for `none`."""

    def run(wrap: str, *args: object, ok: bool = True) -> subprocess.CompletedProcess[str]:
        words = [*SMALL, "--wrap", wrap, *args]
        done = torchrun([SCRIPT, *words], 0 if wrap == "none" else 2, {"DDPPROBE_LINGER": "0"})
        assert (done.returncode == 0) == ok, done.stdout + done.stderr
        return done

    return run


def hashes(done: subprocess.CompletedProcess[str]) -> list[str]:
    return sorted(re.findall(r"rank \d+ sha256 \w{64}", done.stdout))


def losses(done: subprocess.CompletedProcess[str], what: str = "loss") -> dict[int, float]:
    found = re.findall(rf"step +(\d+)  {what} (\S+)", done.stdout)
    return {int(step): float(value) for step, value in found}


def test_it_stays_readable_and_has_one_line_of_ddpprobe():
    text = SCRIPT.read_text()
    assert len(text.splitlines()) <= 200
    assert text.count("ddpprobe.install(") == 1


def test_the_modules_have_the_names_the_documentation_uses(script):
    model = script.GPT(layers=3, dim=8, heads=2, length=4)
    names = dict(model.named_modules())
    assert {"blocks.2.mlp", "blocks.0.attn.qkv", "head"} <= set(names)
    tokens = torch.zeros(2, 4, dtype=torch.long)
    logits, loss = model(tokens, tokens)
    assert logits.shape == (2, 4, 256)
    assert loss.shape == ()
    assert torch.equal(model(tokens), logits)


def test_data_is_real_text_and_a_pure_function_of_seed_step_and_rank(script):
    data, held_out = script.corpus()
    assert len(data) > 5_000_000
    assert len(data) > 5 * len(held_out) > 500_000
    args = argparse.Namespace(seed=3, batch=2, length=400)
    first, targets = script.draw(data, args, torch.device("cpu"), 7, 0, 1)
    again, _ = script.draw(data, args, torch.device("cpu"), 7, 0, 1)
    other, _ = script.draw(data, args, torch.device("cpu"), 7, 0, 0)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(first[:, 1:], targets[:, :-1])
    assert sum(first.flatten().tolist().count(c) for c in b" etn") > 100


def test_the_loss_falls_on_data_it_has_seen_and_on_data_it_has_not(train):
    done = train("none", "--no-probe", "--steps", 60, "--eval-every", 30)
    seen, unseen = losses(done), losses(done, "held out")
    assert seen[59] < 0.75 * seen[0]
    assert unseen[59] < unseen[29] < 5.0


@pytest.mark.parametrize("wrap", ["none", "ddp", "fsdp2"])
def test_watched_or_resumed_it_ends_in_the_very_same_bits(train, tmp_path, wrap):
    common = ["--steps", 18, "--accumulate", 2, "--eval-every", 7, "--log-every", 1]
    straight = train(wrap, *common, "--no-probe", "--checkpoint", tmp_path / "ckpt")
    watched = train(wrap, *common, "--every", 3, "--run-dir", tmp_path / "run")
    assert hashes(watched) == hashes(straight) != []
    assert losses(watched) == losses(straight)
    assert (tmp_path / "run" / "run.json").exists()

    (tmp_path / "ckpt" / "00000018").rename(tmp_path / "the-end")
    resumed = train(
        wrap, *common, "--resume", "--checkpoint", tmp_path / "ckpt", "--run-dir", tmp_path / "run2"
    )
    assert hashes(resumed) == hashes(straight)
    assert min(losses(resumed)) == 14


def test_wrappers_differ_in_memory_and_not_in_what_they_learn(train):
    common = ["--no-probe", "--steps", 8, "--accumulate", 2, "--log-every", 1, "--eval-every", 4]
    ddp, fsdp2 = train("ddp", *common), train("fsdp2", *common)
    assert losses(fsdp2) == pytest.approx(losses(ddp), rel=1e-3)
    ranks = {h.split()[-1] for h in hashes(ddp)}
    assert len(ranks) == 1  # replicas agree, shards do not
    assert len({h.split()[-1] for h in hashes(fsdp2)}) == 2


def test_an_injected_fault_strikes_at_the_step_it_says_also_when_resumed(train, tmp_path):
    common = ["--no-probe", "--steps", 8, "--eval-every", 4, "--log-every", 1]
    common += ["--checkpoint", tmp_path, "--inject", "nan:step=6,rank=0,module=blocks.1.mlp"]
    for more in ([], ["--resume"]):
        for late in tmp_path.glob("00000008"):
            late.rename(tmp_path.with_name(tmp_path.name + "-set-aside"))
        done = train("none", *common, *more)
        assert "planted nan at step 6, rank 0, module blocks.1.mlp, forward" in done.stderr
        bad = [step for step, loss in losses(done).items() if math.isnan(loss)]
        assert bad == [6, 7]


@pytest.mark.parametrize(
    ("wrap", "args", "says"),
    [
        ("ddp", [], "--wrap ddp and fsdp2 are for torchrun"),
        ("none", ["--resume"], "--resume: found nothing in --checkpoint"),
        (
            "none",
            ["--no-probe", "--inject", "nan:step=1,module=blocks.1.mpl"],
            "did you mean blocks.1.mlp",
        ),
    ],
)
def test_wrong_use_is_said_before_training_starts(torchrun, wrap, args, says):
    done = torchrun([SCRIPT, *SMALL, "--wrap", wrap, *args], nproc=0)
    assert done.returncode != 0
    assert says in done.stderr
    assert "step" not in done.stdout
