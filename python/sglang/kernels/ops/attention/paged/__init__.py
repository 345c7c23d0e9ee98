"""Attention over the paged KV pool for prompts, decode and verify, in Triton."""
