"""`paceline bench server`: the parameter server against the limits of this machine, and against its peers.

It has parts, each with settings of its own (`--set key=value`); `parts` says which are run. `transports` (see
`server_transports`): push and pull of tensors and rows by each transport, the raw limits, and peers, in one run. `rows`
(see `server_rows`): rows read and updated in the table itself, by one core. `compression` (see
`server_compression`): how small and how fast. `recovery` (see `server_recovery`): stalls
after kills, and how long who joins takes. `ctr` (see `server_ctr`): samples a second of the recipe of clicks.
`straggler` (see `server_straggler`): what a slow worker costs the others.
"""

from __future__ import annotations

import importlib
from typing import Any, Final

from paceline.bench import options as given
from paceline.bench.machine import machine, table_console, warn_of_load

PARTS: Final = {
    "transports": "paceline.bench.server_transports",
    "rows": "paceline.bench.server_rows",
    "compression": "paceline.bench.server_compression",
    "recovery": "paceline.bench.server_recovery",
    "ctr": "paceline.bench.server_ctr",
    "straggler": "paceline.bench.server_straggler",
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
