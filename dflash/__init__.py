"""The DFlash drafter as a library: draft model, block objective, training, decoding, export."""
