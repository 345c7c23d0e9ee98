"""Block-scaled FP8: quantising activations, and linear maps of FP8 weights."""
