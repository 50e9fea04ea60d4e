"""Support for our own tests: fakes of NCCL and of devices, jobs of several ranks, our groups through torch's functions."""
