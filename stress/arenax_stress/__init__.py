"""The `arenax` command: demonstrates and stresses the pool. It draws with `arenax[tools]`."""
