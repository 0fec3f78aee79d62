"""The CUDA source, compiled for the host, against the PyTorch reference: bit for bit."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from host_transfer import HostCompiler, HostTransfer
from hypothesis import given, settings
from hypothesis import strategies as st

from inferscale_kernels.gpu_check.cases import ORDERS, ROTATIONS, Case, difference, make, sweep


def check(compiler: HostCompiler, case: Case, multiprocessors: int = 1) -> HostTransfer:
    """Both directions of ``case``: every byte of arena, scales and caches as the reference has it.

    Elements that are not written are compared as well.
    """
    for writes in (True, False):
        problem, oracle = make(case), make(case)
        before = [t.clone() for t in problem.tensors]
        transfer = HostTransfer(
            compiler, problem.arena, problem.layers, problem.codec, problem.scales,
            problem.channels, multiprocessors,
        )  # fmt: skip
        if writes:
            transfer.write(
                problem.src, problem.dst, problem.positions, key_scale=problem.key_scale
            )
        else:
            transfer.read(problem.dst, problem.src, problem.positions)
        assert len(transfer.launches) == 1
        oracle.expected(writes)
        changed = 0
        for got, expected, old in zip(problem.tensors, oracle.tensors, before, strict=True):
            assert difference(got, expected) == (0, 0), (got[got.view(torch.uint8) != expected.view(torch.uint8)], writes) if got.itemsize==1 else 0
            got, expected, old = (t.view(torch.uint8) for t in (got, expected, old))
            changed += int((got != old).sum())
        assert changed or (problem.dst < 0).all()
    return transfer


@pytest.mark.parametrize("case", list(sweep()), ids=str)
def test_sweep(host_compiler: HostCompiler, case: Case) -> None:
    check(host_compiler, case)
