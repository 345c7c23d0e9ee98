"""Mixture of experts: routing, ordering by expert, grouped GEMM, ordered sum."""
