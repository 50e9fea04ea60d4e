"""Collectives of ranks that share a node, in shared memory.

A window is memory that all ranks of the node have mapped. `all_reduce(tensor)` takes these steps for a tensor in a window:

1. `engine.host_group`: `HostGroup` runs the plan of the call's signature when it is the call's turn.
2. `node_transport`: `NodeTransport.plan` makes the plan at the signature's first call. `choice` selects the algorithm.
3. `plan`: `NodePlan.run` finds the tensor's place in the windows of `memory`. The ranks compare the call and the place by
   `shared_sync`.
4. `window`: each rank reduces its slice, and writes the result to the tensors of all ranks.

For a small tensor, steps 3 and 4 differ: `NodePlan.run` looks for no window, and calls `Eager.run` of `eager`. Each rank writes
its tensor to shared memory, and the ranks compare the call. Then each rank reduces the tensors of all ranks.
"""
