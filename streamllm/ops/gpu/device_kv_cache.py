"""The paged KV cache on a device: one allocation for all layers."""

from __future__ import annotations

import torch
from torch import Tensor

from streamllm.errors import ConfigError, ModelLoadError
from streamllm.ops.gpu.kernels import GpuKernels, PagedCache

KV_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
}


def device_kv_bytes_per_block(
    layers_per_block: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: str
) -> int:
    """Bytes that one block takes: keys and values of ``layers_per_block`` layers.

    Raises:
        ConfigError: an unknown dtype.
    """
    if dtype not in KV_DTYPES:
        raise ConfigError(f"kv_cache_dtype on a GPU must be one of {', '.join(KV_DTYPES)}, got {dtype!r}.")
    return layers_per_block * 2 * num_kv_heads * block_size * _position_bytes(dtype, head_dim)


def _position_bytes(dtype: str, head_dim: int) -> int:
    """Of one head's key: in int8 with its float32 scale."""
    return head_dim * KV_DTYPES[dtype].itemsize + (torch.float32.itemsize if dtype == "int8" else 0)


class DeviceKVCache:
    """Keys and values of ``num_blocks`` blocks, zeroed.

    Attributes:
        planes: ``[layers_per_block, 2 (key, value), num_blocks, num_kv_heads, elements]``: a head's
            ``block_size * head_dim`` elements, in int8 and the bytes of their scales. Plane ``p`` serves the
            ``p``-th layer of every KV group, whose blocks are different ones.
    """

    def __init__(
        self,
        kernels: GpuKernels,
        *,
        layers_per_block: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        kv_cache_dtype: str,
        device: torch.device,
    ):
        self.num_bytes = num_blocks * device_kv_bytes_per_block(
            layers_per_block, num_kv_heads, head_dim, block_size, kv_cache_dtype
        )
        if num_blocks < 1:
            raise ConfigError(f"the KV cache needs at least one block, got {num_blocks}.")
        self._kernels = kernels
        self.dtype_name = kv_cache_dtype
        self.num_blocks = num_blocks
        self.block_size = block_size
        dtype = KV_DTYPES[kv_cache_dtype]
        head_elements = block_size * _position_bytes(kv_cache_dtype, head_dim) // dtype.itemsize
        shape = (layers_per_block, 2, num_blocks, num_kv_heads, head_elements)
        try:
            self.planes = torch.zeros(shape, dtype=dtype, device=device)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            raise ModelLoadError(
                f"Not enough memory on {device} for a KV cache of {self.num_bytes / 2**30:.2f} GiB; lower "
                "--gpu-memory-utilization, or ask for fewer blocks."
            ) from error
        if kv_cache_dtype == "int8":
            self._layers = [PagedCache.of_int8(keys, values, head_dim) for keys, values in self.planes]
        else:
            planes = self.planes.unflatten(-1, (block_size, head_dim))
            self._layers = [PagedCache(keys, values) for keys, values in planes]
        self._bytes = self.planes.view(torch.uint8).view(2 * layers_per_block, num_blocks, -1)

    def layer(self, place: int) -> PagedCache:
        """K and V of the layers that plane ``place`` serves."""
        return self._layers[place]

    def copy_blocks(self, pairs: Tensor) -> None:
        """Copies blocks in every plane: ``pairs``, int32 ``[n, 2]`` on the device, of (source, destination),
        none of which writes what another of them touches."""
        self._kernels.copy_blocks(self._bytes, self._bytes, pairs)
