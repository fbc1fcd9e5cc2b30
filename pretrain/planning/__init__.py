"""Plan of a pretraining: parameters, FLOPs, memory, time and communication."""
