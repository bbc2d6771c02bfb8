"""Writes what a fit found where it is shipped: rates into the files of devices, fitted rows into a list of names."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from paceline.bench.predictions.identity import DIGITS
from paceline.bench.predictions.samples import Sample
from paceline.cluster.rates import Rates
from paceline.errors import DataError
from paceline.simulator.closed_form.fitting import Fitted

FITTED_ROWS = "fitted_rows.txt"
_HEADER = """\
# Published runs to which the shipped profiles were fitted: the name of each, its line and what it is.
# Written by: paceline bench predictions --data FILE --fit-rows LIST --set profiles=FOLDER
"""
_DEVICE = "# Device: "
_DIGITS = 4
"""Of a coefficient that is written."""


def shipped_identities() -> frozenset[str]:
    """Return the names of the runs to which the shipped profiles were fitted."""
    text = resources.files("paceline").joinpath("clusters", "devices", FITTED_ROWS).read_text(encoding="utf-8")
    return frozenset(line.split()[0] for line in text.splitlines() if line.strip() and not line.startswith("#"))


def write_profiles(folder: Path, fits: Mapping[str, Fitted], fitted: Mapping[str, Sequence[Sample]]) -> None:
    """Write the rates of each fitted kind of device into its file in a folder, and the list of rows beside them.

    In the list the rows of other kinds of devices stay as they are.

    Raises:
        DataError: the folder has no file for a device, or cannot be written.
    """
    try:
        for device, found in fits.items():
            file = folder / f"{device}.yaml"
            if not file.is_file():
                raise DataError(f"profiles={folder}: there is no {file.name} to write the rates of {device} into.")
            file.write_text(with_rates_written(file.read_text(encoding="utf-8"), found.rates), encoding="utf-8")
        listed = folder / FITTED_ROWS
        before = listed.read_text(encoding="utf-8") if listed.is_file() else ""
        sections = _sections(before) | {device: "".join(map(_named, fitted[device])) for device in fits}
        text = "".join(f"\n{_DEVICE}{device}\n{rows}" for device, rows in sorted(sections.items()))
        listed.write_text(_HEADER + text, encoding="utf-8")
    except OSError as error:
        raise DataError(f"profiles={folder} cannot be written: {error}.") from error


def _sections(text: str) -> dict[str, str]:
    """Return the lines of a list of fitted rows by the kind of device that they stand under."""
    sections: dict[str, str] = {}
    device = ""
    for line in text.splitlines():
        if line.startswith(_DEVICE):
            device = line.removeprefix(_DEVICE)
            sections[device] = ""
        elif device and line.strip():
            sections[device] += f"{line}\n"
    return sections


def with_rates_written(text: str, rates: Rates) -> str:
    """Return the text of a device's file with other rates, which then stand last; comments stay."""
    kept: list[str] = []
    skipping = False
    for line in text.splitlines():
        skipping = line.startswith("rates:") or (skipping and (line.startswith((" ", "-", "}")) or not line))
        if not skipping:
            kept.append(line)
    changed: dict[str, Any] = {}
    for item in dataclasses.fields(Rates):
        value = getattr(rates, item.name)
        if value != item.default:
            changed[item.name] = float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else _plain(value)
    block = yaml.safe_dump({"rates": changed}, sort_keys=False, default_flow_style=None, width=118)
    return "\n".join(kept) + "\n" + block


def _plain(value: object) -> object:
    return [_plain(each) for each in value] if isinstance(value, tuple) else value


def _named(sample: Sample) -> str:
    one, split = sample.configuration, sample.configuration.split
    what = (
        f"{one.practice.name}, {one.model.name or 'a Transformer'}, {one.precision}, {split.gpus} x {one.cluster}, "
        f"tp {split.tp}, pp {split.pp}, dp {split.dp}, cp {split.cp}, micro-batch {split.micro_batch}"
    )
    assert len(sample.identity) == DIGITS
    return f"{sample.identity}  line {sample.row.line}: {what}\n"
