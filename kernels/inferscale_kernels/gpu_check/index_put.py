"""The same work without the kernel: what one would write in PyTorch.

All layers are rotated at once; only the stores need a call for each layer's keys and values,
since each layer's cache is a tensor of its own.
"""

from inferscale_kernels.codecs import CODECS
from inferscale_kernels.gpu_check.workload import Geometry, Step, Workload
from inferscale_kernels.reference import rotate


def index_put(workload: Workload, step: Step) -> None:
    """Write the arena slots of ``step`` to its paged slots, keys rotated."""
    src, dst = step.src.long(), step.dst
    # [num_layers, num_tokens, 2, num_kv_heads, head_dim]
    both = workload.arena[:, src]
    keys, values = both[:, :, 0], both[:, :, 1]
    if workload.scales is not None:
        scales, decode = workload.scales[:, src], CODECS[workload.codec].decode
        keys, values = decode(keys, scales[:, :, 0]), decode(values, scales[:, :, 1])
    table = workload.layers[0].cos_sin
    assert table is not None
    keys = rotate(keys, table[step.positions], is_neox=True)
    dtype, block_size = workload.layers[0].keys.dtype, workload.layers[0].block_size
    keys, values = keys.to(dtype), values.to(dtype)
    at = (dst // block_size, dst % block_size)
    for index, layer in enumerate(workload.layers):
        layer.keys.index_put_(at, keys[index])
        layer.values.index_put_(at, values[index])


def peak_bytes(geometry: Geometry, num_tokens: int) -> int:
    """Memory that :func:`index_put` takes at most: eight float32 tensors of the keys' size."""
    return 32 * num_tokens * geometry.num_layers * geometry.num_heads * geometry.head_dim
