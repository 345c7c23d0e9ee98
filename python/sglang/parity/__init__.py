"""Prove on your own machine that two ways of serving a model give identical outputs.

``sglang parity`` starts servers, or attaches to running ones, runs three workloads twice on each, and
compares token ids and, between servers of this engine, digests of the recurrent state.
"""
