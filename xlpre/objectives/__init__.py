"""Training objectives: what is predicted from what, as ranks and targets. The model is independent of the objective."""
