"""Finds multiply -> fused multiply-add pairs in PTX, SASS and AMDGCN text."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from dataclasses import dataclass

_LABEL = re.compile(r"^\s*[.$\w]+:")
_SASS_LINE = re.compile(
    r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(\S+)\s+(.*?)\s*(?:;|&\w+=|\?|$)"
)
_PTX_LINE = re.compile(r"^\s*(?:@!?%p\d+\s+)?([a-z][\w.:]*)\s+(.*?);")
_AMD_LINE = re.compile(r"^\s*(v_[a-z0-9_]+)\s+(.*?)\s*(?:;.*)?$")
_AMD_RANGE = re.compile(r"^([vsa])\[(\d+):(\d+)\]$")


@dataclass(frozen=True)
class PairCount:
    """pairs: products by one common factor (the decay) that feed the addend of a fused multiply-add.

    contracted: fused multiply-adds that take the same factor as a factor of their own, i.e. that multiply the
    state inside the fma. flushes: arithmetic that flushes subnormals and takes part in a pair.
    """

    pairs: int
    contracted: int
    flushes: int


@dataclass(frozen=True)
class _Op:
    kind: str
    dst: str
    factors: tuple[str, str]
    addend: str
    flushes: bool


_Item = _Op | tuple[_Op, _Op] | str
"""An operation, the two halves of a packed one, or the register that some other instruction writes."""


def _sass_ops(text: str) -> list[_Item]:
    """fp32 multiplies and fmas in order; any other instruction as the name of the register it writes."""
    found: list[_Item] = []
    for line in text.splitlines():
        match = _SASS_LINE.match(line)
        if not match:
            continue
        name, rest = match.groups()
        operands = [x.strip().removesuffix(".reuse") for x in rest.split(",")]
        base = name.split(".")[0]
        flushes = ".FTZ" in name
        if base == "FMUL" and len(operands) >= 3:
            found.append(_Op("mul", operands[0], (operands[1], operands[2]), "", flushes))
        elif base == "FFMA" and len(operands) >= 4:
            found.append(_Op("fma", operands[0], (operands[1], operands[2]), operands[3], flushes))
        elif base == "MOV" or name.startswith("IMAD.MOV"):
            found.append(_Op("mov", operands[0], (operands[-1], operands[-1]), "", False))
        elif operands and operands[0].startswith("R"):
            found.append(operands[0])
    return found


def _ptx_ops(text: str) -> list[_Item]:
    found: list[_Item] = []
    for line in text.splitlines():
        match = _PTX_LINE.match(line)
        if not match:
            continue
        name, rest = match.groups()
        operands = [x.strip() for x in rest.split(",")]
        flushes = ".ftz" in name
        if re.fullmatch(r"mul(\.rn)?(\.ftz)?\.f32", name):
            found.append(_Op("mul", operands[0], (operands[1], operands[2]), "", flushes))
        elif re.fullmatch(r"fma\.rn(\.ftz)?\.f32", name):
            found.append(_Op("fma", operands[0], (operands[1], operands[2]), operands[3], flushes))
    return found


def _amd_registers(operand: str) -> list[str]:
    match = _AMD_RANGE.match(operand)
    if not match:
        return [operand]
    kind, first, last = match.groups()
    return [f"{kind}{i}" for i in range(int(first), int(last) + 1)]


def _amd_halves(operand: str, swap_hi: bool) -> list[str]:
    """The two registers a packed instruction reads; op_sel_hi 0 reads the low one twice."""
    registers = _amd_registers(operand)
    if len(registers) == 1:
        return registers * 2
    return [registers[0], registers[0] if swap_hi else registers[1]]


def _amd_ops(text: str) -> list[_Item]:
    found: list[_Item] = []
    for line in text.splitlines():
        match = _AMD_LINE.match(line)
        if not match:
            continue
        name, rest = match.groups()
        name = re.sub(r"_(e32|e64|dpp|sdwa)$", "", name)
        modifiers = re.search(r"op_sel_hi:\[([01,]+)\]", rest)
        rest = re.split(r"\s+(?:op_sel|neg_|clamp|quad_perm|row_|mul:|div:)", rest)[0]
        operands = [x.strip() for x in re.split(r",\s*(?![^\[]*\])", rest)]
        if name == "v_mul_f32":
            found.append(_Op("mul", operands[0], (operands[1], operands[2]), "", False))
        elif name in ("v_fma_f32", "v_mad_f32"):
            found.append(_Op("fma", operands[0], (operands[1], operands[2]), operands[3], False))
        elif name in ("v_fmac_f32", "v_mac_f32"):
            found.append(_Op("fma", operands[0], (operands[1], operands[2]), operands[0], False))
        elif name in ("v_pk_mul_f32", "v_pk_fma_f32"):
            count = len(operands) - 1
            high = modifiers.group(1).split(",") if modifiers else ["1"] * count
            dst = _amd_registers(operands[0])
            sources = [_amd_halves(o, high[i] == "0") for i, o in enumerate(operands[1:])]
            kind = "fma" if count == 3 else "mul"
            halves = [
                _Op(
                    kind,
                    dst[half],
                    (sources[0][half], sources[1][half]),
                    sources[2][half] if count == 3 else "",
                    False,
                )
                for half in (0, 1)
            ]
            found.append((halves[0], halves[1]))
        elif name in ("v_mov_b32", "v_accvgpr_read_b32", "v_accvgpr_write_b32"):
            found.append(_Op("mov", operands[0], (operands[1], operands[1]), "", False))
        else:
            found += _amd_registers(operands[0])
    return found


_READERS = {"ptx": _ptx_ops, "sass": _sass_ops, "amdgcn": _amd_ops}


def count_pairs(text: str, dialect: str) -> PairCount:
    """Count pairs by following values through registers in program order. dialect: ptx, sass or amdgcn."""
    value: dict[str, int] = {}
    product: dict[int, tuple[tuple[int, ...], bool]] = {}
    by_factor: Counter[int] = Counter()
    flushed: Counter[int] = Counter()
    as_own_factor: Counter[int] = Counter()
    fresh = itertools.count()

    def current(register: str) -> int:
        if register not in value:
            value[register] = next(fresh)
        return value[register]

    for item in _READERS[dialect](text):
        if isinstance(item, str):
            value[item] = next(fresh)
            continue
        ops = item if isinstance(item, tuple) else (item,)
        # Both halves of a packed instruction read before either writes.
        reads = [tuple(current(f) for f in op.factors) for op in ops]
        addends = [current(op.addend) if op.addend else -1 for op in ops]
        for op, factors, addend in zip(ops, reads, addends):
            if op.kind == "mov":
                value[op.dst] = factors[0]
                continue
            if op.kind == "fma":
                as_own_factor.update(set(factors))
                multiplied, flushes = product.get(addend, ((), False))
                for factor in set(multiplied):
                    by_factor[factor] += 1
                    flushed[factor] += op.flushes or flushes
            value[op.dst] = next(fresh)
            if op.kind == "mul":
                product[value[op.dst]] = (factors, op.flushes)
    if not by_factor:
        return PairCount(0, 0, 0)
    factor, pairs = by_factor.most_common(1)[0]
    return PairCount(pairs, as_own_factor[factor], flushed[factor])
