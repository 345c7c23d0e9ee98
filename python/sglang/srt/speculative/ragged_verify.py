"""How many rows of a draft each request verifies."""

from __future__ import annotations

from enum import StrEnum

from sglang.srt.environ import envs


class RaggedVerifyMode(StrEnum):
    """`static`: the same number for each request. The other modes cut rows request by request."""

    STATIC = "static"
    CAP_ACCEPT = "cap-accept"
    COMPACT = "compact"


def read_ragged_verify_mode() -> RaggedVerifyMode:
    """The mode that SGLANG_RAGGED_VERIFY_MODE names, read on each call.

    Raises: ValueError for any other text.
    """
    text = envs.SGLANG_RAGGED_VERIFY_MODE.get()
    try:
        return RaggedVerifyMode(text)
    except ValueError as error:
        known = ", ".join(mode.value for mode in RaggedVerifyMode)
        raise ValueError(f"SGLANG_RAGGED_VERIFY_MODE={text} is not one of {known}") from error
