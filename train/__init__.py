"""Stage 2: states -> batches -> drafter -> checkpoint."""
