"""`paceline bench server`: the parameter server against the limits of this machine, and against its peers.

It has parts, each in a module of its own and with its own settings (`--set key=value`); `parts` says which are run.
`transports`: push and pull of tensors and rows by each transport, the raw limits, and peers, in one run. `messages`:
rows pulled and pushed through a server. `rows`: rows read and updated in the table itself, by one core. `compression`:
how small and how fast. `recovery`: stalls after kills, and how long who joins takes. `ctr`: samples a second of the
recipe of clicks. `straggler`: what a slow worker costs the others.
"""

from __future__ import annotations

import importlib
from typing import Any, Final

from paceline.bench import options as given
from paceline.bench.machine import machine, table_console, warn_of_load

PARTS: Final = {
    "transports": "paceline.bench.server.transports",
    "messages": "paceline.bench.server.messages",
    "rows": "paceline.bench.server.rows",
    "compression": "paceline.bench.server.compression",
    "recovery": "paceline.bench.server.recovery",
    "ctr": "paceline.bench.server.ctr",
    "straggler": "paceline.bench.server.straggler",
}
"""What `parts` may name: a module with `KEYS`, the settings it knows, `run(options)`, which returns its share of
`--json`, and `show(console, result)`, which prints that. `settings` of what it returns stand under its name."""


def main(options: dict[str, str]) -> dict[str, Any]:
    """Measure, print tables, and return the object of `--json`; its keys are told in `benchmarks/README.md`.

    Raises:
        RecipeError: a setting is unknown.
    """
    asked = dict(options)
    parts = given.texts("parts", asked.pop("parts", ",".join(PARTS)), list(PARTS))
    modules = {part: importlib.import_module(PARTS[part]) for part in parts}
    given.refuse_unknown(asked, ["parts", *dict.fromkeys(key for module in modules.values() for key in module.KEYS)])
    result: dict[str, Any] = {"machine": machine(), "settings": {}}
    console = table_console()
    warn_of_load(console, result["machine"])
    for part, module in modules.items():
        found = module.run({key: text for key, text in asked.items() if key in module.KEYS})
        module.show(console, found)
        result["settings"][part] = found.pop("settings", {})
        result |= found
    return result
