"""`python -m sglang.test.fake_server`: the HTTP server over the fake scheduler."""

from __future__ import annotations

import sys

from sglang.srt.entrypoints.http_server import launch_server
from sglang.srt.server_args import prepare_server_args

FAKE_SCHEDULER = "sglang.test.fake_scheduler"

if __name__ == "__main__":
    try:
        launch_server(prepare_server_args(sys.argv[1:]), scheduler_module=FAKE_SCHEDULER)
    except ValueError as error:
        sys.exit(f"error: {error}")
