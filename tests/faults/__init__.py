"""Fault injection: no acknowledged write is lost. KITH_FAULTS=long (make test-faults) runs more cases."""

import os
from typing import Final

LONG: Final = os.environ.get("KITH_FAULTS") == "long"
