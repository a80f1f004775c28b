"""The pipeline: a batch in micro-batches, a schedule as data, and the engine that executes it."""
