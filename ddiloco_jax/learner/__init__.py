"""A learner: the training loop and its link to the syncer."""
