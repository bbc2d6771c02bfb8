"""`python -m paceline.shm` builds the native part ahead of its first use."""

import sys

from paceline.shm import unavailable
from paceline.shm.build import BuildError, native

reason = unavailable()
if reason is not None:
    sys.exit(f"paceline: {reason}. Ranks will exchange through gloo.")
try:
    print(native().__file__)
except BuildError as error:
    sys.exit(f"paceline: {error}. Ranks on one host will exchange through shared memory in pure Python, slower.")
