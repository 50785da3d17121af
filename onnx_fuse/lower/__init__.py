"""How a graph becomes calls: a file serves a family of operators, `walk` visits the nodes."""
