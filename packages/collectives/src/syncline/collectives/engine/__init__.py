"""The engine: signatures, calls, cancel scopes, the queue, plans, and the group on top of them."""
