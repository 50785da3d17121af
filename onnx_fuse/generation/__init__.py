"""Text from a decoder: the roles of its inputs, runs over its cache, and the next token."""
