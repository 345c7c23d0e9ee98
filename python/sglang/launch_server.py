"""`python -m sglang.launch_server --model-path DIR`: start a server."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal; 2 for arguments that cannot work."""
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.installation import InstallationError
    from sglang.srt.server_args import prepare_server_args

    try:
        server_args = prepare_server_args(sys.argv[1:] if argv is None else argv)
        launch_server(server_args)
    except (ValueError, FileNotFoundError, InstallationError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
