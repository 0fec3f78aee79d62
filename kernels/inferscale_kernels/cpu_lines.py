"""Cache-line operations of the CPU writer, as LLVM vector code.

Numba's loops become scalar or gathering code where a matrix is transposed, and every store first
reads the line that it is about to overwrite. These few operations work on whole lines of 64 bytes
in vector registers and store them past the caches; LLVM lowers them for the machine at hand.

Import this module late, as Numba itself (see ``cpu.py``).
"""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

WORDS = 16
"""32-bit words of a line, and the rows and columns of a transposed tile."""

_WORD = ir.IntType(32)
_LINE = ir.VectorType(_WORD, WORDS)


def _load(builder: Any, address: Any) -> Any:
    return builder.load(builder.inttoptr(address, _LINE.as_pointer()), align=2)


def _store(builder: Any, line: Any, address: Any, aligned: bool) -> None:
    """A line that starts where a cache line does is written without reading it first."""
    pointer = builder.inttoptr(address, _LINE.as_pointer())
    store = builder.store(line, pointer, align=64 if aligned else 2)
    if aligned:
        mark = builder.module.add_metadata([ir.Constant(_WORD, 1)])
        store.set_metadata("nontemporal", mark)


def _row(builder: Any, address: Any, stride: Any, row: int) -> Any:
    return builder.add(address, builder.mul(stride, ir.Constant(stride.type, row)))


def _shuffle(builder: Any, a: Any, b: Any, lanes: Sequence[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_WORD, WORDS), list(lanes)))


def copy_line(aligned: bool) -> Callable[[int, int], None]:
    """``copy(from_address, to_address)`` of 64 bytes; ``aligned``: the target is a cache line."""

    @intrinsic
    def copy(context: Any, source: Any, target: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            _store(builder, _load(builder, args[0]), args[1], aligned)
            return context.get_dummy_value()

        return types.void(types.intp, types.intp), generate

    return copy


def transpose_lines(aligned: bool) -> Callable[[int, int, int, int], None]:
    """``transpose(from_address, from_stride, to_address, to_stride)`` of 16 x 16 words.

    Strides are bytes between rows. ``aligned``: every target row is a cache line.
    """
    half = WORDS // 2
    low = [lane for i in range(half) for lane in (i, WORDS + i)]
    upper = [lane + half for lane in low]

    @intrinsic
    def transpose(context: Any, source: Any, stride: Any, target: Any, to_stride: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            rows = [_load(builder, _row(builder, args[0], args[1], r)) for r in range(WORDS)]
            # Four perfect shuffles of the rows move the four bits of a row's number to the
            # column's, and back.
            for _ in range(WORDS.bit_length() - 1):
                rows = [
                    _shuffle(builder, rows[i], rows[i + half], lanes)
                    for i in range(half)
                    for lanes in (low, upper)
                ]
            for r, line in enumerate(rows):
                _store(builder, line, _row(builder, args[2], args[3], r), aligned)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 4), generate

    return transpose


@intrinsic
def prefetch(context: Any, address: Any) -> Any:
    """Ask for the line at an address; any address will do."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], ir.IntType(8).as_pointer())
        of = ir.FunctionType(ir.VoidType(), [pointer.type, _WORD, _WORD, _WORD])
        function = builder.module.declare_intrinsic("llvm.prefetch", [pointer.type], of)
        to_read, keep, data = (ir.Constant(_WORD, value) for value in (0, 3, 1))
        builder.call(function, [pointer, to_read, keep, data])
        return context.get_dummy_value()

    return types.void(types.intp), generate


@intrinsic
def fence(context: Any) -> Any:
    """Make stores past the caches visible before anything that follows."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate
