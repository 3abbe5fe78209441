"""The command over models of others, here of torch alone: what is right passes, a lie does not."""

from __future__ import annotations

import dataclasses

from ddpprobe.records.step import OBSERVED
from tests.models import judge, probed
from tests.models.__main__ import main
from tests.models.listed import ARCHITECTURES
from tests.models.table import PAGE, listed


def test_a_model_is_trained_alike_seen_right_and_its_faults_are_named_on_one_rank_and_on_two(
    capsys,
) -> None:
    assert main(["torch", "sequential"]) == 0, capsys.readouterr().out
    *lines, end = capsys.readouterr().out.splitlines()
    assert end == "2 models are right, 0 are not"
    assert [line.split()[:2] for line in lines] == [["right", "torch"]] * 2
    assert all("132 rows" in line and "named: forward, backward" in line for line in lines)


def test_other_bits_a_wrong_count_a_row_too_many_and_a_wrong_name_are_refused(
    capsys, monkeypatch
) -> None:
    on_ranks, records_of, causes_of = judge.on_ranks, judge.records_of, judge.causes_of

    def other_bits(function, *arguments):
        found = on_ranks(function, *arguments)
        if function is probed.train:
            found[0].trained.bits = "other"
        return found

    def wrong_rows(run_dir):
        records = records_of(run_dir)
        rows = {site.key: row for row, site in enumerate(records[2].sites)}
        counts, sites = records[2].counts.copy(), list(records[2].sites)
        counts[rows["head", "output", ""], 0] += 1
        made_up = rows["words", "output", ""]
        sites[made_up] = dataclasses.replace(sites[made_up], fqn="none")
        assert counts[made_up, OBSERVED]
        records[2] = dataclasses.replace(records[2], counts=counts, sites=tuple(sites))
        return records

    def wrong_name(run_dir):
        return [dataclasses.replace(a, module="other") for a in causes_of(run_dir)]

    monkeypatch.setattr(judge, "on_ranks", other_bits)
    monkeypatch.setattr(judge, "records_of", wrong_rows)
    monkeypatch.setattr(judge, "causes_of", wrong_name)
    assert main(["torch LSTM"]) == 1
    said = capsys.readouterr().out
    assert said.startswith("FAILED torch LSTM")
    for problem in (
        "rank 0: the probe changes state",
        "step 2 head:output: numel 221, expected 220",
        "step 2 words:output: unobserved, expected 1",
        "step 2 none:output: the reference has no such site",
        "forward, micro-batch 0: said [('nonfinite', 1, 0, 'other', 'forward', 'output')]",
        "backward, micro-batch 0: said [('nonfinite', 1, 0, 'other', 'backward', 'grad_output')]",
    ):
        assert problem in said
    assert said.endswith("0 models are right, 1 are not\n")


def test_a_name_that_no_model_has_is_wrong_use(capsys) -> None:
    assert main(["GPT-17"]) == 2
    assert "no model is called 'GPT-17'" in capsys.readouterr().err


def test_the_page_lists_the_models_that_there_are() -> None:
    assert listed() == list(ARCHITECTURES), f"run make test-models: {PAGE} is old"
