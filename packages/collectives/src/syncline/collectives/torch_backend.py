"""Import this module to register Syncline's backends with torch.distributed; see `torch_bridge.registration`.

::

    import syncline.collectives.torch_backend

    torch.distributed.init_process_group("syncline-mpi", init_method="mpi://")
"""

from .torch_bridge.as_mpi import init_as_mpi
from .torch_bridge.group_factory import share_default_group
from .torch_bridge.registration import monitored_barrier, register
from .torch_bridge.torch_process_group import TorchProcessGroup

__all__ = ["TorchProcessGroup", "init_as_mpi", "monitored_barrier", "register", "share_default_group"]
