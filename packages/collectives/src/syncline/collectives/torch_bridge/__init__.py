"""Syncline's groups in torch.distributed (see `registration`), and torch's groups in Syncline (see `torch_group`)."""
