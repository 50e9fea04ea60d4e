"""Makes an installed torch from PyPI, built for CUDA, work on CPUs without the CUDA packages, which take 4 GB.

torch's libraries name those of CUDA as needed, so the loader refuses to load torch without them, though nothing on a CPU calls
into them. For each library that is missing this script builds a small one of the same name, with every symbol that torch's
libraries expect in it. Each function returns 0, "success"; the one that counts devices returns "no device". The
script also drops the CUDA packages from torch's own requirements, or pip would install them with the next package. Needs a C
compiler and binutils. For tests on a machine without a GPU only.

Run with the Python of the environment whose torch it shall change.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from importlib.metadata import distribution
from pathlib import Path

NOT_ON_CPU = re.compile(r"Requires-Dist: (nvidia-|cuda-|triton)")
OF_CUDA = re.compile(r"_*(cu|nccl|nvtx|nvrtc|nvJit|nvshmem|cudss)")
NO_DEVICE = 100  # cudaErrorNoDevice


def needed_elsewhere(libraries: Iterable[Path]) -> set[str]:
    """The names of the libraries of CUDA that these need and that do not lie among them."""
    libraries = list(libraries)
    names = {name for library in libraries for name in re.findall(r"\(NEEDED\).*\[(.*)\]", _read(library, "-d"))}
    stems = ("libcu", "libnccl", "libnv")
    return {name for name in names if name.startswith(stems)} - {library.name for library in libraries} - {"libcuda.so.1"}


def expected_symbols(symbol_tables: Iterable[str]) -> dict[str, set[str]]:
    """What `readelf --dyn-syms` lists as undefined, by the library that shall have it; "" stands for one that is not named."""
    found: dict[str, set[str]] = {}
    for table in symbol_tables:
        for name, library in re.findall(r" UND (\w+)(?:@(\S+))?", table):
            if library.startswith("lib") or (not library and OF_CUDA.match(name)):
                found.setdefault(library, set()).add(name)
    return found


def build(name: str, symbols: set[str], unversioned: set[str], folder: Path) -> None:
    """Build a library that has both kinds of symbols; those with a version have the library's name as theirs."""
    with tempfile.TemporaryDirectory() as scratch:
        code, versions = Path(scratch) / "stub.c", Path(scratch) / "versions"
        lines = [
            f"int {symbol}(void) {{ return {NO_DEVICE if symbol == 'cudaGetDeviceCount' else 0}; }}"
            for symbol in sorted(symbols | unversioned)
        ]
        code.write_text("\n".join(lines))
        versions.write_text(f"{name} {{ global: {' '.join(f'{symbol};' for symbol in sorted(symbols))} }};\n")
        options = ["-fno-builtin", "-w", f"-Wl,-soname,{name}"]
        options += [f"-Wl,--version-script={versions}"] if symbols else []
        subprocess.run(["cc", "-shared", "-fPIC", *options, "-o", folder / name, code], check=True)


def leave_out_cuda() -> list[str]:
    """Change the torch of this environment; the names of the libraries that were built."""
    torch = distribution("torch")
    metadata = next(Path(str(path.locate())) for path in torch.files or () if path.name == "METADATA")
    lines = metadata.read_text().splitlines(keepends=True)
    metadata.write_text("".join(line for line in lines if not NOT_ON_CPU.match(line)))
    folder = Path(str(torch.locate_file("torch/lib")))
    libraries = sorted(folder.glob("*.so*"))
    symbols = expected_symbols(_read(library, "--dyn-syms") for library in libraries)
    missing = sorted(needed_elsewhere(libraries))
    for name in missing:
        build(name, symbols.get(name, set()), symbols.get("", set()), folder)
    return missing


def _read(library: Path, option: str) -> str:
    return subprocess.run(["readelf", "-W", option, library], check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    lacking = [tool for tool in ("cc", "readelf") if shutil.which(tool) is None]
    if lacking:
        sys.exit(f"torch needs its CUDA packages here, for {' and '.join(lacking)} cannot be found; on Debian: apt install gcc")
    print("stand-ins for", ", ".join(leave_out_cuda()))
