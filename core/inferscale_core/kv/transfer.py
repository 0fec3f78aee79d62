"""Moving KV between the arena and the paged cache, with the rotation on the way."""

import logging
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from inferscale_core.kv.arena import Arena, as_index
from inferscale_core.kv.layout import (
    PagedLayout,
    StridedPage,
    engine_write,
    flat_storage,
    learn_layout,
)
from inferscale_core.kv.rotary import RotaryTable
from inferscale_kernels.cpu import PackedScatter
from inferscale_kernels.pages import PagedLayer
from inferscale_kernels.reference import rotate, unrotate

if TYPE_CHECKING:
    from inferscale_kernels.cuda import CudaTransfer

logger = logging.getLogger(__name__)


_MAX_WRITER_CPUS = 8


def _writer_cpus() -> list[int]:
    """CPUs for the writer: those of the parent process.

    vLLM binds a worker to the cores of its OpenMP threads and keeps one for the other processes,
    which have nothing to do while the worker writes.
    """
    try:
        cpus = os.sched_getaffinity(os.getppid())
    except OSError:
        cpus = os.sched_getaffinity(0)
    return sorted(cpus)[:_MAX_WRITER_CPUS]


class PagedTransfer:
    """Both directions for one worker.

    On a GPU the kernels do both, in one launch each. On a CPU the fused writer injects. What
    neither serves goes through the engine's own op: correct for every layout, and slower.

    Args:
        layers: the engine's attention layers, in the arena's layer order.
        caches: their paged caches.
        tables: their rotary tables (None where a layer does not rotate).
        arena: the worker's arena.

    """

    def __init__(
        self,
        layers: list[Any],
        caches: list[torch.Tensor],
        tables: list[RotaryTable | None],
        arena: Arena,
    ):
        geometry = arena.geometry
        self._layers, self._caches, self._arena = layers, caches, arena
        self._device = caches[0].device
        self._tables = [t and RotaryTable(t.cos_sin.to(self._device), t.is_neox) for t in tables]
        self.layout: PagedLayout = learn_layout(
            layers[0], caches[0], geometry.block_size, geometry.num_kv_heads, geometry.head_dim
        )
        self._flat = [flat_storage(cache) for cache in caches]
        self._reader: CudaTransfer | None = None
        self._writer: CudaTransfer | PackedScatter | None = None
        if self._device.type == "cuda":
            self._reader = self._writer = self._make_cuda()
        elif self._device.type == "cpu":
            self._writer = self._make_packed()
        if self._writer is None:
            logger.info("writing the paged cache through the engine's own op")

    def _make_packed(self) -> PackedScatter | None:
        page = self.layout.packed_page()
        if page is None or self._arena.geometry.dtype != torch.bfloat16:
            return None
        return PackedScatter(
            self._arena.data,
            self._arena.scales,
            self._flat,
            page,
            [t.cos_sin if t else None for t in self._tables],
            [t.is_neox if t else True for t in self._tables],
            cpus=_writer_cpus(),
        )

    def _make_cuda(self) -> "CudaTransfer | None":
        page = self.layout.strided_page()
        if page is None:
            return None
        try:
            # Imported late: a CPU installation has no CuPy.
            from inferscale_kernels.cuda import CudaTransfer

            paged = paged_layers(page, self.layout, self._caches, self._tables)
            codec = self._arena.geometry.codec.name
            return CudaTransfer(self._arena.data, paged, codec, self._arena.scales)
        except (ImportError, ValueError) as error:
            logger.warning("the GPU kernels cannot be used: %s", error)
            return None

    def inject(self, src: np.ndarray, dst: np.ndarray, positions: np.ndarray) -> None:
        """Write arena slots ``src`` to paged slots ``dst``, keys rotated to ``positions``.

        All are ``[num_tokens]`` (int32, int64, int64). A failing fused writer is given up for
        good in favour of the engine's own op: the text must come out right either way.
        """
        if self._writer is not None:
            try:
                self._writer.write(src, dst, positions)
                return
            except Exception:
                logger.exception("the fused writer failed; using the engine's own op from now on")
                self._writer = None
        self.inject_through_engine(src, dst, positions)

    def inject_through_engine(
        self, src: np.ndarray, dst: np.ndarray, positions: np.ndarray
    ) -> None:
        """The reference way: rotate in PyTorch, pack with the engine's own op."""
        slots, paged, where = (as_index(x).to(self._device) for x in (src, dst, positions))
        for index, (layer, cache) in enumerate(zip(self._layers, self._caches, strict=True)):
            keys, values = self._arena.load(index, slots)
            table = self._tables[index]
            if table is not None:
                keys = rotate(keys, table.cos_sin[where], table.is_neox)
            keys, values = keys.to(cache.dtype).contiguous(), values.to(cache.dtype)
            engine_write(layer, cache, keys, values, paged)

    def capture(self, paged: np.ndarray, slots: np.ndarray, positions: np.ndarray) -> None:
        """Read paged slots into arena ``slots``, keys un-rotated from ``positions``."""
        if self._reader is not None:
            try:
                self._reader.read(paged, slots, positions)
                return
            except Exception:
                logger.exception("the reading kernel failed; using PyTorch from now on")
                self._reader = None
        from_, to, where = (as_index(x).to(self._device) for x in (paged, slots, positions))
        k_at = self.layout.element_index(from_, of_keys=True)
        v_at = self.layout.element_index(from_, of_keys=False)
        for index, flat in enumerate(self._flat):
            keys, values = flat[k_at], flat[v_at]
            table = self._tables[index]
            if table is not None:
                keys = unrotate(keys, table.cos_sin[where], table.is_neox)
            self._arena.store(index, to, keys, values)


def paged_layers(
    page: StridedPage,
    layout: PagedLayout,
    caches: list[torch.Tensor],
    tables: list[RotaryTable | None],
) -> list[PagedLayer]:
    """The layers' caches as ``[block, slot, head, dim]`` views of keys and of values."""
    views = []
    for cache, table in zip(caches, tables, strict=True):
        shape = (cache.shape[0], page.block_size, layout.num_kv_heads, layout.head_dim)
        strides = (page.block_stride, page.slot_stride, page.head_stride, 1)
        keys, values = (
            cache.as_strided(shape, strides, cache.storage_offset() + base)
            for base in (page.k_base, page.v_base)
        )
        cos_sin = table.cos_sin if table else None
        views.append(PagedLayer(keys, values, cos_sin, table.is_neox if table else True))
    return views
