"""Collectives of ranks that share a node: shared memory, a barrier in shared memory, and the algorithms that use both.

The steps of `all_reduce(tensor)` for a tensor in a window (memory that all ranks of the node have mapped):

1. `engine.host_group`: `HostGroup` finds the plan of the call's signature, and runs it when it is the call's turn.
2. `node_transport`: `NodeTransport.plan` makes the plan at the signature's first call. `plan.choose` selects the algorithm.
3. `plan`: `NodePlan.run` asks `Windows` for the tensor's place. The ranks compare call and place, by `shared_sync`.
4. `window`: each rank reduces its slice, and writes the result into all ranks' tensors. Then the ranks wait for each other.

For a small tensor, `eager` replaces steps 3 and 4. Each rank writes its tensor and the digest of the call to shared memory. The
ranks wait for each other and compare the digests. Then each rank reads the tensors of all ranks, and reduces them.
"""
