"""ctypes mirrors of the structs in csrc; ``check_sizes`` compares them with the compiled ones.

Strides are counted in elements. Field meanings are documented with the C definitions.
"""

from __future__ import annotations

import ctypes

from torch import Tensor

from sglang.kernels.ops.cpu.library import declare

_PTR, _INT, _I32, _F32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


def _fields(kind: type, names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names.split()]


class LinearArgs(ctypes.Structure):
    _fields_ = _fields(_PTR, "weight bias") + _fields(_INT, "rows cols is_bf16")


class GdnShapeArgs(ctypes.Structure):
    _fields_ = _fields(_INT, "HK HV K V W")


class GdnStateArgs(ctypes.Structure):
    _fields_ = [
        ("conv", _PTR),
        *_fields(_INT, "conv_slot conv_dim conv_col"),
        ("ssm", _PTR),
        *_fields(_INT, "ssm_slot num_slots conv_bf16 ssm_bf16"),
        ("window", _PTR),
        *_fields(_INT, "window_row window_step window_dim window_col"),
        ("snapshot", _PTR),
        *_fields(_INT, "snapshot_row snapshot_step"),
        *_fields(_PTR, "u k g"),
        *_fields(_INT, "u_row u_step k_row k_step g_row g_step"),
    ]


class GdnWeightsArgs(ctypes.Structure):
    _fields_ = _fields(_PTR, "conv A_log dt_bias")


class GdnRowsArgs(ctypes.Structure):
    _fields_ = [
        ("x", _PTR),
        ("ldx", _INT),
        *_fields(_PTR, "a b"),
        ("ld_ab", _INT),
        ("out", _PTR),
        *_fields(_INT, "mode num_requests"),
        *_fields(_PTR, "starts slots scratch_rows track_slots track_rows parents"),
    ]


class ReplayArgs(ctypes.Structure):
    _fields_ = [
        ("ssm", _PTR),
        *_fields(_INT, "ssm_bf16 ssm_layer ssm_slot ssm_head"),
        *_fields(_PTR, "u k g"),
        *_fields(_INT, "u_layer u_row u_step u_head k_layer k_row k_step k_head"),
        *_fields(_INT, "g_layer g_row g_step g_head L S R D HV V K n"),
        *_fields(_PTR, "cache_rows slots steps dests"),
    ]


class KvArgs(ctypes.Structure):
    _fields_ = _fields(_PTR, "k v") + _fields(_INT, "slot_stride num_slots is_bf16")


class AttentionShapeArgs(ctypes.Structure):
    _fields_ = _fields(_INT, "heads kv_heads head_dim") + _fields(_F32, "scale")


class LayerArgs(ctypes.Structure):
    _fields_ = [
        *_fields(_INT, "kind num_experts"),
        *_fields(_PTR, "input_norm post_norm"),
        *_fields(LinearArgs, "in_proj out_proj gate_up down"),
        *_fields(_PTR, "q_norm k_norm"),
        ("kv", KvArgs),
        ("gdn", GdnWeightsArgs),
        ("gdn_norm", _PTR),
        ("state", GdnStateArgs),
        *_fields(LinearArgs, "router shared_gate_up shared_down shared_gate"),
        *_fields(_INT, "expert_gate_up_elements expert_down_elements top_k norm_topk"),
    ]


class ModelArgs(ctypes.Structure):
    _fields_ = [
        *_fields(_INT, "hidden num_layers vocab"),
        ("attention", AttentionShapeArgs),
        *_fields(_INT, "rotary_half has_gate"),
        ("gdn", GdnShapeArgs),
        ("gate_is_sigmoid", _INT),
        ("eps", _F32),
        ("embed_packed", _I32),
        *_fields(LinearArgs, "embed lm_head"),
        *_fields(_PTR, "final_norm cos sin req_to_token"),
        ("req_stride", _INT),
        ("layers", ctypes.POINTER(LayerArgs)),
        ("is_mtp", _INT),
        ("fc", LinearArgs),
        *_fields(_PTR, "norm_embedding norm_hidden"),
    ]


class BatchArgs(ctypes.Structure):
    _fields_ = [
        *_fields(_INT, "num_rows num_requests num_logits gdn_mode"),
        *_fields(_PTR, "input_ids positions req_rows starts out_slots state_slots scratch_rows"),
        *_fields(_PTR, "track_slots track_rows logits_rows spec_hidden logits hidden_all"),
        *_fields(_PTR, "hidden_wanted taps"),
        ("num_taps", _INT),
        *_fields(_PTR, "tap_layers last_seen row_slots"),
        ("row_slots_stride", _INT),
        ("parents", _PTR),
    ]


_ORDER = (
    LinearArgs,
    GdnShapeArgs,
    GdnStateArgs,
    GdnWeightsArgs,
    GdnRowsArgs,
    ReplayArgs,
    KvArgs,
    LayerArgs,
    ModelArgs,
    BatchArgs,
)


@declare
def check_sizes(lib: ctypes.CDLL) -> None:
    """Compare every mirror with the compiled struct.

    Raises:
        RuntimeError: a size differs.
    """
    sizes = (ctypes.c_int64 * len(_ORDER))()
    lib.sgl_struct_sizes.argtypes = (ctypes.c_void_p,)
    lib.sgl_struct_sizes.restype = None
    lib.sgl_struct_sizes(ctypes.addressof(sizes))
    for mirror, size in zip(_ORDER, sizes):
        if ctypes.sizeof(mirror) != size:
            raise RuntimeError(
                f"{mirror.__name__} has {ctypes.sizeof(mirror)} bytes, the kernels' has {size}"
            )


def pointer(tensor: Tensor | None) -> int | None:
    """Address of a tensor's first element; None stays a null pointer."""
    return None if tensor is None else tensor.data_ptr()
