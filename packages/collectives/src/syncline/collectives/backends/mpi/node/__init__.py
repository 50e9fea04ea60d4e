"""Collectives of ranks that share a node: shared memory, barriers in it, and the algorithms that use them.

The way of a tensor from `all_reduce(tensor)` into a window:

1. `host_group`: `HostGroup.ran_at_once` looks for the plan of calls like this one, and `serial_group` runs it in its order.
2. `node_transport`: at the first such call `NodeTransport.plan` makes the plan, by `choose` in `algorithm`.
3. `window_collective`: `WindowCollective.run` asks `windows` where the tensor lies.
4. `group_sync`: `GroupSync.verify` compares call and place with the other ranks, by the `ShmBarrier` of `shm_barrier`.
5. `window_collective`: this rank's share is reduced, and written into everybody's tensor; then the ranks wait once more.
"""
