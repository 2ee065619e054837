"""What a run will need: memory, time, communication."""
