"""Support for our own tests: fakes of NCCL and of devices, ranks on GPUs, our groups through torch's functions."""
