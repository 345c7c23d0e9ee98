"""Let a child process end when its parent does, even when the parent is killed with -9."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 1.0


def die_with_parent(parent_pid: int) -> None:
    """Kill this process (SIGKILL) once process `parent_pid` is no longer its parent.

    On Linux the kernel does it; everywhere a thread looks once a second as well, because the
    kernel's signal belongs to the thread that forked us. Call it early, in the main thread.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Thread(target=_watch, args=(parent_pid,), name="parent-watch", daemon=True).start()


def _watch(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(_POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)
