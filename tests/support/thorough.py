"""Whether tests that take minutes run too: with `THOROUGH=1`."""

import os

THOROUGH = os.environ.get("THOROUGH") == "1"
