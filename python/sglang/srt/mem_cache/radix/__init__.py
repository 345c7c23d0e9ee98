"""Parts of the prefix tree: token keys, nodes, recency queues."""
