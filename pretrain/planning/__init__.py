"""Plan of a pretraining run: parameters, FLOPs, memory, time and communication."""
