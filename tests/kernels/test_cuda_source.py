"""The CUDA source, compiled for the host, against the PyTorch reference: bit for bit."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from host_transfer import HostCompiler, HostTransfer
from hypothesis import given, settings
from hypothesis import strategies as st

from inferscale_kernels.gpu_check.cases import ORDERS, ROTATIONS, Case, make, sweep


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
            transfer.write(problem.src, problem.dst, problem.positions, key_scale=problem.key_scale)
        else:
            transfer.read(problem.dst, problem.src, problem.positions)
        assert len(transfer.launches) == 1
        oracle.expected(writes)
        changed = 0
        for got, expected, old in zip(problem.tensors, oracle.tensors, before, strict=True):
            got, expected, old = (t.view(torch.uint8) for t in (got, expected, old))
            assert torch.equal(got, expected)
            changed += int((got != old).sum())
        assert changed or (problem.dst < 0).all()
    return transfer


@pytest.mark.parametrize("case", list(sweep()), ids=str)
def test_sweep(host_compiler: HostCompiler, case: Case) -> None:
    check(host_compiler, case)


@settings(max_examples=60, deadline=None)
@given(
    # Few programs: each is compiled.
    program=st.sampled_from([
        (64, torch.bfloat16, "auto", None),
        (128, torch.bfloat16, "fp8_e4m3", None),
        (80, torch.bfloat16, "int8", torch.float8_e4m3fn),
        (64, torch.float32, "auto", None),
    ]),
    layout=st.fixed_dictionaries({
        "num_heads": st.integers(1, 17),
        "order": st.sampled_from(ORDERS),
        "block_size": st.integers(1, 130),
        "padding": st.sampled_from([0, 16, 48]),
        "rotations": st.lists(st.sampled_from(ROTATIONS), min_size=1, max_size=11).map(tuple),
        "segments": st.lists(st.integers(1, 20), max_size=5).map(tuple),
        "skipped": st.integers(0, 4),
        "channels": st.booleans(),
        "key_scale": st.sampled_from([1.0, 0.5, 1.3]),
        "cache_scales": st.sampled_from([(1.0, 1.0), (0.02, 3.0)]),
        "seed": st.integers(0, 1000),
    }),
    multiprocessors=st.sampled_from([1, 132]),
)  # fmt: skip
def test_any_shape(host_compiler: HostCompiler, program, layout, multiprocessors: int) -> None:
    head_dim, dtype, codec, cache_dtype = program
    case = Case(head_dim=head_dim, dtype=dtype, codec=codec, cache_dtype=cache_dtype, **layout)
    if not case.segments:
        case = replace(case, segments=(1,), skipped=1)
    check(host_compiler, case, multiprocessors)


@pytest.mark.parametrize("writes", [True, False])
def test_all_tokens_skipped(host_compiler: HostCompiler, writes: bool) -> None:
    """What a warm-up and a graph's padding launch: nothing is read, nothing written."""
    problem = make(Case())
    before = [t.clone() for t in problem.tensors]
    transfer = HostTransfer(host_compiler, problem.arena, problem.layers)
    none = np.full(70, -1)
    (transfer.write if writes else transfer.read)(none, none, np.zeros(70, np.int64))
    assert len(transfer.launches) == 1
    assert all(torch.equal(a, b) for a, b in zip(problem.tensors, before, strict=True))


def test_no_tokens_no_launch(host_compiler: HostCompiler) -> None:
    problem = make(Case())
    transfer = HostTransfer(host_compiler, problem.arena, problem.layers)
    empty = np.zeros(0, np.int64)
    transfer.write(empty, empty, empty)
    transfer.read(empty, empty, empty)
    assert transfer.launches == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_every_code_is_converted(host_compiler: HostCompiler, dtype: torch.dtype) -> None:
    """All codes of a cache dtype: widened as torch widens them, and rounded back to themselves."""
    bits = {1: torch.uint8, 2: torch.int16}[dtype.itemsize]
    codes = torch.arange(2 ** (8 * dtype.itemsize)).to(bits).view(dtype)
    codes = codes.float().nan_to_num(nan=1.0).to(dtype)
    num_tokens = len(codes) // 64
    case = Case(
        num_heads=1, dtype=torch.float32, cache_dtype=dtype, rotations=("none",),
        segments=(num_tokens,), skipped=0,
    )  # fmt: skip
    problem = make(case)
    transfer = HostTransfer(host_compiler, problem.arena, problem.layers)
    layer, slots = problem.layers[0], torch.from_numpy(problem.dst)
    at = (slots // layer.block_size, slots % layer.block_size)
    raw = layer.keys.view(bits)
    raw[at] = codes.view(bits).view(num_tokens, 1, 64)
    transfer.read(problem.dst, problem.src, problem.positions)
    found = problem.arena[0, problem.src.astype(np.int64), 0].flatten()
    assert torch.equal(found, codes.float())
    raw[at] = 0
    transfer.write(problem.src, problem.dst, problem.positions)
    assert torch.equal(raw[at].flatten(), codes.view(bits))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_rounding_is_torch_rounding(host_compiler: HostCompiler, dtype: torch.dtype) -> None:
    """Numbers on, just above and just below the middle between two neighbours, beyond the range,
    infinite and NaN."""
    bits = {1: torch.uint8, 2: torch.int16}[dtype.itemsize]
    codes = torch.arange(2 ** (8 * dtype.itemsize - 1)).to(bits).view(dtype).float()
    codes = codes[codes.isfinite()]
    middle = (codes[:-1].double() + codes[1:].double()).float() / 2
    x = torch.cat((middle, middle.nextafter(torch.tensor(torch.inf)), middle.nextafter(-codes[:1])))
    x = torch.cat((x, -x, torch.tensor([1e38, -1e38, torch.inf, -torch.inf, torch.nan])))
    num_tokens = -(-len(x) // 128)
    x = torch.nn.functional.pad(x, (0, num_tokens * 128 - len(x)))
    case = Case(
        num_heads=1, dtype=torch.float32, cache_dtype=dtype, rotations=("none",),
        segments=(num_tokens,), skipped=0,
    )  # fmt: skip
    problem, oracle = make(case), make(case)
    for p in (problem, oracle):
        p.arena[0, p.src.astype(np.int64)] = x.view(num_tokens, 2, 1, 64)
    HostTransfer(host_compiler, problem.arena, problem.layers).write(
        problem.src, problem.dst, problem.positions
    )
    oracle.expected(writes=True)
    torch.testing.assert_close(
        problem.storages[0].float(), oracle.storages[0].float(), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("codec", ["fp8_e4m3", "int8"])
def test_a_head_of_zeros_has_scale_one(host_compiler: HostCompiler, codec: str) -> None:
    problem = make(Case(codec=codec))
    for storage in problem.storages:
        storage.zero_()
    transfer = HostTransfer(
        host_compiler, problem.arena, problem.layers, codec, problem.scales, None
    )
    transfer.read(problem.dst, problem.src, problem.positions)
    at = torch.from_numpy(problem.src[problem.dst >= 0]).long()
    assert (problem.scales[:, at] == 1).all()
    assert (problem.arena[:, at].float() == 0).all()
