"""Commands that fine-tune a pretrained model, and the tasks they know."""
