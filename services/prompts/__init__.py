"""From data sets of any shape to one set of prompts with token ids."""
