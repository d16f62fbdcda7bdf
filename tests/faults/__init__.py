"""What is lost when something breaks: nothing that was acknowledged. KITH_FAULTS=long (make test-faults) does more."""

import os
from typing import Final

LONG: Final = os.environ.get("KITH_FAULTS") == "long"
