"""Collectives of ranks that share a node: shared memory, a barrier in shared memory, and the algorithms that use both.

A window is memory that all ranks of the node have mapped. These are the steps of `all_reduce(tensor)` for a tensor in a window:

1. `engine.host_group`: `HostGroup` finds the plan of the call's signature, and runs it when it is the call's turn.
2. `node_transport`: `NodeTransport.plan` makes the plan at the signature's first call. `plan.choose` selects the algorithm.
3. `plan`: `NodePlan.run` finds the tensor's place with `Windows`. The ranks compare the call and the place by `shared_sync`.
4. `window`: each rank reduces its slice, and writes the result to the tensors of all ranks. Then the ranks wait for one
   another.

For a small tensor, `eager` replaces steps 3 and 4. Each rank writes its tensor and the digest of the call to shared memory. The
ranks wait for one another and compare the digests. Then each rank reads and reduces the tensors of all ranks.
"""
