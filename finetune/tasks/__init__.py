"""Tasks: where examples come from, which head reads them, and how predictions are measured."""
