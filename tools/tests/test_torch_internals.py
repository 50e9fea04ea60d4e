"""The check of where private names of torch stand: names that it finds, and names that it lets pass."""

from __future__ import annotations

import pytest

from check_torch_internals import violations


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import torch\ntorch._C.Future", "torch._C"),
        ("import torch.distributed as dist\ndist.Backend._plugins", "dist.Backend._plugins"),
        ("from torch.autograd import Variable\nVariable._execution_engine", "Variable._execution_engine"),
        ("from torch.nn.modules.batchnorm import _BatchNorm", "torch.nn.modules.batchnorm._BatchNorm"),
        ("import torch._dynamo", "torch._dynamo"),
        ("m: Any = import_module('torch.distributed.rendezvous')\nm._rendezvous_handlers", "m._rendezvous_handlers"),
        ("r = import_module('torch.distributed.rendezvous')\nr._rendezvous_handlers", "r._rendezvous_handlers"),
    ],
)
def test_a_private_name_is_found(source: str, name: str) -> None:
    assert name in [found for _, found in violations(source)]


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.ops._c10d_functional.all_reduce",
        "import torch\ntorch.__version__",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from torch._C import Future",
        "from .torch_internals import foreach_copy\nself._group",
    ],
)
def test_other_names_pass(source: str) -> None:
    assert list(violations(source)) == []
