"""What the launcher accepts, how it shares out the work, and how it stages its indices."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from host_transfer import HostTransfer

from inferscale_kernels.cuda import CudaTransfer
from inferscale_kernels.gpu_check.cases import Case, Problem, make
from inferscale_kernels.pages import LAYER, PagedLayer, UnsupportedKernelError
from inferscale_kernels.program import Program
from inferscale_kernels.staging import Staging


def _transfer(host_compiler, case: Case, multiprocessors: int = 1) -> tuple[Problem, HostTransfer]:
    problem = make(case)
    return problem, HostTransfer(
        host_compiler, problem.arena, problem.layers, problem.codec, problem.scales,
        problem.channels, multiprocessors,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("case", "vector"),
    [
        (Case(), 8),
        (Case(head_dim=128, dtype=torch.float32), 4),
        (Case(head_dim=128, codec="fp8_e4m3", cache_dtype=torch.float8_e4m3fn), 16),
        (Case(head_dim=80, codec="fp8_e4m3", cache_dtype=torch.float8_e4m3fn), 8),
        (Case(head_dim=128, codec="int8"), 8),
        (Case(shift=1), 1),
        (Case(shift=4), 4),
        (Case(padding=2), 2),
        (Case(head_dim=48, rotations=("neox",)), 8),
        (Case(head_dim=48, rotations=("neox", "partial")), 2),
    ],
    ids=str,
)
def test_widest_vector(host_compiler, case: Case, vector: int) -> None:
    assert _transfer(host_compiler, case)[1].program.vector == vector


def test_descriptor_is_the_struct_of_the_source() -> None:
    assert LAYER.itemsize == 64
    assert [LAYER.fields[name][1] for name in LAYER.names] == [0, 8, 16, 24, 32, 40, 48, 52, 56, 60]


@pytest.mark.parametrize(
    ("heads", "num_layers", "num_tokens", "multiprocessors", "layers_per_thread"),
    [(8, 32, 1500, 132, 5), (8, 32, 500, 132, 1), (1, 80, 500, 132, 4), (8, 32, 8000, 132, 8)],
)
def test_layers_are_shared_out_to_fill_the_device(
    host_compiler, heads, num_layers, num_tokens, multiprocessors, layers_per_thread
) -> None:
    """The 8B and 70B-TP8 geometries on an H100: one launch, enough threads."""
    case = Case(
        head_dim=128, num_heads=heads, rotations=("neox",) * num_layers, segments=(1,), skipped=0
    )
    _, transfer = _transfer(host_compiler, case, multiprocessors)
    many = torch.zeros(num_tokens, dtype=torch.int64)
    launch = transfer.plan_write(many.int(), many, many, 1.0)
    assert launch.block[:2] == (8, heads)
    assert np.prod(launch.block) == 128
    assert launch.args[-2] == layers_per_thread
    assert launch.grid[1] == -(-num_layers // layers_per_thread)
    assert launch.grid[0] * launch.block[2] >= num_tokens


def test_a_table_is_copied_once(host_compiler) -> None:
    _, transfer = _transfer(host_compiler, Case(rotations=("neox", "none", "neox")))
    packed = transfer._descriptors.numpy().view(LAYER)
    assert packed["table"][0] == packed["table"][2] != 0
    assert packed["table"][1] == 0


@pytest.mark.parametrize(
    ("name", "index", "value"),
    [
        ("src", 0, 99),
        ("dst", 1, 10**6),
        ("dst", 1, -2),
        ("positions", 2, 700),
        ("positions", 2, -1),
    ],
)
def test_indices_out_of_range(host_compiler, name: str, index: int, value: int) -> None:
    problem, transfer = _transfer(host_compiler, Case())
    arrays = {n: getattr(problem, n).copy() for n in ("src", "dst", "positions")}
    arrays[name][0] = value
    with pytest.raises(IndexError, match=name):
        transfer.write(*arrays.values())
    with pytest.raises(IndexError, match=f"{value}"):
        transfer.read(arrays["dst"], arrays["src"], arrays["positions"])
    assert transfer.launches == []


def test_arrays_of_different_lengths(host_compiler) -> None:
    problem, transfer = _transfer(host_compiler, Case())
    with pytest.raises(IndexError, match="one of each a token"):
        transfer.write(problem.src[1:], problem.dst, problem.positions)


def _with(problem: Problem, **changes) -> list[PagedLayer]:
    return [replace(problem.layers[0], **changes), *problem.layers[1:]]


def test_refusals(host_compiler) -> None:
    problem = make(Case())
    k, v, table = (getattr(problem.layers[0], n) for n in ("keys", "values", "cos_sin"))
    for match, layers in {
        "no layers": [],
        "float64": _with(problem, keys=k.double()),
        "uint8": _with(problem, keys=k.to(torch.uint8)),
        r"expected\s+\[num_blocks": _with(problem, keys=k[:, :5]),
        "strides": _with(problem, values=v.contiguous()),
        "another dtype": _with(problem, values=v.half()),
        "rotary table": _with(problem, cos_sin=table[:, :63]),
        "scales": _with(problem, k_scale=0.0),
    }.items():
        with pytest.raises(UnsupportedKernelError, match=match):
            HostTransfer(host_compiler, problem.arena, layers)
    for match, arguments in {
        "arena": (problem.arena[:, :, :, :, ::2], "auto"),
        "needs scales": (problem.arena.to(torch.int8), "int8"),
        "takes no scales": (problem.arena, "auto", torch.ones(1)),
        "contiguous": (problem.arena.to(torch.int8), "int8", torch.ones(1)),
        "codec 'zip'": (problem.arena, "zip"),
        "float64": (problem.arena.double(), "auto"),
    }.items():
        with pytest.raises(UnsupportedKernelError, match=match):
            HostTransfer(host_compiler, arguments[0], problem.layers, *arguments[1:])
    with pytest.raises(UnsupportedKernelError, match="expected a CUDA device"):
        CudaTransfer(problem.arena, problem.layers)
    with pytest.raises(UnsupportedKernelError, match="even number"):
        Program("auto", torch.bfloat16, torch.bfloat16, 514, 1)


def test_program_text_stands_alone() -> None:
    """CuPy's cache is keyed by the text: nothing may be left behind an include."""
    text = Program("auto", torch.bfloat16, torch.bfloat16, 128, 8).text()
    assert "#include" not in text
    assert text.count("struct alignas(16) Layer") == text.count("struct BFloat16") == 1


class _Event:
    def __init__(self) -> None:
        self.passed, self.recorded = True, 0

    def record(self) -> None:
        self.recorded += 1
        self.passed = False

    def query(self) -> bool:
        return self.passed


def test_a_buffer_under_way_is_left_alone() -> None:
    events: list[_Event] = []

    def make_event() -> _Event:
        events.append(_Event())
        return events[-1]

    staging, seen = Staging(torch.device("cpu"), make_event), []
    for value in range(3):
        arrays = np.full(5, value, np.int64), np.full(5, -value, np.int32)
        staging.run(arrays, seen.append)
    # None has passed: three buffers, each with its own numbers still.
    assert len(staging) == 3
    for value, (first, second) in enumerate(seen):
        assert first.dtype == torch.int64
        assert first.tolist() == [value] * 5
        assert second.dtype == torch.int32
        assert second.tolist() == [-value] * 5
    assert [e.recorded for e in events] == [1, 1, 1]

    events[1].passed = True
    staging.run((np.arange(5),), seen.append)
    assert len(staging) == 3
    assert [e.recorded for e in events] == [1, 2, 1]
    assert seen[3][0].data_ptr() == seen[1][0].data_ptr()
    # Idle buffers that have become too small are dropped, those under way are not.
    events[0].passed = True
    staging.run((np.arange(50_000),), seen.append)
    assert len(staging) == 3
    assert seen[4][0].tolist() == list(range(50_000))
