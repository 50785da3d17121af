"""From the graph to calls: one file a family of operators; `walk` goes over the nodes."""
