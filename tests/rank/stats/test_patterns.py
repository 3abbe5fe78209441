"""Elements are counted by sign and exponent the same way by every kernel, and none is lost."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ddpprobe.rank.stats import native, patterns
from ddpprobe.rank.stats.dense import Unsupported
from ddpprobe.rank.stats.patterns import count_patterns
from ddpprobe.records.histogram import PATTERNS

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def numbers(dtype: torch.dtype, n: int = 5000) -> torch.Tensor:
    g = torch.Generator().manual_seed(n)
    x = torch.randn(n, generator=g, dtype=torch.float64)
    x *= 2.0 ** torch.randint(-140, 120, (n,), generator=g)
    x[:9] = torch.tensor([0.0, -0.0, torch.nan, torch.inf, -torch.inf, 1.0, -2.0, 1e-45, -1e-40])
    return x.to(dtype)


def reference(x: torch.Tensor) -> np.ndarray:
    out = np.zeros(PATTERNS)
    for value in x.double().tolist():
        if value == 0:
            continue
        _, exponent = np.frexp(value)
        pattern = 255 if not np.isfinite(value) else int(np.clip(exponent - 1 + 127, 0, 254))
        out[pattern + 256 * (np.signbit(value))] += 1
    out[[255, 511]] = 0  # what is no number is in no bin, wherever it was counted
    return out


def counted(x: torch.Tensor) -> np.ndarray:
    out = torch.full((PATTERNS,), torch.nan, dtype=torch.float64)
    count_patterns(x, out)
    out[[255, 511]] = 0
    return out.numpy()


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_element_is_counted_at_its_sign_and_exponent(dtype, compiled, monkeypatch) -> None:
    if compiled:
        assert native.prepare()
    else:
        monkeypatch.setattr(patterns, "pattern_kernels", {})
        monkeypatch.setattr(patterns, "BLOCK", 777)  # several blocks and a rest
    x = numbers(dtype)
    assert counted(x).tolist() == reference(x).tolist()
    assert counted(x.view(50, 100).t()[::3]).tolist() == reference(x.view(50, 100).t()[::3].reshape(-1)).tolist()  # fmt: skip # noqa: E501
    assert counted(x[:0]).tolist() == [0] * PATTERNS
    assert counted(x[5:7].view(2, 1).expand(2, 40)).sum() == 80


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_a_gpu_does_counts_the_same(dtype: torch.dtype) -> None:
    index = patterns._patterns(numbers(dtype))
    assert patterns._counted_in_lanes(index).tolist() == patterns._counted(index).tolist()


def test_what_has_no_statistics_has_no_histogram() -> None:
    with pytest.raises(Unsupported):
        counted(torch.empty(3, device="meta"))


def test_inside_autograd_and_inference_it_changes_no_flag() -> None:
    x = torch.ones(3, requires_grad=True)
    counted(x * 2)
    with torch.inference_mode():
        assert counted(torch.ones(4))[127] == 4
    assert torch.is_grad_enabled()
