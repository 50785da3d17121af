"""What a program computes, apart from how: sizes that stay open, and programs over them."""
