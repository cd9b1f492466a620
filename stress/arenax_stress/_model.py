"""The demo's model and its train step: a neural n-gram model of bytes, in plain JAX.

Each byte is predicted from the eight before it by one hidden layer (Bengio et al., "A Neural Probabilistic Language
Model", 2003). Small on purpose: the demo is about how batches reach the step, and each operation more is compiled for
every shape.
"""

from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp

import arenax

CONTEXT = 8
VOCABULARY = 256
HIDDEN = 128
LEARNING_RATE = 0.5

State: TypeAlias = dict[str, jax.Array]


@jax.jit
def init(seed: int) -> State:
    """Returns new parameters.

    Args:
        seed: Makes them reproducible.

    Returns:
        ``first``, float32 of (CONTEXT, VOCABULARY, HIDDEN), and ``last``, float32 of (HIDDEN, VOCABULARY).
    """
    first, last = jax.random.split(jax.random.key(seed))
    return {
        "first": jax.random.normal(first, (CONTEXT, VOCABULARY, HIDDEN)) * CONTEXT**-0.5,
        "last": jax.random.normal(last, (HIDDEN, VOCABULARY)) * HIDDEN**-0.5,
    }


def loss_of(state: State, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
    """The mean of the negative log-likelihood of each byte, in nats; the padding does not count.

    Args:
        state: The parameters.
        tokens: uint8 of (batch, capacity), padded with anything.
        lengths: int32 of (batch,): the valid bytes of each row.

    Returns:
        A float32 scalar.
    """
    capacity = tokens.shape[1]
    before = jnp.pad(tokens, ((0, 0), (CONTEXT, 0)))
    window = before[:, jnp.arange(capacity)[:, None] + jnp.arange(CONTEXT)]
    # The sum of one row for each place in the context is the layer's product with one-hot bytes.
    rows = state["first"].at[jnp.arange(CONTEXT), window].get(mode="promise_in_bounds")
    logits = jax.nn.relu(rows.sum(axis=2)) @ state["last"]
    hit = tokens[..., None] == jnp.arange(VOCABULARY, dtype=tokens.dtype)
    valid = arenax.valid_mask(lengths, capacity)[..., None]
    return -jnp.sum(jnp.where(hit & valid, jax.nn.log_softmax(logits), 0)) / jnp.sum(lengths)


@partial(jax.jit, donate_argnames="state")
def train_step(state: State, tokens: jax.Array, lengths: jax.Array) -> tuple[State, jax.Array]:
    """One step of gradient descent. The state is donated, so that the parameters are updated in place.

    Args:
        state: The parameters.
        tokens: uint8 of (batch, capacity).
        lengths: int32 of (batch,).

    Returns:
        The new parameters and the loss before the step.
    """
    loss, gradients = jax.value_and_grad(loss_of)(state, tokens, lengths)
    return jax.tree.map(lambda p, g: p - LEARNING_RATE * g, state, gradients), loss
