"""`python -m paceline.exchange.table` builds the native part ahead of its first use."""

import sys

from paceline.exchange.table.build import BuildError, native

try:
    print(native().__file__)
except BuildError as error:
    sys.exit(f"paceline: {error}. Tables on servers will be updated by numpy, slower.")
