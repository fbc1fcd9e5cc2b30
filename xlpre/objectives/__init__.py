"""Training objectives, expressed as ranks and targets. The model is independent of the objective."""
