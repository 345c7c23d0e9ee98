"""Size of a prefill chunk of the gated delta rule."""

CHUNK_SIZE = 64
