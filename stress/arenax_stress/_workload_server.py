"""Workloads of a server of a language model: the cache of keys and values, in one piece a request or in blocks."""

import heapq

import numpy as np

from ._traces import Trace
from ._workload_script import Script

# 32 layers, 8 heads of keys and values with 128 features each, bfloat16: a model of eight thousand million parameters.
TOKEN_BYTES = 2 * 32 * 8 * 128 * 2
# Seconds of a decoding step, and of a prompt's token.
_STEP, _PREFILL = 0.03, 0.0001


def llm_server(
    seed: int = 0, *, events: int = 20_000, requests_per_second: float = 4.0, running: int = 64, longest: int = 4096
) -> Trace:
    """A server that allocates a request's whole cache, prompt and output, when it begins.

    Requests come at random (Poisson), `running` of them at once, and wait beyond that. Prompts and outputs have means
    of 161 and 338 tokens, those of ShareGPT as the authors of vLLM found them (Kwon et al., SOSP 2023), with a heavy
    tail; that an output's length is known beforehand is this workload's simplification. Buffers have a megabyte to
    half a gigabyte, in well over a thousand sizes, and end in another order than they began. It shows what a serving
    system fights: external fragmentation, or padding if lengths are rounded up to classes. Times are in seconds.

    Args:
        seed: Of the random numbers.
        events: How many allocations and frees.
        requests_per_second: The mean.
        running: Requests that run at once.
        longest: Tokens of the longest prompt and output together.
    """
    script, rng = Script("llm_server", events), np.random.default_rng(seed)
    active: list[tuple[float, int]] = []
    arrived = 0.0
    while not script.full:
        arrived += rng.exponential(1 / requests_per_second)
        now = arrived
        while active and (active[0][0] <= now or len(active) >= running):
            ended, buffer = heapq.heappop(active)
            now = max(now, ended)
            script.free([buffer], time=ended)
        prompt, output = _lengths(rng, longest)
        buffer = script.allocate((prompt + output) * TOKEN_BYTES, time=now)
        heapq.heappush(active, (now + prompt * _PREFILL + output * _STEP, buffer))
        arrived = max(arrived, now - 60)  # Who has waited for a minute goes elsewhere.
    return script.trace()


def llm_server_paged(
    seed: int = 0,
    *,
    events: int = 20_000,
    requests_per_second: float = 4.0,
    running: int = 64,
    longest: int = 4096,
    block: int = 16,
) -> Trace:
    """The same server with a cache in blocks, which grows as the output does.

    A request begins with the blocks that its prompt fills, takes one more whenever `block` tokens are full, and frees
    all of them at its end. As all buffers have one size no allocator fragments, and what is wasted is the rest of the
    last block: beside `llm_server` it shows what fixed sizes are worth, at the price of many more allocations.

    Args:
        seed: Of the random numbers.
        events: How many allocations and frees.
        requests_per_second: The mean.
        running: Requests that run at once.
        longest: Tokens of the longest prompt and output together.
        block: Tokens of a block.
    """
    script, rng = Script("llm_server_paged", events), np.random.default_rng(seed)
    # For each running request: tokens that it has, tokens that it will have, its blocks.
    active: list[tuple[int, int, list[int]]] = []
    now, due = 0.0, rng.exponential(1 / requests_per_second)
    while not script.full:
        if not active:
            now = max(now, due)
        while due <= now and len(active) < running:
            prompt, output = _lengths(rng, longest)
            blocks = [script.allocate(block * TOKEN_BYTES, time=now) for _ in range(-(-prompt // block))]
            active.append((prompt, prompt + output, blocks))
            due += rng.exponential(1 / requests_per_second)
        now += _STEP
        going: list[tuple[int, int, list[int]]] = []
        for tokens, end, blocks in active:
            if tokens == end:
                script.free(blocks, time=now)
                continue
            if tokens == len(blocks) * block:
                blocks.append(script.allocate(block * TOKEN_BYTES, time=now))
            going.append((tokens + 1, end, blocks))
        active = going
    return script.trace()


def _lengths(rng: np.random.Generator, longest: int) -> tuple[int, int]:
    """Tokens of a prompt and of an output: log-normal, with the means 161 and 338."""
    prompt, output = (int(mean * rng.lognormal(-(1.1**2) / 2, 1.1)) + 1 for mean in (161, 338))
    prompt = min(prompt, longest - 1)
    return prompt, min(output, longest - prompt)
