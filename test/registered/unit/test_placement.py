"""Which part of the host each replica gets."""

from __future__ import annotations

import pytest

from sglang.srt.entrypoints.placement import place
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="unit")

CPU = {"device": "cpu", "cpu_threads": 8, "device_memory_gb": None, "base_gpu_id": 1, "tp_size": 1}
GPU = {**CPU, "device": "cuda", "base_gpu_id": 0}


def gpus(args, replica, count):
    own, environment = place(args, replica, count)
    assert own["base_gpu_id"] == 0  # the first of those it sees
    return environment.get("CUDA_VISIBLE_DEVICES")


def test_cpu_replicas_share_the_host():
    """Catches replicas that each plan with all memory, or a launcher's GPU number on a CPU."""
    own, environment = place(CPU, 0, 1)
    assert own == {**CPU, "base_gpu_id": 0} and environment == {}
    first, second = (place(CPU, at, 2)[0] for at in range(2))
    assert first["cpu_threads"] == second["cpu_threads"] == 4
    alone = place(CPU, 0, 2)[0]["device_memory_gb"]
    assert place(CPU, 0, 4)[0]["device_memory_gb"] == pytest.approx(alone / 2, rel=0.1)
    assert place({**CPU, "device_memory_gb": 3.0}, 1, 2)[0]["device_memory_gb"] == 3.0
    assert place(CPU, 0, 100)[0]["cpu_threads"] == 1


def test_each_replica_has_gpus_of_its_own(monkeypatch):
    """Catches two replicas on one GPU, and GPUs that this process may not use."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpus(GPU, 0, 1) is None
    assert [gpus(GPU, at, 2) for at in range(2)] == ["0", "1"]
    assert gpus({**GPU, "base_gpu_id": 3}, 0, 1) == "3"
    assert [gpus({**GPU, "tp_size": 2}, at, 2) for at in range(2)] == ["0,1", "2,3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-7")
    assert [gpus(GPU, at, 2) for at in range(2)] == ["5", "GPU-7"]
    assert gpus(GPU, 2, 3) == "-1"


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
