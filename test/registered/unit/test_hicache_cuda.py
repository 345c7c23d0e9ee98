"""The host tier with asynchronous copies on a GPU: the same traffic and the same checks.

Catches: device pages reused before they were copied, host rows read before they arrived.
"""

import dataclasses

import pytest
import torch

from sglang.test.ci.ci_register import register_amd_ci, register_cuda_ci
from sglang.test.memory_rig import MemoryRig, RandomTraffic, RigConfig

register_cuda_ci(est_time=60, stage="base-b", runner_config="1-gpu-large")
register_amd_ci(est_time=60, suite="stage-b-test-1-gpu-large-amd")
register_amd_ci(est_time=60, suite="stage-b-test-1-gpu-small-amd-mi35x")

SMALL = RigConfig(num_tokens=160, max_context_len=120, num_states=5, host_ratio=8.0, device="cuda")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("policy", ["write_through", "write_back"])
@pytest.mark.parametrize("ratio", [0.6, 8.0])
def test_random_traffic(policy, ratio):
    config = dataclasses.replace(SMALL, write_policy=policy, host_ratio=ratio)
    traffic = RandomTraffic(MemoryRig(config), seed=5, longest_prompt=80)
    traffic.run(300)
    assert traffic.rig.host.loads_ct > 3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_files_behind_the_host_tier(tmp_path):
    config = dataclasses.replace(SMALL, host_ratio=0.6, storage_dir=tmp_path)
    traffic = RandomTraffic(MemoryRig(config), seed=6, longest_prompt=80)
    for _ in range(300):
        traffic._one()
        traffic.rig.check()
    traffic.rig.host.wait()
    assert list(tmp_path.rglob("*.row"))
    traffic.drain()
    traffic.rig.host.close()


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
