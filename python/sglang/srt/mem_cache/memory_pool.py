"""The historical name of the ``pool`` package: both names are the same module object."""

import sys

from sglang.srt.mem_cache import pool

sys.modules[__name__] = pool
