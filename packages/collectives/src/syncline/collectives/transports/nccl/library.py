"""Find CuPy and its NCCL module. If a package is missing, return a text that says what to install."""

from __future__ import annotations

import ctypes
import functools
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

_PACKAGES = "cupy-cuda{major}x nvidia-nccl-cu{major}"
_OLDEST_CUPY = 14


def problem() -> str | None:
    """Return an error text, with a remedy, if NCCL cannot work in this process; else None.

    If torch sees no GPU, the function does not import CuPy.
    """
    cuda = torch.version.cuda
    if cuda is None:
        return "this torch is built without CUDA; install one of torch's CUDA wheels"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device; check the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES"
    return cupy_problem(int(cuda.split(".")[0]))


@functools.cache
def cupy_problem(cuda_major: int) -> str | None:
    """Return an error text if CuPy's NCCL cannot work with a torch for this CUDA version; else None."""
    packages = _PACKAGES.format(major=cuda_major)
    if find_spec("cupy") is None:
        return f"CuPy is not installed; `pip install {packages}` brings it and NCCL"
    preload_nccl()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # our own messages below say the same more clearly
            import cupy
            from cupy.cuda import nccl
    except ImportError as error:
        return f"CuPy cannot be imported ({' '.join(str(error).split())}); reinstall it: `pip install {packages}`"
    return _mismatch(cupy, nccl, cuda_major)


def _mismatch(cupy: Any, nccl: Any, cuda_major: int) -> str | None:
    found_major = cupy.cuda.runtime.runtimeGetVersion() // 1000
    packages = _PACKAGES.format(major=cuda_major)
    if found_major != cuda_major:
        return (
            f"CuPy {cupy.__version__} is for CUDA {found_major}, but torch {torch.__version__} is for CUDA {cuda_major}; "
            f"uninstall cupy-cuda{found_major}x, then `pip install {packages}`"
        )
    if not nccl.available or not hasattr(nccl, "NcclCommunicator"):
        return (
            f"CuPy {cupy.__version__} finds no NCCL library (libnccl.so.2); load the site's module, or "
            f"`pip install nvidia-nccl-cu{cuda_major}`"
        )
    # Older versions return the unique id as signed chars, which our code does not accept.
    if int(cupy.__version__.split(".")[0]) < _OLDEST_CUPY:
        return f"CuPy {cupy.__version__} is too old, expected {_OLDEST_CUPY} or newer; `pip install --upgrade {packages}`"
    return None


def preload_nccl() -> None:
    """Load NCCL's library before CuPy looks for it. If there is none, do nothing.

    The function tries the library that torch has loaded, then a library on the system's search path, then the library from
    PyPI.
    """
    for candidate in ("libnccl.so.2", *map(str, _from_pypi())):
        try:
            ctypes.CDLL(candidate, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        return


def _from_pypi() -> list[Path]:
    try:
        found = find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        # `find_spec` raises this if even the package `nvidia` is missing.
        return []
    folders = found.submodule_search_locations if found is not None else None
    return [Path(folder) / "lib" / "libnccl.so.2" for folder in folders or ()]


def load() -> Any:
    """Import and return the module `cupy.cuda.nccl`."""
    preload_nccl()
    from cupy.cuda import nccl

    return nccl
