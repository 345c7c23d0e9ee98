"""Paged KV tensors of full-attention layers. The target and the draft share slot ids."""

from __future__ import annotations

import torch

from sglang.kernels import triton_support
from sglang.kernels.ops.attention.paged.store import store_kv
from sglang.srt.mem_cache.integrity import IntegrityError
from sglang.srt.mem_cache.tensor_lists import kv_tensor_specs

_BYTE_STORED = (torch.float8_e4m3fn, torch.float8_e5m2)


class MHATokenToKVPool:
    """Owner of K and V of ``layer_num`` attention layers.

    Shapes: ``k_buffer[i]``, ``v_buffer[i]`` are ``[size + page_size, head_num, head_dim]`` of
    ``dtype``; slots ``0 .. page_size - 1`` are the padding page, where discarded rows may be written.
    ``layer_id`` counts the layers of this pool (attention ordinals), not those of the model.
    """

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        head_num: int,
        head_dim: int,
        layer_num: int,
        device: str | torch.device,
    ) -> None:
        self.size = size
        self.page_size = page_size
        self.dtype = dtype
        self.head_num = head_num
        self.head_dim = head_dim
        self.layer_num = layer_num
        self.device = device
        self.store_dtype = torch.uint8 if dtype in _BYTE_STORED else dtype
        self.specs = kv_tensor_specs(
            size=size,
            page_size=page_size,
            dtype=str(dtype).removeprefix("torch."),
            head_num=head_num,
            head_dim=head_dim,
            layer_num=layer_num,
        )
        buffers = [
            torch.zeros(spec.shape, dtype=self.store_dtype, device=device) for spec in self.specs
        ]
        self._k_store, self._v_store = buffers[:layer_num], buffers[layer_num:]
        self.k_buffer = [buffer.view(dtype) for buffer in self._k_store]
        self.v_buffer = [buffer.view(dtype) for buffer in self._v_store]

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """K of one layer: ``[size + page_size, head_num, head_dim]``."""
        return self.k_buffer[layer_id]

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """V of one layer: ``[size + page_size, head_num, head_dim]``."""
        return self.v_buffer[layer_id]

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one layer."""
        return self.k_buffer[layer_id], self.v_buffer[layer_id]

    def set_kv_buffer(
        self, layer_id: int, loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Write rows ``k``, ``v`` ``[T, head_num, head_dim]`` into slots ``loc [T]``.

        Values are cast to the pool's dtype. A negative slot discards its row: the kernel writes nothing,
        PyTorch on the CPU writes to the padding page, which nobody reads.
        """
        if triton_support.runs_on(k):
            store_kv(k, v, loc, self.k_buffer[layer_id], self.v_buffer[layer_id])
            return
        loc = loc.clamp_min(0)
        self._k_store[layer_id][loc] = self._stored(k)
        self._v_store[layer_id][loc] = self._stored(v)

    def move_slots(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        """Copy every layer's rows ``src [n]`` to slots ``dst [n]``; the sets may overlap."""
        for buffer in (*self._k_store, *self._v_store):
            buffer[dst] = buffer[src]

    def get_cpu_copy(self, slots: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Per layer, host copies of K and V of ``slots [n]``: ``[n, head_num, head_dim]`` each."""
        return [
            (k[slots].cpu(), v[slots].cpu())
            for k, v in zip(self._k_store, self._v_store, strict=True)
        ]

    def load_cpu_copy(
        self, copy: list[tuple[torch.Tensor, torch.Tensor]], slots: torch.Tensor
    ) -> None:
        """Write what ``get_cpu_copy`` returned into ``slots [n]``."""
        for layer, (k, v) in enumerate(copy):
            self._k_store[layer][slots] = k.to(self.device)
            self._v_store[layer][slots] = v.to(self.device)

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor under the name it has in the memory plan."""
        stored = (*self._k_store, *self._v_store)
        return {spec.name: tensor for spec, tensor in zip(self.specs, stored, strict=True)}

    def get_kv_size_bytes(self) -> int:
        """Bytes of K and V together."""
        return sum(spec.nbytes for spec in self.specs)

    def check_integrity(self) -> None:
        """Raise IntegrityError when a buffer no longer has the shape it was built with."""
        for spec, tensor in zip(self.specs, (*self.k_buffer, *self.v_buffer), strict=True):
            if tuple(tensor.shape) != spec.shape:
                raise IntegrityError(f"{spec.name} is {tuple(tensor.shape)}, built as {spec.shape}")

    def _stored(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.to(self.dtype).view(self.store_dtype)


class HybridLinearKVPool:
    """KV of a hybrid model addressed by the model's own layer ids.

    ``full_attention_layer_ids`` lists which layers have KV; the others raise ValueError.
    """

    def __init__(
        self,
        *,
        size: int,
        dtype: torch.dtype,
        page_size: int,
        head_num: int,
        head_dim: int,
        full_attention_layer_ids: list[int],
        device: str | torch.device,
        enable_memory_saver: bool = False,
        mamba_pool: object | None = None,
    ) -> None:
        if enable_memory_saver:
            raise ValueError("--enable-memory-saver is not available: drop the flag")
        self.full_attention_layer_id_mapping = {
            layer: ordinal for ordinal, layer in enumerate(full_attention_layer_ids)
        }
        self.mamba_pool = mamba_pool
        self.full_kv_pool = MHATokenToKVPool(
            size, page_size, dtype, head_num, head_dim, len(full_attention_layer_ids), device
        )

    def _transfer_full_attention_id(self, layer_id: int) -> int:
        if layer_id not in self.full_attention_layer_id_mapping:
            raise ValueError(
                f"layer_id={layer_id} not in full attention layers: "
                f"{list(self.full_attention_layer_id_mapping)}"
            )
        return self.full_attention_layer_id_mapping[layer_id]

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of model layer ``layer_id``."""
        return self.full_kv_pool.get_kv_buffer(self._transfer_full_attention_id(layer_id))

    def set_kv_buffer(
        self, layer_id: int, loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Write rows of model layer ``layer_id``; see ``MHATokenToKVPool.set_kv_buffer``."""
        self.full_kv_pool.set_kv_buffer(self._transfer_full_attention_id(layer_id), loc, k, v)

    def check_integrity(self) -> None:
        """See ``MHATokenToKVPool.check_integrity``."""
        self.full_kv_pool.check_integrity()
