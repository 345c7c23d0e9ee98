"""Compile every kernel that advances a state, for every target, without a GPU, and read the machine code.

`python -m sglang.kernels.audit` prints the table. What must be found: on each state element one multiply by
the decay, rounded by itself, feeding one fused multiply-add (docs/numerics.md).
"""
