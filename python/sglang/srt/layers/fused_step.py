"""Whole-model compiled step on the CPU: modules and pools described once, one call per forward."""

from __future__ import annotations

import ctypes
from typing import Protocol

import torch
from torch import Tensor, nn

from sglang.kernels.ops.cpu import forward, gdn, gemm
from sglang.kernels.ops.cpu.structs import (
    AttentionShapeArgs,
    BatchArgs,
    GdnShapeArgs,
    KvArgs,
    LayerArgs,
    LinearArgs,
    ModelArgs,
    pointer,
)
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.linear.cpu_gdn_backend import CpuGDNBackend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.attention.tree_attention import tree_row_slots
from sglang.srt.layers.decoder_layer import DecoderLayer
from sglang.srt.layers.gated_attention import GatedAttention
from sglang.srt.layers.gated_delta_net import GatedDeltaNet
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import Linear
from sglang.srt.layers.logits_processor import VocabEmbedding
from sglang.srt.layers.moe import Experts, SparseMoE
from sglang.srt.layers.rotary_embedding import RotaryEmbedding
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    LogitsOutput,
)

_FULL_ATTENTION, _GDN = 0, 1


class StepModel(Protocol):
    """What a model must have for its forward pass to be compiled."""

    config: ModelConfig
    attn_backend: AttentionBackend
    embed_tokens: VocabEmbedding
    lm_head: Linear
    layers: nn.ModuleList
    norm: RMSNorm
    rotary: RotaryEmbedding


class DraftBlock(Protocol):
    """The part before the layers of an MTP model."""

    fc: Linear
    pre_fc_norm_embedding: RMSNorm
    pre_fc_norm_hidden: RMSNorm


class FusedStep:
    """Runs ``model`` in one kernel call. Results equal the module path's up to rounding.

    The weights are packed in place on construction. Addresses of weights and pools are read once
    and must stay; rotary tables are re-read because they grow.
    """

    def __init__(self, model: StepModel, draft: DraftBlock | None) -> None:
        self._model = model
        self._full, self._linear = split_backend(model.attn_backend)
        self._keep: list[Tensor] = []
        for module in (model, *(() if draft is None else (draft.fc,))):
            _pack(module)
        self._layers = (LayerArgs * len(model.layers))()
        for args, layer in zip(self._layers, model.layers):
            self._describe_layer(args, layer)
        self._args = self._describe_model(model, draft)

    @staticmethod
    def create(model: StepModel, draft: DraftBlock | None = None) -> FusedStep | None:
        """The compiled step, or None where the module path has to do."""
        return FusedStep(model, draft) if covers(model) else None

    def run(self, fb: ForwardBatch) -> LogitsOutput:
        """One forward pass; the model has reserved rotary positions before."""
        model, args = self._model, self._args
        args.cos, args.sin = model.rotary.cos.data_ptr(), model.rotary.sin.data_ptr()
        num_rows, size = fb.num_rows, model.config.hidden_size
        wanted = num_rows if fb.logits_rows is None else fb.logits_rows.shape[0]
        logits = torch.empty((wanted, model.config.vocab_size))
        hidden_wanted = torch.empty((wanted, size))
        everything = fb.capture_hidden is CaptureHiddenMode.FULL
        hidden_all = torch.empty((num_rows, size)) if everything else None
        num_taps = len(fb.capture_layer_ids)
        taps = torch.empty((num_rows, num_taps * size)) if num_taps else None
        batch = BatchArgs(
            num_rows=num_rows,
            num_requests=fb.batch_size,
            num_logits=wanted,
            gdn_mode=gdn.MODE_VERIFY if fb.forward_mode.is_target_verify() else gdn.MODE_ADVANCE,
            input_ids=fb.input_ids.data_ptr(),
            positions=fb.positions.data_ptr(),
            req_rows=fb.req_pool_indices.data_ptr(),
            starts=fb.query_start_loc.data_ptr(),
            out_slots=fb.out_cache_loc.data_ptr(),
            logits_rows=pointer(fb.logits_rows),
            logits=logits.data_ptr(),
            hidden_all=pointer(hidden_all),
            hidden_wanted=hidden_wanted.data_ptr(),
            taps=pointer(taps),
            num_taps=num_taps,
        )
        keep = self._add_optional(batch, fb)
        forward.run(args, batch)
        del keep
        captured = {
            CaptureHiddenMode.NULL: None,
            CaptureHiddenMode.LAST: hidden_wanted,
            CaptureHiddenMode.FULL: hidden_all,
        }[fb.capture_hidden]
        return LogitsOutput(scores=logits, hidden=captured, taps=taps)

    def _add_optional(self, batch: BatchArgs, fb: ForwardBatch) -> list[object]:
        """Fill the fields that only some calls have; returns what must outlive the call."""
        keep: list[object] = []
        if self._linear is not None:
            metadata = self._linear.current()
            batch.state_slots = metadata.mamba_cache_indices.data_ptr()
            batch.scratch_rows = metadata.scratch_rows.data_ptr()
            if fb.mamba_track_indices is not None and fb.mamba_track_rows is not None:
                batch.track_slots = fb.mamba_track_indices.data_ptr()
                batch.track_rows = fb.mamba_track_rows.data_ptr()
        if fb.tree_mask is not None:
            keep += self._add_tree(batch, fb, fb.tree_mask)
        if fb.spec_hidden is not None:
            hidden = fb.spec_hidden.float().contiguous()
            batch.spec_hidden = hidden.data_ptr()
            keep.append(hidden)
        if fb.capture_layer_ids:
            taps = (ctypes.c_int64 * len(fb.capture_layer_ids))(*fb.capture_layer_ids)
            batch.tap_layers = ctypes.addressof(taps)
            keep.append(taps)
        return keep

    def _add_tree(self, batch: BatchArgs, fb: ForwardBatch, mask: Tensor) -> list[object]:
        """Each row's own list of slots (its request's prefix, its ancestors) and its parent."""
        rows = tree_row_slots(fb, mask, self._full.req_to_token_pool.req_to_token)
        batch.row_slots, batch.row_slots_stride = rows.slots.data_ptr(), rows.slots.stride(0)
        batch.last_seen = rows.last_seen.data_ptr()
        keep: list[object] = [rows]
        if fb.tree_parents is not None and self._linear is not None:
            self._linear.require_snapshots()
            parents = fb.tree_parents.contiguous()
            batch.parents = parents.data_ptr()
            keep.append(parents)
        return keep

    def _describe_model(self, model: StepModel, draft: DraftBlock | None) -> ModelArgs:
        config = model.config
        table = model.embed_tokens.table
        req_to_token = self._full.req_to_token_pool.req_to_token
        args = ModelArgs(
            hidden=config.hidden_size,
            num_layers=len(model.layers),
            vocab=config.vocab_size,
            attention=AttentionShapeArgs(
                heads=config.num_attention_heads,
                kv_heads=config.num_key_value_heads,
                head_dim=config.head_dim,
                scale=config.head_dim**-0.5,
            ),
            rotary_half=config.rope.rotary_dim // 2,
            has_gate=config.attn_output_gate,
            gdn=gdn_shape(config),
            gate_is_sigmoid=config.output_gate_type == "sigmoid",
            eps=config.rms_norm_eps,
            embed_packed=table.packed,
            embed=linear_args(table),
            lm_head=linear_args(model.lm_head),
            final_norm=self._fp32(model.norm.weight),
            req_to_token=req_to_token.data_ptr(),
            req_stride=req_to_token.stride(0),
            layers=self._layers,
        )
        if draft is not None:
            args.is_mtp = True
            args.fc = linear_args(draft.fc)
            args.norm_embedding = self._fp32(draft.pre_fc_norm_embedding.weight)
            args.norm_hidden = self._fp32(draft.pre_fc_norm_hidden.weight)
        return args

    def _describe_layer(self, args: LayerArgs, layer: DecoderLayer) -> None:
        args.input_norm = self._fp32(layer.input_layernorm.weight)
        args.post_norm = self._fp32(layer.post_attention_layernorm.weight)
        if isinstance(layer.mixer, GatedAttention):
            self._describe_attention(args, layer.mixer)
        else:
            self._describe_gdn(args, layer.mixer)
        if isinstance(layer.mlp, SparseMoE):
            self._describe_moe(args, layer.mlp)
        else:
            args.gate_up = linear_args(layer.mlp.gate_up)
            args.down = linear_args(layer.mlp.down)

    def _describe_attention(self, args: LayerArgs, mixer: GatedAttention) -> None:
        args.kind = _FULL_ATTENTION
        args.in_proj, args.out_proj = linear_args(mixer.qkv_proj), linear_args(mixer.o_proj)
        args.q_norm, args.k_norm = self._fp32(mixer.q_norm.weight), self._fp32(mixer.k_norm.weight)
        pool = self._full.token_to_kv_pool
        keys, values = (pool.k_buffer[mixer.attn.kv_layer], pool.v_buffer[mixer.attn.kv_layer])
        args.kv = KvArgs(
            k=keys.data_ptr(),
            v=values.data_ptr(),
            slot_stride=keys.stride(0),
            num_slots=keys.shape[0],
            is_bf16=keys.dtype == torch.bfloat16,
        )

    def _describe_gdn(self, args: LayerArgs, mixer: GatedDeltaNet) -> None:
        args.kind = _GDN
        args.in_proj, args.out_proj = linear_args(mixer.in_proj), linear_args(mixer.out_proj)
        taps = mixer.attn.conv_weights.t().float().contiguous()
        self._keep.append(taps)
        args.gdn.conv = taps.data_ptr()
        args.gdn.A_log = self._fp32(mixer.attn.A_log)
        args.gdn.dt_bias = self._fp32(mixer.attn.dt_bias)
        args.gdn_norm = self._fp32(mixer.norm.weight)
        args.state = self._linear.native_state(mixer.attn.layer_id)

    def _describe_moe(self, args: LayerArgs, moe: SparseMoE) -> None:
        experts: Experts = moe.experts
        args.num_experts = experts.gate_up.shape[0]
        args.top_k, args.norm_topk = moe.top_k, moe.norm_topk_prob
        args.router = linear_args(moe.gate)
        args.gate_up = _matrix_args(experts.gate_up_storage[0], 2 * experts.intermediate_size)
        args.down = _matrix_args(experts.down_storage[0], experts.hidden_size)
        args.expert_gate_up_elements = experts.gate_up_storage.stride(0)
        args.expert_down_elements = experts.down_storage.stride(0)
        args.shared_gate_up = linear_args(moe.shared_expert.gate_up)
        args.shared_down = linear_args(moe.shared_expert.down)
        args.shared_gate = linear_args(moe.shared_expert_gate)

    def _fp32(self, weight: Tensor) -> int:
        """Address of an fp32 copy that lives as long as this object (the tensor itself if fp32)."""
        kept = weight.detach().float().contiguous()
        self._keep.append(kept)
        return kept.data_ptr()


def split_backend(
    backend: AttentionBackend,
) -> tuple[TorchNativeAttnBackend | None, CpuGDNBackend | None]:
    """(full, linear) parts of a CPU backend; None for a part that is not the CPU's own."""
    if isinstance(backend, TorchNativeAttnBackend):
        return backend, None
    full, linear = backend.full_attn_backend, backend.linear_attn_backend
    return (
        full if isinstance(full, TorchNativeAttnBackend) else None,
        linear if isinstance(linear, CpuGDNBackend) else None,
    )


def covers(model: StepModel) -> bool:
    """Whether kernels, geometry, dtypes and backends allow the compiled step."""
    config, weight = model.config, model.lm_head.weight
    if not gemm.can_pack(weight):
        return False
    full, linear = split_backend(model.attn_backend)
    if full is None or (config.linear_layer_ids and linear is None):
        return False
    group = config.num_attention_heads // config.num_key_value_heads
    dtypes = {x.dtype for x in full.token_to_kv_pool.k_buffer}
    return (
        config.head_dim % gdn.LANES == 0
        and config.head_dim <= forward.MAX_HEAD_DIM
        and group <= forward.MAX_GROUP
        and dtypes <= set(gdn.STATE_DTYPES)
        and (not config.linear_layer_ids or gdn.covers(config.linear_key_head_dim))
    )


def gdn_shape(config: ModelConfig) -> GdnShapeArgs:
    return GdnShapeArgs(
        HK=config.linear_num_key_heads,
        HV=config.linear_num_value_heads,
        K=config.linear_key_head_dim,
        V=config.linear_value_head_dim,
        W=config.linear_conv_kernel_dim,
    )


def linear_args(linear: Linear) -> LinearArgs:
    args = _matrix_args(linear.storage, linear.out_features)
    args.bias = pointer(linear.bias)
    return args


def _matrix_args(storage: Tensor, rows: int) -> LinearArgs:
    return LinearArgs(
        weight=storage.data_ptr(),
        rows=rows,
        cols=storage.shape[1],
        is_bf16=storage.dtype == torch.bfloat16,
    )


def _pack(model: StepModel | Linear) -> None:
    """Pack every weight that is multiplied; an untied embedding is only looked up and stays."""
    lookup_only = None
    if not isinstance(model, Linear) and model.embed_tokens.table is not model.lm_head:
        lookup_only = model.embed_tokens.table
    for module in model.modules():
        if isinstance(module, (Linear, Experts)) and module is not lookup_only:
            module.pack()
