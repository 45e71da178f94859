"""The optimizer's step on this rank's rows, and what is known of optimizers before it."""
