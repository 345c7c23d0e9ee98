"""Another name for `sglang.kernels.ops.attention.fla`: importing a module here gives the same module object.

Tests and callers that replace a function on either module therefore see one and the same module.
"""

from sglang.kernels.module_alias import alias_package

alias_package(__name__, "sglang.kernels.ops.attention.fla")
