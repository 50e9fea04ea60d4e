"""Both ways between our groups and torch's: ours under stock torch.distributed (`registration`), torch's seen as ours (`torch_group`)."""
