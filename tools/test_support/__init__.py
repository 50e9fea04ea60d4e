"""What only our own tests need: fakes of NCCL and of devices, ranks on GPUs, our groups through torch's functions."""
