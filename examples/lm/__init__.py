"""The parts of examples/train_lm.py, one concept per file."""
