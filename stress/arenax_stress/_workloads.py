"""The workloads by name: what `arenax lab` runs, and how to make each trace again."""

from collections.abc import Callable

from ._traces import Trace
from ._workload_programs import phases, producer_consumer, sawtooth, training_with_growing_eval, two_tenants
from ._workload_robson import robson
from ._workload_server import llm_server, llm_server_paged
from ._workload_sizes import bimodal, lognormal, pareto, uniform

# Each takes `seed` and, by keyword, `events`: the most that its trace has. The same arguments give the same trace, with
# one version of NumPy. The first paragraph of the docstring says what it is, the second what it shows.
WORKLOADS: dict[str, Callable[..., Trace]] = {
    workload.__name__: workload
    for workload in (
        uniform,
        lognormal,
        pareto,
        bimodal,
        sawtooth,
        training_with_growing_eval,
        two_tenants,
        producer_consumer,
        phases,
        llm_server,
        llm_server_paged,
        robson,
    )
}
