"""`python -m arenax_stress` is the `arenax` command."""

import sys

from .cli import main

sys.exit(main())
