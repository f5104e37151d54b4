"""Stage 1: prompts -> conversations -> rows -> states."""
