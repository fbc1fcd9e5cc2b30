"""Text: documents from many sources, and the vocabulary that encodes them as token ids."""
