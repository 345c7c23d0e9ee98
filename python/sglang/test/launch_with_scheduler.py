"""`python -m sglang.test.launch_with_scheduler MODULE ...flags`: a server over another scheduler."""

from __future__ import annotations

import sys

from sglang.srt.entrypoints.http_server import launch_server
from sglang.srt.server_args import prepare_server_args

if __name__ == "__main__":
    try:
        launch_server(prepare_server_args(sys.argv[2:]), scheduler_module=sys.argv[1])
    except ValueError as error:
        sys.exit(f"error: {error}")
