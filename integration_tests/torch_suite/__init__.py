"""Torch's own tests of torch.distributed, run over ours."""
