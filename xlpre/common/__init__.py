"""Files, commands, plots and tables: helpers that are independent of models and text."""
