"""Runs a script of the gallery, then prints a digest of what its `main` returns: python example_runner.py SCRIPT [WORDS].

`main` returns the trained model, or its state. The digest is over all names and all bits, so equal digests are equal replicas.
"""

from __future__ import annotations

import hashlib
import os
import runpy
import sys
from collections.abc import Mapping

import torch


def digest(state: Mapping[str, torch.Tensor]) -> str:
    found = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        found.update(name.encode())
        found.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def main() -> None:
    del sys.argv[0]
    sys.path[0] = os.path.dirname(sys.argv[0])
    trained = runpy.run_path(sys.argv[0])["main"]()
    state = trained.state_dict() if isinstance(trained, torch.nn.Module) else trained
    print(f"digest {digest(state)}", flush=True)


if __name__ == "__main__":
    main()
