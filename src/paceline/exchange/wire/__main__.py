"""`python -m paceline.exchange.wire` builds the native part ahead of its first use."""

import sys

from paceline.exchange.wire.build import BuildError, native

try:
    print(native().__file__)
except BuildError as error:
    sys.exit(f"paceline: {error}. Messages between workers and servers will be made in Python, slower.")
