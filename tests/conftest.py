"""What holds for every test: eight CPU devices, strict promotion, Hypothesis profiles, no doctest without its extra."""

import gc
import importlib
import importlib.util
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

# Before jax is imported, and by environment, so that a spawned process sees the same devices. A setting of the caller's
# own wins, so that the suite can be run on an accelerator.
if "--xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hypothesis
import jax
import pytest
from coverage import Coverage

# What these do, other tests do as well; these do it thousands of times.
REPEATED = {"test_faults.py", "test_interrupts.py", "test_stateful.py"}
POOL_TESTS = {Path(__file__).parent / "pool", Path(__file__).parents[1] / "pool"}

# Whole packages first: pytest, asked for the doctests of one module, would import that module a second time.
for _package in ("arenax", "arenax_adapters", "arenax_stress"):
    if importlib.util.find_spec(_package):
        importlib.import_module(_package)

# In this process only: what a test starts in a process of its own runs with jax's defaults, as a user's program does.
jax.config.update("jax_numpy_dtype_promotion", "strict")

# `ci` draws the same examples each time, so that a red run is the fault of the change; the search for new ones is
# `stress`, which has no time limit. The first example compiles, which says nothing about the others.
hypothesis.settings.register_profile(
    "ci",
    derandomize=True,
    deadline=None,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile(
    "stress",
    hypothesis.settings.get_profile("ci"),
    derandomize=False,
    max_examples=5_000,
    stateful_step_count=200,
)
_profile = os.environ.get("HYPOTHESIS_PROFILE", "ci")
hypothesis.settings.load_profile(_profile)
if _profile == "stress":
    os.environ.setdefault("PYTEST_TIMEOUT", "0")  # pytest-timeout reads it later; 0 = none


@pytest.fixture(autouse=True)
def _switches_as_before() -> Iterator[None]:  # pyright: ignore[reportUnusedFunction]
    """Fails the test that leaves a switch of JAX turned, and not those that come after it."""
    config: Any = jax.config
    switches = [jax.enable_x64, jax.disable_jit, jax.debug_nans, jax.debug_infs, jax.default_device]
    names = ["jax_enable_x64", "jax_disable_jit", "jax_debug_nans", "jax_debug_infs", "jax_default_device"]
    before = {name: getattr(config, name) for name in names}
    yield
    after = {name: getattr(config, name) for name in names}
    for switch, name in zip(switches, names, strict=True):
        if after[name] != before[name]:
            switch(before[name]).__enter__()
    assert after == before


class _AbsentExtras:
    """Leaves out the doctests of an adapter whose library is not installed: torch.py needs torch, grain.py grain."""

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        needed = {"torch": "torch", "_torch_worker": "torch", "grain": "grain", "_grain_worker": "grain"}
        library = needed.get(collection_path.stem) if collection_path.parent.name == "arenax_adapters" else None
        return True if library and importlib.util.find_spec(library) is None else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Measures the coverage of the pool by its own tests alone: the tracer doubles what others take."""
    stopped: list[Coverage] = []
    if POOL_TESTS.isdisjoint(item.path.parents) or item.path.name in REPEATED:
        # Two in a process of pytest-xdist: its own, and that which coverage begins in every process.
        while (coverage := Coverage.current()) is not None:
            coverage.stop()
            stopped.append(coverage)
    try:
        return (yield)
    finally:
        for coverage in reversed(stopped):
            coverage.start()


def pytest_configure(config: pytest.Config) -> None:
    # As a plugin: the hooks of this file itself are asked about the paths below tests/ only.
    config.pluginmanager.register(_AbsentExtras(), "arenax-absent-extras")


def pytest_collection_finish() -> None:
    # The 300,000 objects that the imports made stay to the end. Hundreds of tests collect, which without these takes a
    # hundredth of a second, and with them a third.
    gc.collect()
    gc.freeze()
