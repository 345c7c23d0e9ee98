"""Load generation and measuring for `sglang.bench_serving` and `sglang.bench_one_batch`."""
