"""Our groups under stock torch.distributed (see `registration`), and torch's groups as ours (see `torch_group`)."""
