"""Model folders, and conversion from and to the formats of Hugging Face and TensorFlow."""
