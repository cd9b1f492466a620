"""A preallocated buffer-pool allocator for JAX."""

from ._errors import ArenaxError as ArenaxError
from ._errors import BadTrace as BadTrace
from ._errors import LeaseReleased as LeaseReleased
from ._errors import NoSizeClass as NoSizeClass
from ._errors import NotSteady as NotSteady
from ._errors import OutOfBounds as OutOfBounds
from ._errors import PoolClosed as PoolClosed
from ._errors import PoolExhausted as PoolExhausted
from ._guard import Compile as Compile
from ._lease import Lease as Lease
from ._masks import valid_mask as valid_mask
from ._measure import Measure as Measure
from ._plan import Plan as Plan
from ._pool import BufferPool as BufferPool
from ._request import ArraySpec as ArraySpec
from ._request import Ragged as Ragged
from ._request import SizeClass as SizeClass
from ._size_classes import SizeClasses as SizeClasses
from ._stats import Stats as Stats
from ._step import Step as Step
from ._trace import Trace as Trace
from ._trace_leases import trace_leases as trace_leases
from ._waiters import CancelToken as CancelToken

__version__ = "0.1.0"
