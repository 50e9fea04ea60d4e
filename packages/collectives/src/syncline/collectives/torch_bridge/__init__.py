"""Use our groups in torch.distributed (see `registration`), and torch's groups as our groups (see `torch_group`)."""
