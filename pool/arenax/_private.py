"""The private names of JAX that are used, for speed alone, each with the public way that is taken where it is missing.

`tests/pool/test_private.py` fails where a release of JAX no longer has one, or where it does something else.
"""

# What a compiled program itself calls, in C++, from its second call on. Publicly its `__call__`, a function of Python's
# that takes a tenth of the time of a small donation.
CPP_CALL = "_call"

# Another array object on the same buffer. Publicly `addressable_data(0)`, which is this behind three properties of
# Python's: a fifth of its time.
SECOND_HANDLE = "_fully_replicated_shard"
