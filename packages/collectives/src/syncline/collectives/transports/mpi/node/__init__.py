"""Collectives of ranks that share a node: shared memory, coming together in it, and the algorithms that use it.

The way of a tensor from `all_reduce(tensor)` into a window:

1. `engine.group`: `HostGroup` finds the plan of the call's signature, and runs it when it is the call's turn.
2. `node_transport`: at the first such call `NodeTransport.plan` makes the plan; `choose` in `plan` says which.
3. `plan`: `NodePlan.run` asks `windows` where the tensor lies, and lets the ranks compare call and place, by `shared_sync`.
4. `window`: this rank's share is reduced, and written into everybody's tensor; then the ranks wait once more.
"""
