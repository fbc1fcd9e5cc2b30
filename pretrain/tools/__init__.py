"""Library code of the commands: explanations, ablations, reports, preparation, debugging."""
