"""Commit without touching the state: accepted tuples wait in a ring and the next verify replays them.

The pool's state stays as it was at the last write-back. Whoever reads a slot outside verify (prefix cache,
transfer, plain decode, flush) first calls `materialise`.
"""

from __future__ import annotations

import ctypes

import torch

from sglang.kernels.ops.gdn_cuda.launch_table import DEFAULT_TILE, VerifyTile
from sglang.kernels.ops.gdn_cuda.module import HEAD_DIM, unavailable_reason
from sglang.kernels.ops.gdn_cuda.verify import VerifyInputs, launch_units, module_for, run_verify

_THREADS = 128
MAX_CELLS = 64


class DeferredCommit:
    """Pending tuples of every scratch row, all layers.

    states [L, S, HV, 128, 128]; u, k [L, R, C, HV, 128] and g [L, R, C, HV] fp32, contiguous, the ring of
    C cells; max_draft_tokens the largest width of a verify, C at least twice that. A row belongs to one
    request for as long as anything is pending in it (stable rows). `ring` [R, 8] int32 holds
    {start, len, track_at, track_dest, and a mask of the cells that ended a commit}.
    """

    def __init__(
        self,
        states: torch.Tensor,
        u: torch.Tensor,
        k: torch.Tensor,
        g: torch.Tensor,
        *,
        max_draft_tokens: int,
    ) -> None:
        if (reason := unavailable_reason()) is not None:
            raise ValueError(f"deferred commit needs the CUDA C++ kernel: {reason}")
        capacity = g.shape[2]
        if capacity > MAX_CELLS:
            raise ValueError(f"a ring of {capacity} cells is longer than {MAX_CELLS}")
        if capacity < 2 * max_draft_tokens:
            raise ValueError(
                f"a ring of {capacity} cells is too short for {max_draft_tokens} draft tokens: "
                f"allocate at least {2 * max_draft_tokens}"
            )
        if states.shape[-2:] != (HEAD_DIM, HEAD_DIM):
            raise ValueError(
                f"states must end in [{HEAD_DIM}, {HEAD_DIM}], got {tuple(states.shape)}"
            )
        for name, tensor in (("u", u), ("k", k), ("g", g)):
            if tensor.dtype != torch.float32 or not tensor.is_contiguous():
                raise ValueError(f"{name} must be contiguous float32, got {tensor.dtype}")
        self.states, self.u, self.k, self.g = states, u, k, g
        self.max_draft_tokens = max_draft_tokens
        self.ring = torch.zeros(g.shape[1], 8, dtype=torch.int32, device=states.device)
        self.ring[:, 2:4] = -1

    def verify(
        self, layer: int, x: VerifyInputs, *, scale: float, tile: VerifyTile | None = None
    ) -> torch.Tensor:
        """Verify one layer: replay what is pending, run the drafts, record their tuples."""
        return run_verify(
            x,
            scale=scale,
            tuples=(self.u[layer], self.k[layer], self.g[layer]),
            ring=self.ring,
            reserve=self.max_draft_tokens,
            tile=tile,
        )

    def commit(
        self,
        rows: torch.Tensor,
        slots: torch.Tensor,
        steps: torch.Tensor,
        track_dests: torch.Tensor | None,
        track_steps: torch.Tensor | None,
        *,
        num_tokens: int,
    ) -> None:
        """Note the accepted step of each row (-1 none) and, if any, where its boundary state goes.

        rows [n] int32; slots, steps, track_* [n] int32 or int64. One small launch for all layers; the boundary
        state is stored by the next verify or `materialise`.
        """
        n = rows.numel()
        if n == 0:
            return
        vectors = [slots, steps]
        if track_dests is not None and track_steps is not None:
            vectors += [track_steps, track_dests]
        mask = sum((t.dtype == torch.int64) << bit for bit, t in enumerate(vectors))
        addresses = [t.data_ptr() for t in (self.ring, rows, *vectors)]
        missing = [None] * (6 - len(addresses))
        arguments: list[ctypes.c_void_p | ctypes.c_int] = [
            *(ctypes.c_void_p(address) for address in (*addresses, *missing)),
            ctypes.c_int(n),
            ctypes.c_int(self.ring.shape[0]),
            ctypes.c_int(num_tokens),
            ctypes.c_int(self.g.shape[2]),
            ctypes.c_int(self.max_draft_tokens),
            ctypes.c_int(mask),
        ]
        module = module_for(self.states, DEFAULT_TILE)
        module.launch("gdn_deferred_commit", -(-n // _THREADS), _THREADS, 0, arguments)

    def materialise(self, rows: torch.Tensor, slots: torch.Tensor) -> None:
        """Write the pending steps of these rows into their slots, boundary states included.

        rows [n] int32, slots [n] int32 or int64. Afterwards nothing is pending in them.
        """
        n = rows.numel()
        if n == 0:
            return
        empty = torch.empty(0, 1, HEAD_DIM, dtype=torch.bfloat16, device=self.states.device)
        gates = torch.empty(0, 1, dtype=torch.bfloat16, device=self.states.device)
        bias = torch.empty(1, dtype=torch.float32, device=self.states.device)
        for layer in range(self.states.shape[0]):
            x = VerifyInputs(
                empty, empty, empty, gates, gates, bias, bias, self.states[layer], slots, rows
            )
            launch_units(
                x,
                empty,
                tile=DEFAULT_TILE,
                num_tokens=0,
                num_k_heads=1,
                num_v_heads=self.states.shape[2],
                scale=1.0,
                snapshots=None,
                tuples=(self.u[layer], self.k[layer], self.g[layer]),
                ring=self.ring,
                reserve=self.max_draft_tokens,
                write_state=False,
                force_flush=True,
            )
        arguments: list[ctypes.c_void_p | ctypes.c_int] = [
            ctypes.c_void_p(self.ring.data_ptr()),
            ctypes.c_void_p(rows.data_ptr()),
            ctypes.c_int(n),
            ctypes.c_int(self.ring.shape[0]),
            ctypes.c_int(self.g.shape[2]),
        ]
        module = module_for(self.states, DEFAULT_TILE)
        module.launch("gdn_deferred_clear", -(-n // _THREADS), _THREADS, 0, arguments)
