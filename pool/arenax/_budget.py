"""The budget: from what the user writes to bytes."""

import re
from typing import Any

_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12} | {
    f"{prefix}ib": 1 << (10 * (i + 1)) for i, prefix in enumerate("kmgt")
}


def budget_bytes(budget: Any, bytes_limit: int | None, device: str) -> int | None:
    """Returns the budget in bytes, or None for no budget.

    Args:
        budget: None, bytes as an int, a text such as ``"2GiB"``, or a fraction of `bytes_limit` as a float in (0, 1].
        bytes_limit: What the device says it has, or None where it does not say.
        device: The device's name, for the message.

    Raises:
        TypeError: For any other kind of value.
        ValueError: For a value out of range, a unit that does not exist, or a fraction of an unknown limit.

    Example:
        >>> from arenax._budget import budget_bytes
        >>> budget_bytes("1.5 KiB", None, "cpu:0"), budget_bytes(0.5, 1000, "gpu:0")
        (1536, 500)
    """
    if budget is None:
        return None
    if isinstance(budget, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]+)\s*", budget)
        unit = _UNITS.get(match[2].lower()) if match else None
        if match is None or unit is None:
            raise ValueError(f'budget must read like "2GiB" or "500 MB", got {budget!r}')
        return _positive(int(float(match[1]) * unit), budget)
    if isinstance(budget, bool) or not isinstance(budget, int | float):
        raise TypeError(f'budget must be None, bytes, a text like "2GiB" or a fraction, got {budget!r}')
    if isinstance(budget, int):
        return _positive(budget, budget)
    if not 0 < budget <= 1:
        raise ValueError(f"a budget given as a float is a fraction of the device's memory, in (0, 1]; got {budget!r}")
    if bytes_limit is None:
        raise ValueError(
            f"budget {budget!r} is a fraction of the device's bytes_limit, and {device} does not report one: "
            'give bytes, such as "2GiB"'
        )
    return _positive(int(budget * bytes_limit), budget)


def _positive(nbytes: int, budget: Any) -> int:
    if nbytes < 1:
        raise ValueError(f"budget must be at least one byte, got {budget!r}")
    return nbytes
