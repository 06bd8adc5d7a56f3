"""The engine: runs lowered graphs on tensors over a transport."""
