"""Block drafters of the DFLASH family: a small Qwen3-shaped transformer over target features.

A block of query rows ``[bonus, MASK, ...]`` attends to context keys and values that are computed from
the target's residual streams alone, and to itself. Embedding and head are the target's.
Source of the format: docs/design/drafters.md.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from sglang.kernels.ops.cpu import gemm
from sglang.srt.configs.draft_config import SLIDING_ATTENTION, DraftConfig
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.block_step import BlockLayerParts, BlockParts, BlockStep
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import PANEL_ROWS, Linear, plain_linear
from sglang.srt.layers.mlp import DenseMLP
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.rotary_embedding import RotaryEmbedding
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_loader.checkpoint_files import SafetensorsFile, tensor_files
from sglang.srt.model_loader.weight_slots import WeightSlots
from sglang.srt.models.dflash_conv import GroupedDynamicConv
from sglang.srt.models.hybrid_gdn import HybridGDNForCausalLM, max_position

MASK_EMBEDDING_FILE = "mask_embedding.pt"

StoreKV = Callable[[int, Tensor, Tensor], None]


class BlockDraftAttention(nn.Module):
    """Qwen3 attention without gate. ``qkv_proj`` holds q, then k, then v rows; context rows use the
    latter two alone."""

    def __init__(
        self,
        config: DraftConfig,
        *,
        layer_id: int,
        rotary: RotaryEmbedding,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        head_dim, eps = config.head_dim, config.rms_norm_eps
        self.attn = RadixAttention(
            layer_id=layer_id,
            kv_layer=layer_id,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=head_dim,
            scaling=head_dim**-0.5,
            is_causal=bool(config.is_causal),
            sliding_window=(
                config.sliding_window if config.layer_types[layer_id] == SLIDING_ATTENTION else 0
            ),
        )
        self.q_rows = config.num_attention_heads * head_dim
        self.kv_rows = config.num_key_value_heads * head_dim
        size, bias = config.hidden_size, config.attention_bias
        rows = self.q_rows + 2 * self.kv_rows
        self.qkv_proj = Linear(size, rows, device=device, dtype=dtype, bias=bias)
        self.o_proj = Linear(self.q_rows, size, device=device, dtype=dtype, bias=bias)
        self.q_norm = RMSNorm(head_dim, eps, unit_offset=False, device=device)
        self.k_norm = RMSNorm(head_dim, eps, unit_offset=False, device=device)
        self.rotary = rotary

    @property
    def can_pack(self) -> bool:
        """Whether packing leaves the k and v rows addressable by themselves."""
        return self.q_rows % PANEL_ROWS == 0

    def context_keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Context rows x [T, H] -> rotated keys and values, [T, Nkv, d] each."""
        qkv, num_rows = self.qkv_proj, 2 * self.kv_rows
        if qkv.packed:
            kv = gemm.packed_linear(x, qkv.storage[self.q_rows :], num_rows)
        else:
            kv = plain_linear(x, qkv.weight[self.q_rows :])
        if qkv.bias is not None:
            kv = kv + qkv.bias[self.q_rows :].to(kv.dtype)
        return self._heads(*kv.split(self.kv_rows, dim=-1), positions)

    def _heads(self, k: Tensor, v: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        shape = (k.shape[0], self.attn.num_kv_heads, self.attn.head_dim)
        return self.rotary.rotate(self.k_norm(k.reshape(shape)), positions), v.reshape(shape)

    def forward(self, x: Tensor, fb: ForwardBatch, backend: AttentionBackend) -> Tensor:
        """Block rows [T, H] -> [T, H]; their keys and values go to ``fb.out_cache_loc``."""
        num_rows = x.shape[0]
        q, k, v = self.qkv_proj(x).split((self.q_rows, self.kv_rows, self.kv_rows), dim=-1)
        q = q.reshape(num_rows, self.attn.num_heads, self.attn.head_dim)
        q = self.rotary.rotate(self.q_norm(q), fb.positions)
        k, v = self._heads(k, v, fb.positions)
        return self.o_proj(backend.forward(q, k, v, self.attn, fb).reshape(num_rows, -1))


class BlockDraftLayer(nn.Module):
    """Pre-norm block; DFlash2 wraps both sub-layers in convolutions over the block."""

    def __init__(
        self,
        config: DraftConfig,
        *,
        layer_id: int,
        rotary: RotaryEmbedding,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps, unit_offset=False, device=device)
        self.post_attention_layernorm = RMSNorm(size, eps, unit_offset=False, device=device)
        self.self_attn = BlockDraftAttention(
            config, layer_id=layer_id, rotary=rotary, device=device, dtype=dtype
        )
        self.mlp = DenseMLP(size, config.intermediate_size, device=device, dtype=dtype)
        self.attention_conv: GroupedDynamicConv | None = None
        self.mlp_conv: GroupedDynamicConv | None = None
        if config.conv_kernel_size > 0:
            self.attention_conv = GroupedDynamicConv(config, device=device, dtype=dtype)
            self.mlp_conv = GroupedDynamicConv(config, device=device, dtype=dtype)

    def forward(self, x: Tensor, fb: ForwardBatch, backend: AttentionBackend, block: int) -> Tensor:
        """Residual stream of whole blocks, [R * block, H] in and out."""
        normed = self.input_layernorm(x)
        if self.attention_conv is None or self.mlp_conv is None:
            x = x + self.self_attn(normed, fb, backend)
            return x + self.mlp(self.post_attention_layernorm(x))
        kernels = self.attention_conv.kernels(normed)
        inner = self.attention_conv.convolve(0, normed, kernels, block)
        attended = self.self_attn(inner, fb, backend)
        x = x + self.attention_conv.convolve(1, attended, kernels, block)
        normed = self.post_attention_layernorm(x)
        kernels = self.mlp_conv.kernels(normed)
        inner = self.mlp_conv.convolve(0, normed, kernels, block)
        return x + self.mlp_conv.convolve(1, self.mlp(inner), kernels, block)


class DFlashDraftModel(nn.Module):
    """The backbone of DFLASH, DFlash2 and DSPARK; heads of the latter two are added by subclasses.

    Raises:
        ValueError: the checkpoint does not fit the target, or asks for something not supported.
    """

    skipped_prefixes = ("lm_head.", "embed_tokens.", "model.lm_head.", "model.embed_tokens.")

    def __init__(
        self,
        config: DraftConfig,
        *,
        target: HybridGDNForCausalLM,
        mask_token_id: int,
        device: torch.device,
        dtype: torch.dtype,
        attn_backend: AttentionBackend,
    ) -> None:
        super().__init__()
        check_draft_config(config, target, mask_token_id)
        self.config = config
        self._target = (target,)  # in a tuple, so that its weights are not registered as ours
        self.attn_backend = attn_backend
        self.mask_token_id = mask_token_id
        self.target_layer_ids = config.resolved_target_layer_ids(target.config.num_hidden_layers)
        size, eps = config.hidden_size, config.rms_norm_eps
        num_features = len(self.target_layer_ids) * target.config.hidden_size
        self.fc = Linear(num_features, size, device=device, dtype=dtype)
        self.hidden_norm = RMSNorm(size, eps, unit_offset=False, device=device)
        self.norm = RMSNorm(size, eps, unit_offset=False, device=device)
        self.rotary = RotaryEmbedding(config.rope, device=device)
        self.layers = nn.ModuleList(
            BlockDraftLayer(config, layer_id=i, rotary=self.rotary, device=device, dtype=dtype)
            for i in range(config.num_hidden_layers)
        )
        self.block_step: BlockStep | None = None
        self.mask_embedding = _read_mask_embedding(config, device, target.activation_dtype)

    @cached_property
    def checkpoint_names(self) -> frozenset[str]:
        """Tensor names of the checkpoint; read when weights are, because random ones need no files."""
        return checkpoint_names(self.config.model_path)

    @property
    def prefix(self) -> str:
        return "model." if "model.fc.weight" in self.checkpoint_names else ""

    def write_context(
        self, taps: Tensor, positions: Tensor, store: StoreKV, *, end_position: int
    ) -> None:
        """Compute context keys and values of committed tokens and hand them to ``store``.

        taps [T, F * H_target]; positions [T]; ``store(layer, k, v)`` with k, v [T, Nkv, d];
        ``end_position`` is above every position.
        """
        self.rotary.reserve(end_position)
        features = self.hidden_norm(self.fc(taps))
        for i, layer in enumerate(self.layers):
            store(i, *layer.self_attn.context_keys_values(features, positions))

    def forward_block(self, fb: ForwardBatch) -> Tensor:
        """Run blocks of equal length; returns the final-norm rows [R, block, H]."""
        block = fb.query_lens_cpu[0]
        self.rotary.reserve(max_position(fb) + 1)
        x = self._target[0].embed_tokens(fb.input_ids)
        if self.mask_embedding is not None:
            is_mask = (fb.input_ids == self.mask_token_id).unsqueeze(-1)
            x = torch.where(is_mask, self.mask_embedding, x)
        for layer in self.layers:
            x = layer(x, fb, self.attn_backend, block)
        return self.norm(x).view(fb.batch_size, block, -1)

    def draft_rows(self, fb: ForwardBatch, *, skip: int) -> tuple[Tensor, Tensor]:
        """Run blocks; final-norm rows [R, n, H] and the head's logits [R, n, vocab] fp32 of all but
        the first ``skip`` rows of each block, scaled and capped as the config says."""
        block = fb.query_lens_cpu[0]
        if self.block_step is not None and self.block_step.covers(fb):
            self.rotary.reserve(max_position(fb) + 1)
            first = torch.arange(fb.batch_size).unsqueeze(1) * block
            wanted = (first + torch.arange(skip, block)).flatten()
            hidden, logits = self.block_step.run(fb, wanted)
        else:
            hidden = self.forward_block(fb)[:, skip:].reshape(-1, self.config.hidden_size)
            logits = self._target[0].compute_logits(hidden)
        if self.config.output_multiplier != 1.0:
            logits = logits * self.config.output_multiplier
        cap = self.config.final_logit_softcapping
        if cap > 0:
            logits = cap * torch.tanh(logits / cap)
        shape = (fb.batch_size, block - skip, -1)
        return hidden.view(shape), logits.view(shape)

    def weight_slots(self) -> WeightSlots:
        """Where each checkpoint tensor goes, under the prefix that the checkpoint uses."""
        slots, prefix = WeightSlots(), self.prefix
        slots.add(f"{prefix}fc.weight", self.fc.weight)
        slots.add(f"{prefix}hidden_norm.weight", self.hidden_norm.weight)
        slots.add(f"{prefix}norm.weight", self.norm.weight)
        for i, layer in enumerate(self.layers):
            _layer_slots(slots, f"{prefix}layers.{i}.", layer)
        return slots

    def finish_loading(self) -> None:
        """Called once by the loader: pack the matrices where the platform has kernels for it."""
        pack_linears(self)
        plain = self.config.conv_kernel_size == 0 and self.mask_embedding is None
        if plain and isinstance(self.attn_backend, TorchNativeAttnBackend):
            self.block_step = BlockStep.create(self._block_parts(self.attn_backend))

    def _block_parts(self, backend: TorchNativeAttnBackend) -> BlockParts:
        target, config, pool = self._target[0], self.config, backend.token_to_kv_pool
        layers = [
            BlockLayerParts(
                input_norm=layer.input_layernorm,
                post_norm=layer.post_attention_layernorm,
                q_norm=layer.self_attn.q_norm,
                k_norm=layer.self_attn.k_norm,
                qkv=layer.self_attn.qkv_proj,
                out=layer.self_attn.o_proj,
                gate_up=layer.mlp.gate_up,
                down=layer.mlp.down,
                keys=pool.k_buffer[i],
                values=pool.v_buffer[i],
                sliding_window=layer.self_attn.attn.sliding_window,
            )
            for i, layer in enumerate(self.layers)
        ]
        return BlockParts(
            layers=layers,
            final_norm=self.norm,
            rotary=self.rotary,
            embedding=target.embed_tokens.table,
            lm_head=target.lm_head,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            is_causal=bool(config.is_causal),
            req_to_token=backend.req_to_token_pool.req_to_token,
        )


def checkpoint_names(directory: str) -> frozenset[str]:
    """Every tensor name of a checkpoint directory."""
    names: set[str] = set()
    for path in tensor_files(directory):
        with SafetensorsFile(path) as file:
            names.update(file.names)
    return frozenset(names)


def check_draft_config(
    config: DraftConfig, target: HybridGDNForCausalLM, mask_token_id: int
) -> None:
    """Raise ValueError unless the drafter fits this target and uses known parts only."""
    own, other = config.hidden_size, target.config.hidden_size
    vocab = target.config.vocab_size
    layers, expected = target.config.num_hidden_layers, config.num_target_layers
    rules = (
        (own == other, f"hidden_size={own} must equal the target's {other}: the head is shared"),
        (
            config.vocab_size == vocab,
            f"vocab_size={config.vocab_size} must equal the target's {vocab}",
        ),
        (
            expected in (0, layers),
            f"num_target_layers={expected}, but the target has {layers}; use the drafter's own target",
        ),
        (0 <= mask_token_id < vocab, f"mask_token_id={mask_token_id} is outside 0..{vocab - 1}"),
        (not config.attention_sink_bias, "attention_sink_bias=true is not supported"),
        (
            config.attention_value_scale == 1.0,
            f"attention_value_scale={config.attention_value_scale} is not supported; only 1.0 is",
        ),
    )
    broken = [why for holds, why in rules if not holds]
    if broken:
        raise ValueError(f"draft checkpoint {config.model_path!r}: " + "; ".join(broken))


def pack_linears(model: nn.Module) -> None:
    """Pack every linear map of ``model`` that the compiled CPU kernels can take."""
    kept = {
        module.qkv_proj
        for module in model.modules()
        if isinstance(module, BlockDraftAttention) and not module.can_pack
    }
    for module in model.modules():
        if isinstance(module, Linear) and module not in kept and gemm.can_pack(module.storage):
            module.pack()


def _layer_slots(slots: WeightSlots, prefix: str, layer: BlockDraftLayer) -> None:
    slots.add(f"{prefix}input_layernorm.weight", layer.input_layernorm.weight)
    slots.add(f"{prefix}post_attention_layernorm.weight", layer.post_attention_layernorm.weight)
    attention, mlp = layer.self_attn, layer.mlp
    own = f"{prefix}self_attn."
    rows = (attention.q_rows, attention.kv_rows, attention.kv_rows)
    names = ("q_proj", "k_proj", "v_proj")
    for name, weight in zip(names, attention.qkv_proj.weight.split(rows), strict=True):
        slots.add(f"{own}{name}.weight", weight)
    slots.add(f"{own}o_proj.weight", attention.o_proj.weight)
    slots.add(f"{own}q_norm.weight", attention.q_norm.weight)
    slots.add(f"{own}k_norm.weight", attention.k_norm.weight)
    if attention.qkv_proj.bias is not None and attention.o_proj.bias is not None:
        for name, bias in zip(names, attention.qkv_proj.bias.split(rows), strict=True):
            slots.add(f"{own}{name}.bias", bias)
        slots.add(f"{own}o_proj.bias", attention.o_proj.bias)
    gate, up = mlp.gate_up.weight.split(mlp.intermediate_size)
    slots.add(f"{prefix}mlp.gate_proj.weight", gate)
    slots.add(f"{prefix}mlp.up_proj.weight", up)
    slots.add(f"{prefix}mlp.down_proj.weight", mlp.down.weight)
    for name, conv in (("attention_conv", layer.attention_conv), ("mlp_conv", layer.mlp_conv)):
        if conv is not None:
            slots.add(f"{prefix}{name}.base_kernel", conv.base_kernel)
            slots.add(f"{prefix}{name}.kernel_projection.weight", conv.kernel_projection.weight)


def _read_mask_embedding(
    config: DraftConfig, device: torch.device, dtype: torch.dtype
) -> Tensor | None:
    """[H] that replaces the target's embedding of the mask token, if the checkpoint brings one."""
    file = Path(config.model_path) / MASK_EMBEDDING_FILE
    if not file.is_file():
        return None
    row = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(row, Tensor) or row.numel() != config.hidden_size:
        raise ValueError(f"{file} must hold one tensor of {config.hidden_size} values")
    return row.reshape(-1).to(device=device, dtype=dtype)
