"""Device tensors and their owners. ``sglang.srt.mem_cache.memory_pool`` is this package.

``_is_cpu`` and ``_is_npu`` are read whenever a pool is built, so that a test can set them.
"""

from sglang.srt.mem_cache.pool.kv_pool import HybridLinearKVPool, MHATokenToKVPool
from sglang.srt.mem_cache.pool.mamba_pool import MambaPool
from sglang.srt.mem_cache.pool.req_pool import HybridReqToTokenPool, ReqToTokenPool
from sglang.srt.mem_cache.pool.scratch_rules import (
    check_linear_lossless_verify,
    conv_window_dedup_enabled,
    get_tensor_size_bytes,
    spec_intermediate_bytes_per_req,
)
from sglang.srt.utils import is_cpu, is_npu

_is_cpu = is_cpu()
_is_npu = is_npu()

__all__ = [
    "HybridLinearKVPool",
    "HybridReqToTokenPool",
    "MHATokenToKVPool",
    "MambaPool",
    "ReqToTokenPool",
    "check_linear_lossless_verify",
    "conv_window_dedup_enabled",
    "get_tensor_size_bytes",
    "spec_intermediate_bytes_per_req",
]
