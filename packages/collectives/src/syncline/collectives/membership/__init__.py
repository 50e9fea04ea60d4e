"""Replace a group after ranks were lost, or when processes join: agree on the members of the next group, and connect them."""
