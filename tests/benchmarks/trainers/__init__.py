"""Two trainers of the same drafter on the same data and the same features: this project's and SpecForge's."""
