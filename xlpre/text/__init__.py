"""Strings: documents from anywhere, and the vocabulary that turns them into token ids."""
