"""Files, commands, plots and tables: helpers without knowledge of models and text."""
