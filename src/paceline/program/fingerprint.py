"""Fingerprint: the key under which a captured program is kept on disk.

A stale hit would be a silently wrong gradient, so the key covers everything a capture can depend on, and whatever
cannot be covered means no key, and so no cache. Values of parameters, buffers and batches are inputs of a program and
never part of its key.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.nn.modules import module as torch_module
from torch.utils import _pytree as pytree

from paceline.errors import FingerprintError
from paceline.program.digest import Digest
from paceline.program.sources import LoadedModules, content_hash, installed_distributions, own_sources_hash

_log = logging.getLogger(__name__)
_ENVIRONMENT = ("TORCH", "PYTORCH", "ATEN_", "CUDA_", "CUBLAS_", "CUDNN_", "NVIDIA_", "MKL_", "DNNL_", "ONEDNN_")
_ENVIRONMENT_OF_RUNS = (
    "TORCHELASTIC_",
    "TORCH_NCCL_",
    "TORCH_LOGS",
    "TORCH_TRACE",
    "TORCH_HOME",
    "TORCHINDUCTOR_CACHE",
)
_SIMPLE = (bool, int, float, complex, str, bytes, type(None))


@dataclass(frozen=True)
class Fingerprint:
    """The key of a program, and what it was made of.

    Attributes:
        key: SHA-256, hexadecimal.
        ingredients: the hash of each ingredient by its name; two keys are compared by them.
        packages: installed packages that the module's classes come from: their loaded source files count too.
    """

    key: str
    ingredients: dict[str, str]
    packages: tuple[str, ...]


def fingerprint(
    module: nn.Module, batch: tuple[Any, ...] | Mapping[str, Any], extra: Mapping[str, Any]
) -> Fingerprint | None:
    """Return the fingerprint of capturing `module` on `batch`, or None, with a line in the log, when there is none.

    The same module in the same state has the same fingerprint in every process on the machine.

    Args:
        module: what is captured.
        batch: an example batch; of its tensors the shapes, strides, dtypes and devices count, all else by value.
        extra: whatever else the caller's program depends on (plan, autocast dtype, rank, ...).
    """
    try:
        return fingerprint_or_raise(module, batch, extra)
    except FingerprintError as error:
        _log.info("the program is not cached: %s", error)
        return None


def fingerprint_or_raise(
    module: nn.Module, batch: tuple[Any, ...] | Mapping[str, Any], extra: Mapping[str, Any]
) -> Fingerprint:
    """Do what `fingerprint` does, and say what is in the way.

    Raises:
        FingerprintError: something has no hash that is the same in every process.
    """
    loaded = LoadedModules()
    inputs = [t for t in pytree.tree_leaves(batch) if isinstance(t, Tensor)]
    described = [*module.parameters(), *module.buffers(), *inputs]
    structure = Digest(described, loaded)

    def hash_of(values: Mapping[str, Any]) -> str:
        digest = Digest(described, loaded)
        for name, value in values.items():
            digest.add(name)
            digest.add(value)
        return digest.hexdigest()

    makers: dict[str, Callable[[], str]] = {
        "versions": lambda: hash_of(_versions()),
        "distributions": lambda: hash_of(installed_distributions()),
        "paceline": own_sources_hash,
        "state": lambda: hash_of(_torch_state(described)),
        "environment": lambda: hash_of(_environment()),
        "sources": lambda: hash_of({name: content_hash(m) for name, m in loaded.user_modules.items()}),
        "module": lambda: _added(structure, (module, batch)),
        "globals": lambda: hash_of(_simple_globals(loaded, structure)),
        "extra": lambda: hash_of(extra),
    }
    ingredients = {}
    for name, make in makers.items():
        try:
            ingredients[name] = make()
        except FingerprintError as error:
            raise FingerprintError(f"{name}: {error}") from error
    key = hashlib.sha256(repr(sorted(ingredients.items())).encode()).hexdigest()
    return Fingerprint(key, ingredients, tuple(sorted(structure.packages)))


def _added(digest: Digest, value: Any) -> str:
    digest.add(value)
    return digest.hexdigest()


def _versions() -> dict[str, Any]:
    return {
        "torch": torch.__version__,
        "commit": torch.version.git_version,
        "cuda": torch.version.cuda,
        "python": sys.version,
        "machine": platform.machine(),
        "optimize": sys.flags.optimize,
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }


def _torch_state(tensors: list[Tensor]) -> dict[str, Any]:
    """Return what is set in the running process and changes which operators a forward pass becomes."""
    backends = torch.backends
    devices = sorted({t.device.type for t in tensors} | {"cpu", "cuda"})
    return {
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "autocast": [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices if d != "meta"],
        "autocast cache": torch.is_autocast_cache_enabled(),
        "grad": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]  # set where no checker sees it
        ),
        "precision": torch.get_float32_matmul_precision(),
        "sdp": (
            torch._C._get_flash_sdp_enabled(),
            torch._C._get_mem_efficient_sdp_enabled(),
            torch._C._get_math_sdp_enabled(),
            torch._C._get_cudnn_sdp_enabled(),
            torch._C._get_sdp_priority_order(),
        ),
        "matmul": (
            backends.cuda.matmul.allow_tf32,
            backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
            backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        ),
        "cudnn": (
            backends.cudnn.enabled,
            backends.cudnn.benchmark,
            backends.cudnn.deterministic,
            backends.cudnn.allow_tf32,
        ),
        "mkldnn": (torch._C._get_mkldnn_enabled(), backends.mha.get_fastpath_enabled()),
        "functorch": functorch_config.get_hash(),
        "modes": [type(mode).__qualname__ for mode in _function_modes()],
        "hooks": [list(table.values()) for name, table in sorted(vars(torch_module).items()) if _is_hooks(name, table)],
        "gpus": [
            torch.cuda.get_device_name(device) for device in sorted({t.device for t in tensors if t.is_cuda}, key=str)
        ],
    }


def _function_modes() -> list[object]:
    return [torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())]


def _is_hooks(name: str, table: Any) -> bool:
    return name.startswith("_global_") and name.endswith("_hooks") and isinstance(table, dict)


def _environment() -> dict[str, str]:
    """Return the variables that PyTorch and its libraries read, without those that differ between runs of one job."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(_ENVIRONMENT) and not name.startswith(_ENVIRONMENT_OF_RUNS)
    }


def _simple_globals(loaded: LoadedModules, structure: Digest) -> dict[str, Any]:
    """Return the plain numbers, texts and flags at the top of the user's own modules, as they are now.

    Only those whose name occurs in code that the module can reach: a script's clock or rank would make every start new.
    """
    return {
        f"{module}.{name}": value
        for module, namespace in loaded.user_modules.items()
        for name, value in sorted(vars(namespace).items())
        if type(value) in _SIMPLE and not name.startswith("__") and structure.mentions(name)
    }
