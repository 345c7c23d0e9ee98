"""What answers and server info say when acceptance is pretended. No torch here."""

from __future__ import annotations

from sglang.srt.environ import envs


def simulated_info() -> dict[str, object]:
    """Fields that mark pretended acceptance; empty when it is real."""
    accept_len = envs.SGLANG_SIMULATE_ACC_LEN.get()
    if accept_len is None or accept_len <= 0:
        return {}
    return {
        "simulated_accept_len": accept_len,
        "simulated_accept_method": envs.SGLANG_SIMULATE_ACC_METHOD.get(),
        "simulated_accept_token_mode": envs.SGLANG_SIMULATE_ACC_TOKEN_MODE.get(),
    }
