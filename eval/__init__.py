"""Stage 3: checkpoint -> export -> server -> measurements -> report."""
