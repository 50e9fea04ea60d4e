"""Our process groups under stock torch.distributed. Importing this registers them; see `registration`.

::

    import syncline.collectives.torch_backend

    torch.distributed.init_process_group("syncline-mpi", init_method="mpi://")
"""

from .as_mpi import init_as_mpi
from .group_factory import share_default_group
from .monitored_barrier import monitored_barrier
from .registration import register
from .torch_process_group import TorchProcessGroup

__all__ = ["TorchProcessGroup", "init_as_mpi", "monitored_barrier", "register", "share_default_group"]
