"""Arguments about prefill and decode on different servers."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.arg_groups.flag import flag


@dataclass
class DisaggregationFields:
    """Which half of the work this server does and how state travels."""

    disaggregation_mode: str = flag(
        "null",
        "null serves whole requests; prefill computes prompts and sends the state; decode receives "
        "it and generates.",
        choices=("null", "prefill", "decode"),
    )
    disaggregation_transfer_backend: str = flag(
        "tcp",
        "How KV and state travel: own TCP transfer, NIXL or Mooncake.",
        choices=("tcp", "nixl", "mooncake"),
    )
    disaggregation_bootstrap_port: int = flag(
        8998, "Port at which decode servers find this prefill server.", minimum=0, maximum=65535
    )
    disaggregation_transfer_timeout: float = flag(
        30.0, "Seconds after which a transfer that makes no progress fails.", above=0
    )
