"""Trains a small model on ragged text over several processes, with and without the pool, and compares the two runs.

On this machine, with two processes of two CPU devices each:

    python examples/multi_host.py --processes 2 --devices 2

On a cluster run it once on each host, as `jax.distributed.initialize` wants it; there give ``--process N`` and
``--coordinator HOST:PORT`` as well, or neither where JAX finds them by itself.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
from typing import Any

STEPS = 12
BATCH = 8  # Texts of a step, over all processes.


def main() -> int:
    """Starts the processes, or is one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=2, help="how many there are (2)")
    parser.add_argument("--devices", type=int, default=2, help="CPU devices of each (2)")
    parser.add_argument("--process", type=int, help="which one this is; without it all are started here")
    parser.add_argument("--coordinator", help="HOST:PORT of process 0")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--heartbeat", type=int, default=100, help="seconds after which a silent process is dead (100)")
    parser.add_argument("--dies", type=int, default=-1, help="the process that ends itself in the middle, for tests")
    parser.add_argument("--json", action="store_true", help="print the run as JSON")
    args = parser.parse_args()
    return start(args) if args.process is None else run(args)


def start(args: argparse.Namespace) -> int:
    """Starts all processes on this machine; returns the first status that is not 0."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        coordinator = f"localhost:{free.getsockname()[1]}"
    command = [sys.executable, __file__, *sys.argv[1:], "--coordinator", coordinator]
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={args.devices}"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    processes = [subprocess.Popen([*command, "--process", str(i)], env=environment) for i in range(args.processes)]
    statuses = [process.wait() for process in processes]
    return next((status for status in statuses if status), 0)


def run(args: argparse.Namespace) -> int:
    """Trains twice, and compares."""
    import jax

    jax.distributed.initialize(
        args.coordinator,
        args.processes,
        args.process,
        initialization_timeout=60,
        heartbeat_timeout_seconds=args.heartbeat,
    )
    plain, pooled = train(args, with_pool=False), train(args, with_pool=True)
    same = plain["losses"] == pooled["losses"] and plain["parameters"] == pooled["parameters"]
    if args.process == 0:
        if args.json:
            print(json.dumps({"plain": plain, "pooled": pooled, "same": same}))
        else:
            print(f"{jax.process_count()} processes, {jax.device_count()} devices, {STEPS} steps")
            print(f"losses with the pool:    {' '.join(f'{x:.4f}' for x in pooled['losses'])}")
            print(f"bit for bit those without it, parameters too: {'yes' if same else 'NO'}")
            print(f"train steps compiled: {plain['compiles']} without, {pooled['compiles']} with the pool")
    jax.distributed.shutdown()
    return 0 if same else 1


def train(args: argparse.Namespace, with_pool: bool) -> dict[str, Any]:
    """Trains on the same stream with or without the pool; every process has its own rows of each batch."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    import arenax

    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, everywhere = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    lengths = arenax.SizeClasses.explicit([16, 32, 64])
    compiles = 0

    def loss_of(parameters: Any, tokens: Any) -> Any:
        mask = tokens >= 0
        hidden = jnp.tanh(parameters["embed"][jnp.where(mask, tokens, 0)]) * mask[..., None]
        means = hidden.sum(1) / jnp.maximum(mask.sum(1, keepdims=True), 1)
        scores = (means @ parameters["out"]).squeeze(-1)
        targets = (tokens * mask).sum(1) % 2
        return jnp.mean((scores - targets) ** 2)

    @jax.jit
    def train_step(parameters: Any, tokens: Any) -> Any:
        nonlocal compiles
        compiles += 1
        loss, gradients = jax.value_and_grad(loss_of)(parameters, tokens)
        return jax.tree.map(lambda p, g: p - 0.1 * g, parameters, gradients), loss

    rng = np.random.default_rng(args.seed)
    values = {"embed": rng.standard_normal((256, 16)), "out": rng.standard_normal((16, 1))}
    parameters = {n: jax.device_put(v.astype(np.float32), everywhere) for n, v in values.items()}
    pool = arenax.BufferPool(rows, arenax.Ragged(1, lengths, pad_value=-1)) if with_pool else None
    mine = slice(args.process * BATCH // args.processes, (args.process + 1) * BATCH // args.processes)
    losses: list[float] = []
    for number in range(STEPS):
        # Each text has a length of its own; what a process sees is as long as the longest of its own rows.
        most = int(rng.choice([16, 32, 64]))
        texts = [rng.integers(0, 256, int(n)) for n in rng.integers(4, most + 1, BATCH)]
        part = texts[mine]
        longest = max(map(len, part))
        tokens = np.full((len(part), longest), -1, np.int32)
        for row, text in zip(tokens, part, strict=True):
            row[: len(text)] = text
        if number == STEPS // 2 and args.process == args.dies:
            os._exit(17)
        if pool is not None:
            with pool.step() as step:
                parameters, loss = train_step(parameters, step.put(tokens, local=True))
                losses.append(float(loss))
        else:
            # By hand: the class of the longest text of all processes, which here each of them can see.
            capacity = lengths.class_of(max(map(len, texts)))
            padded = np.pad(tokens, ((0, 0), (0, capacity - longest)), constant_values=-1)
            batch = jax.make_array_from_process_local_data(rows, padded)
            parameters, loss = train_step(parameters, batch)
            losses.append(float(loss))
    found = {n: np.asarray(v.addressable_data(0)).tolist() for n, v in parameters.items()}
    if pool is not None:
        pool.check()
        pool.close()
    return {"losses": losses, "parameters": found, "compiles": compiles}


if __name__ == "__main__":
    sys.exit(main())
