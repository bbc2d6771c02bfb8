"""What a row measured: names of metrics and units, as people write them, read into quantities in SI units."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from paceline.bench.predictions.rows import Row, Unusable


class Quantity(Enum):
    """What was measured, in the order in which one is preferred where a run tells a step's time in several ways."""

    STEP = "seconds of a step"
    TOKENS = "tokens per second, of all devices"
    TOKENS_EACH = "tokens per second and device"
    SAMPLES = "samples per second, of all devices"
    SAMPLES_EACH = "samples per second and device"
    FLOPS_EACH = "operations per second and device"
    FLOPS = "operations per second, of all devices"
    MODEL_SHARE = "share of the peak, by the model's operations (MFU)"
    HARDWARE_SHARE = "share of the peak, recomputation counted (HFU)"
    DAYS = "seconds for a number of tokens"
    PEAK = "bytes at the peak"
    STATE = "bytes allocated between steps"
    ACTIVATIONS = "bytes of activations"
    PARAMETERS = "bytes of parameters, gradients and optimizer state"
    ACTIVATION_SHARE = "share of what all activations take without sequence parallelism"

    @property
    def is_memory(self) -> bool:
        """Whether it is no matter of time."""
        return self in _MEMORY


_MEMORY = {
    Quantity.PEAK,
    Quantity.STATE,
    Quantity.ACTIVATIONS,
    Quantity.PARAMETERS,
    Quantity.ACTIVATION_SHARE,
}
# Names of metrics, the first that matches; what a name says of its unit counts where the column for units is empty.
_METRICS: tuple[tuple[str, Quantity], ...] = (
    (r"(iteration|step|iter)_?time(_per_(iteration|step))?(?P<unit>_m?s|_us)?(_derived)?", Quantity.STEP),
    (r"time_per_(iteration|step)(?P<unit>_m?s|_us)?", Quantity.STEP),
    (r"(?P<unit>seconds|s|ms)_per_(iteration|step)", Quantity.STEP),
    (r"tokens_per_s(ec(ond)?)?(_total)?", Quantity.TOKENS),
    (r"tokens_per_s(ec(ond)?)?_per_(gpu|device)", Quantity.TOKENS_EACH),
    (r"(samples|sequences)_per_s(ec(ond)?)?(_total)?", Quantity.SAMPLES),
    (r"(samples|sequences)_per_s(ec(ond)?)?_per_(gpu|device)", Quantity.SAMPLES_EACH),
    (r"(achieved_|model_|hardware_)?(?P<unit>t|p|g)flops?(_per_s)?_per_(gpu|device)", Quantity.FLOPS_EACH),
    (r"aggregate_(?P<unit>t|p|e)flops?(_per_s)?", Quantity.FLOPS),
    (r"mfu(?P<unit>_pct|_percent)?", Quantity.MODEL_SHARE),
    (r"hfu(?P<unit>_pct|_percent)?", Quantity.HARDWARE_SHARE),
    (r"(?P<unit>days)_for_(?P<tokens>\d+)b_tokens", Quantity.DAYS),
    (r"(peak_|max_)(gpu_)?((allocated_)?memory|mem)(_allocated)?(_usage)?(?P<unit>_bytes|_g?i?b)?", Quantity.PEAK),
    (r"(allocated_memory|memory_allocated)(?P<unit>_bytes|_gi?b)?", Quantity.STATE),
    (r"activations?_memory(?P<unit>_bytes|_gi?b)?", Quantity.ACTIVATIONS),
    (r"param(eter)?s?_opt(imizer)?_memory(?P<unit>_bytes|_gi?b)?", Quantity.PARAMETERS),
    (r"activation_memory_(?P<unit>pct)_of_tp_baseline", Quantity.ACTIVATION_SHARE),
)
_TIMES = {"s": 1.0, "sec": 1.0, "seconds": 1.0, "ms": 1e-3, "us": 1e-6, "min": 60.0, "h": 3600.0, "days": 86400.0}
_BYTES = {"b": 1.0, "bytes": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30}
_FLOPS = {"g": 1e9, "gflop": 1e9, "t": 1e12, "tflop": 1e12, "p": 1e15, "pflop": 1e15, "e": 1e18, "eflop": 1e18}
_SHARES = {"%": 1e-2, "pct": 1e-2, "percent": 1e-2, "fraction": 1.0}
_RATES = {"": 1.0, "k": 1e3, "m": 1e6}
_PER_DEVICE = {
    Quantity.TOKENS: Quantity.TOKENS_EACH,
    Quantity.SAMPLES: Quantity.SAMPLES_EACH,
    Quantity.FLOPS: Quantity.FLOPS_EACH,
}


@dataclass(frozen=True)
class Reading:
    """What was measured.

    Attributes:
        quantity: what.
        value: in seconds, bytes, per second, or a share; for `DAYS` the seconds for one token.
    """

    quantity: Quantity
    value: float


def reading_of(row: Row) -> Reading:
    """Return what a row measured.

    Raises:
        Unusable: the metric or its unit is not known, or the value is no number above zero.
    """
    metric = row.text("metric").lower().replace(" ", "_").replace("-", "_").replace("/", "_per_")
    if not metric:
        raise Unusable("no metric is named")
    unit = row.text("unit").lower()
    for pattern, quantity in _METRICS:
        match = re.fullmatch(pattern, metric)
        if match:
            value = row.number("value")
            if value is None:
                raise Unusable("there is no value")
            found = match.groupdict()
            per_device = bool(re.search(r"/\s*(gpu|device)", unit))
            quantity = _PER_DEVICE.get(quantity, quantity) if per_device else quantity
            scale = _scale(quantity, unit, (found.get("unit") or "").strip("_"), metric)
            if quantity is Quantity.DAYS:
                scale /= float(found["tokens"]) * 1e9
            return Reading(quantity, value * scale)
    raise Unusable(f"'{metric}' is not predicted")


def _scale(quantity: Quantity, unit: str, named: str, metric: str) -> float:
    """Return what a value is multiplied by; the unit's column counts, else what the metric's name says."""
    text = re.sub(r"\(.*?\)", "", unit).strip()
    text = re.sub(r"/\s*(gpu|device)s?$", "", text).strip()
    if quantity in (Quantity.TOKENS, Quantity.TOKENS_EACH, Quantity.SAMPLES, Quantity.SAMPLES_EACH):
        match = re.fullmatch(r"([km]?)\s*(tok(en)?s?|samples?|seq(uence)?s?)\s*(/|per)\s*s(ec(ond)?)?", text)
        prefix = match.group(1) if match else None if text else ""
        known, given = _RATES, prefix
    elif quantity in (Quantity.FLOPS, Quantity.FLOPS_EACH):
        known, given = _FLOPS, re.sub(r"s?(/s|ps)?$", "", text) if text else named
    elif quantity in (Quantity.STEP, Quantity.DAYS):
        known, given = _TIMES, text or named or "s"
    elif quantity in (Quantity.MODEL_SHARE, Quantity.HARDWARE_SHARE, Quantity.ACTIVATION_SHARE):
        known, given = _SHARES, text or named or "fraction"
    else:
        known, given = _BYTES, text or named
    if given is None or given not in known:
        raise Unusable(f"the unit '{unit}' of {metric} is not known" if unit else f"{metric} has no unit")
    return known[given]
