"""From answers to samples with a loss mask, and from samples to one data set."""
