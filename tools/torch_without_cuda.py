"""Makes an installed torch from PyPI, built for CUDA, work on CPUs without the CUDA packages, which take 4 GB.

torch's libraries name CUDA's as needed, so the loader refuses to load torch without them, although no code on a CPU calls into
them. For each missing library this script builds a small one with the same name, and with every symbol that torch's libraries
expect in it. Each function returns 0, "success"; the one that counts devices returns "no device". The script also drops the
CUDA packages from torch's own requirements, because pip would install them with the next package. Needs a C compiler and
binutils. For tests on a machine without a GPU only.

Run it with the Python of the environment whose torch is to be changed.
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
    """The names of CUDA's libraries that these libraries need, and that are not among them."""
    libraries = list(libraries)
    names = {name for library in libraries for name in re.findall(r"\(NEEDED\).*\[(.*)\]", _read(library, "-d"))}
    stems = ("libcu", "libnccl", "libnv")
    return {name for name in names if name.startswith(stems)} - {library.name for library in libraries} - {"libcuda.so.1"}


def versions_of(version_tables: Iterable[str]) -> dict[str, str]:
    """The versions of symbols that `readelf -V` lists as needed, each with its library."""
    found: dict[str, str] = {}
    for table in version_tables:
        for library, names in re.findall(r"Version: \d+  File: (\S+)  Cnt: \d+\n((?: +0x\w+: +Name: .*\n)*)", table):
            found.update(dict.fromkeys(re.findall(r"Name: (\S+)", names), library))
    return found


def expected_symbols(symbol_tables: Iterable[str]) -> dict[str, set[str]]:
    """The symbols that `readelf --dyn-syms` lists as undefined, by version; "" stands for CUDA's without a version."""
    found: dict[str, set[str]] = {}
    for table in symbol_tables:
        for name, version in re.findall(r" UND (\w+)(?:@(\S+))?", table):
            if version or OF_CUDA.match(name):
                found.setdefault(version, set()).add(name)
    return found


def build(name: str, symbols: dict[str, set[str]], folder: Path) -> None:
    """Build a library with these symbols, by version."""
    with tempfile.TemporaryDirectory() as scratch:
        code, script = Path(scratch) / "stub.c", Path(scratch) / "versions"
        lines = [
            f"int {symbol}(void) {{ return {NO_DEVICE if symbol == 'cudaGetDeviceCount' else 0}; }}"
            for symbol in sorted(set[str]().union(*symbols.values()))
        ]
        code.write_text("\n".join(lines))
        versions = {version: sorted(names) for version, names in symbols.items() if version}
        script.write_text("".join(f"{version} {{ global: {'; '.join(names)}; }};\n" for version, names in versions.items()))
        options = ["-fno-builtin", "-w", f"-Wl,-soname,{name}"]
        options += [f"-Wl,--version-script={script}"] if versions else []
        subprocess.run(["cc", "-shared", "-fPIC", *options, "-o", folder / name, code], check=True)


def leave_out_cuda() -> list[str]:
    """Change the torch of this environment; returns the names of the built libraries."""
    torch = distribution("torch")
    metadata = next(Path(str(path.locate())) for path in torch.files or () if path.name == "METADATA")
    lines = metadata.read_text().splitlines(keepends=True)
    metadata.write_text("".join(line for line in lines if not NOT_ON_CPU.match(line)))
    folder = Path(str(torch.locate_file("torch/lib")))
    libraries = sorted(folder.glob("*.so*"))
    symbols = expected_symbols(_read(library, "--dyn-syms") for library in libraries)
    library_of = {**versions_of(_read(library, "-V") for library in libraries), "": ""}
    missing = sorted(needed_elsewhere(libraries))
    for name in missing:
        build(name, {version: names for version, names in symbols.items() if library_of[version] in ("", name)}, folder)
    return missing


def _read(library: Path, option: str) -> str:
    return subprocess.run(["readelf", "-W", option, library], check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    lacking = [tool for tool in ("cc", "readelf") if shutil.which(tool) is None]
    if lacking:
        sys.exit(f"torch needs its CUDA packages here, for {' and '.join(lacking)} cannot be found; on Debian: apt install gcc")
    print("stand-ins for", ", ".join(leave_out_cuda()))
