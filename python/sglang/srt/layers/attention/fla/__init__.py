"""The former place of `sglang.kernels.ops.attention.fla`: importing a module here gives that module object."""

from sglang.kernels.module_alias import alias_package

alias_package(__name__, "sglang.kernels.ops.attention.fla")
