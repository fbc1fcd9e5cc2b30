"""Model: embedding, attention, memory, layers and heads. Independent of text, objectives and DeepSpeed."""
