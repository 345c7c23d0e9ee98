"""Tiers behind the prefix tree: host memory and files."""
