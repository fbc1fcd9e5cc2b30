"""Configuration: files, command line, and documentation of the settings."""
