"""Run one verify of one layer a few times, for a profiler to look at.

    ncu --clock-control none -k regex:gdn_verify -s 2 -c 1 --set full \
        python benchmark/gdn_verify/profile_once.py --n 8 --d 16 --tile 4,4,3,1
"""

from __future__ import annotations

import argparse

import torch
from cases import Case
from variants import Tuples

from sglang.kernels.ops.gdn_cuda.launch_table import VerifyTile


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=25)
    parser.add_argument("--d", type=int, default=4)
    parser.add_argument("--tile", default="4,4,3,1")
    args = parser.parse_args()
    tile = VerifyTile(*(int(x) for x in args.tile.split(",")))
    case = Case(args.n, args.d, 2 * args.d, layers=4)
    variant = Tuples(case, use_cuda=True, tile=tile)
    variant.verify()
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
