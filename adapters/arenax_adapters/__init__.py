"""What plugs `arenax` in to training loops and data loaders: one module for each thing that it plugs in to.

Each module is imported by its own name, as in ``from arenax_adapters.prefetch import prefetch``; this package imports
nothing, so that it never needs a library that only one of its modules is about.
"""
