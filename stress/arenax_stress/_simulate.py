"""The simulated allocators by name, and the function that runs one of them on a trace."""

from collections.abc import Callable

import numpy as np

from arenax import Plan, Trace

from ._allocator import Allocator
from ._replay import replay
from ._result import Result
from ._sim_best_fit import BestFit
from ._sim_bfc import Bfc, BfcGrowing
from ._sim_cupy import CuPy
from ._sim_first_fit import FirstFit
from ._sim_pytorch import PyTorch
from ._sim_rmm import Rmm

# Each is called with the limit, in bytes, or None.
ALLOCATORS: dict[str, Callable[[int | None], Allocator]] = {
    "bfc": Bfc,
    "bfc_growing": BfcGrowing,
    "pytorch": PyTorch,
    "cupy": CuPy,
    "rmm": Rmm,
    "best_fit": BestFit,
    "first_fit": FirstFit,
}
POOL = "pool"


def simulate(
    trace: Trace,
    allocator: str,
    *,
    limit_bytes: int | None = None,
    plan: Plan | None = None,
    max_classes: int | None = None,
) -> Result:
    """Runs a trace through an allocator, with no device and no memory, and returns what that would have needed.

    Args:
        trace: What was asked for, and when it was given back.
        allocator: ``"pool"`` for this pool, or one of those that programs use without it: ``"bfc"`` (XLA's, in one
            region) and ``"bfc_growing"`` (in regions on demand), ``"pytorch"``, ``"cupy"``, ``"rmm"``; ``"best_fit"``
            and ``"first_fit"`` are the textbook's.
        limit_bytes: What the device has for it; None for no limit. An allocation that does not fit is one of the
            result's failures.
        plan: The size classes of the pool and their slots, an `arenax.Plan`; for the pool only.
        max_classes: The most size classes of a pool that has no plan; for the pool only.

    Returns:
        The result.

    Raises:
        ValueError: For an allocator that is not known, a limit below 1, and a plan or classes for an allocator that has
            none.
        TypeError: For a limit that is not an integer.

    Example:
        >>> trace = Trace.from_events([("allocate", "a", 3 << 19)])
        >>> {name: simulate(trace, name).peak_reserved_bytes >> 10 for name in ("bfc", "pytorch", "cupy")}
        {'bfc': 1536, 'pytorch': 20480, 'cupy': 1536}
    """
    if allocator != POOL and allocator not in ALLOCATORS:
        raise ValueError(f"allocator must be one of {', '.join((POOL, *ALLOCATORS))}, got {allocator!r}")
    if limit_bytes is not None:
        if isinstance(limit_bytes, bool) or not isinstance(limit_bytes, int | np.integer):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"limit_bytes must be an integer, or None for no limit, got {limit_bytes!r}")
        if limit_bytes < 1:
            raise ValueError(f"limit_bytes must be at least 1, or None for no limit, got {limit_bytes}")
        limit_bytes = int(limit_bytes)
    if allocator == POOL:
        from ._sim_pool import simulate_pool

        return simulate_pool(trace, limit_bytes, plan, max_classes)
    for name, value in (("plan", plan), ("max_classes", max_classes)):
        if value is not None:
            raise ValueError(f'{name} is for the allocator "{POOL}" only, got it for {allocator!r}')
    return replay(trace, ALLOCATORS[allocator](limit_bytes), allocator)
