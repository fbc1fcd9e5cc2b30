"""Training data: token ids on disk, the lanes that read them, and the layout of windows. It needs only numpy."""
