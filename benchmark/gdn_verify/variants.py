"""What the benchmark times: each variant gives a verify and a commit over all layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from cases import DIM, Case

from sglang.kernels.ops.attention.fla.fused_sigmoid_gating_recurrent import (
    fused_sigmoid_gating_delta_rule_update,
)
from sglang.kernels.ops.gdn_cuda.deferred import DeferredCommit
from sglang.kernels.ops.gdn_cuda.launch_table import VerifyTile
from sglang.kernels.ops.gdn_cuda.verify import VerifyInputs, run_verify
from sglang.kernels.ops.mamba.mamba_state_scatter_triton import (
    fused_conv_window_scatter_multi,
)
from sglang.kernels.ops.mamba.tuple_replay import commit_tuples

SCALE = DIM**-0.5


def cuda_inputs(case: Case, layer: int) -> VerifyInputs:
    q, k, v = case.qkv(layer)
    a, b = case.gates[layer].chunk(2, dim=-1)
    return VerifyInputs(
        q,
        k,
        v,
        a,
        b,
        case.A_log[layer],
        case.dt_bias[layer],
        case.states[layer],
        case.slots,
        case.rows,
    )


@dataclass
class Variant:
    """Buffers of one way to verify and commit. `out` keeps the last verify's outputs, one a layer."""

    case: Case
    use_cuda: bool
    tile: VerifyTile | None = None

    def __post_init__(self) -> None:
        self.out: list[torch.Tensor] = []

    def run_layer(self, layer: int, **record: object) -> torch.Tensor:
        case = self.case
        if self.use_cuda:
            return run_verify(cuda_inputs(case, layer), scale=SCALE, tile=self.tile, **record)
        q, k, v = (t.unsqueeze(0) for t in case.qkv(layer))
        a, b = case.gates[layer].chunk(2, dim=-1)
        tuples = record.get("tuples") or (None, None, None)
        out = fused_sigmoid_gating_delta_rule_update(
            A_log=case.A_log[layer],
            a=a,
            dt_bias=case.dt_bias[layer],
            softplus_beta=1.0,
            softplus_threshold=20.0,
            q=q,
            k=k,
            v=v,
            b=b,
            initial_state_source=case.states[layer],
            initial_state_indices=case.slots,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=case.cu_seqlens,
            disable_state_update=True,
            intermediate_states_buffer=record.get("snapshots"),
            intermediate_state_indices=case.rows,
            cache_steps=case.d,
            u_states_buffer=tuples[0],
            k_states_buffer=tuples[1],
            g_states_buffer=tuples[2],
        )
        return out[0]


class Snapshots(Variant):
    """Record every state, commit by copying."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.buffer = self.case.make_snapshots()

    def verify(self) -> None:
        layers = range(self.case.layers)
        self.out = [self.run_layer(i, snapshots=self.buffer[i]) for i in layers]

    def commit(self) -> None:
        case = self.case
        pair = (case.states.flatten(2), self.buffer.flatten(3))
        fused_conv_window_scatter_multi(
            [pair], case.slots, case.steps, case.track_dests, case.track_steps
        )


class Tuples(Variant):
    """Record update tuples, commit by replay of all layers in one launch."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.u, self.k, self.g = self.case.make_tuples(self.case.d)

    def verify(self) -> None:
        self.out = [
            self.run_layer(i, tuples=(self.u[i], self.k[i], self.g[i]))
            for i in range(self.case.layers)
        ]

    def commit(self) -> None:
        case = self.case
        commit_tuples(
            case.states,
            self.u,
            self.k,
            self.g,
            case.rows,
            case.slots,
            case.steps,
            case.track_dests,
            case.track_steps,
        )


class Deferred(Variant):
    """Record update tuples in a ring; the next verify replays them; write back when the ring is full."""

    def __post_init__(self) -> None:
        super().__post_init__()
        case = self.case
        tuples = case.make_tuples(case.capacity)
        self.owner = DeferredCommit(case.states, *tuples, max_draft_tokens=case.d)

    def verify(self) -> None:
        layers = range(self.case.layers)
        self.out = [
            self.owner.verify(i, cuda_inputs(self.case, i), scale=SCALE, tile=self.tile)
            for i in layers
        ]

    def commit(self) -> None:
        case = self.case
        self.owner.commit(
            case.rows,
            case.slots,
            case.steps,
            case.track_dests,
            case.track_steps,
            num_tokens=case.d,
        )
